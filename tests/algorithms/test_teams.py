"""Several teams with their own algorithms: who acts for whom, what one team is alone, and what is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.algorithms import MAPPO, QMIX, Prioritized, Replay, Teams
from msrl_jax.algorithms.teams import members_of, random_team
from msrl_jax.envs import Box, Discrete, MaskedObservation, VectorizedAgents
from tests.support.agents import make_still
from tests.support.many_agents import Homes
from tests.support.marking import fragments_of

TEXT = "ippo:hidden_sizes=(8,),num_epochs=2,num_minibatches=2"
SMALL = {"num_envs": 16, "unroll_length": 8}


@dataclasses.dataclass(frozen=True)
class Wishes:
    """Four agents; the reward of agent `i` is 1 for action `i`, and only this action and 0 are legal."""

    agents = ("red_0", "blue_0", "red_1", "blue_1")
    observation_space, action_space = Box(0, 1, (4,)), Discrete(4)

    def reset(self, key):
        return jnp.int32(0), jnp.eye(4)

    def step(self, key, state, action):
        return state + 1, jnp.eye(4), (action == jnp.arange(4)).astype(jnp.float32), jnp.zeros(4, bool), state >= 7

    def action_mask(self, state):
        return jnp.eye(4, dtype=bool).at[:, 0].set(True)


@pytest.mark.slow
def test_a_team_of_all_agents_is_the_algorithm_alone():
    alone = make_still("ippo", Homes(), **SMALL, hidden_sizes=(8,), num_epochs=2, num_minibatches=2)
    team = make_still("teams", Homes(), **SMALL, teams={"walker": TEXT})
    ends = [
        jax.jit(lambda key, a=agent: jax.lax.scan(lambda s, _: a.iteration(s), a.init(key), None, length=2))(jax.random.key(5))
        for agent in (alone, team)
    ]
    jax.tree.map(np.testing.assert_array_equal, ends[0][0].params["agents"], ends[1][0].params["walker"])
    jax.tree.map(np.testing.assert_array_equal, ends[0][1], ends[1][1])


@pytest.mark.slow
def test_every_team_acts_for_its_agents_and_learns_from_their_rewards():
    """With every other agent in a team: one team learns its wishes, the other keeps acting at random, so half as often."""
    fields = TEXT.partition(":")[2] + ",learning_rate=0.01"
    result = msrl.train("teams", Wishes(), total_steps=40 * 128, teams={"red": f"ippo:{fields}", "blue": "random"}, **SMALL)
    last = {name: column[-1] for name, column in result.history.items()}
    assert last["episode_return/red"] > 14.5  # of 16; agent 0 has one legal action
    # Coin flips: 4 standard deviations of 2 x 8 flips in 16 environments at least; a false alarm in 15,000 runs.
    assert abs(last["episode_return/blue"] - 8) < 2
    np.testing.assert_allclose(last["episode_return/red"] + last["episode_return/blue"], last["episode_return"], rtol=1e-5)
    obs = MaskedObservation(np.eye(4, dtype=np.float32), np.asarray(Wishes().action_mask(0)))
    action, carry = result.act_with_carry(obs)
    again, _ = result.act_with_carry(obs, carry)
    assert action[0] == again[0] == 0 and action[2] == again[2] == 2
    assert not [metric for metric in result.history if metric.endswith("/blue") and not metric.startswith(("ep", "eval"))]


def test_random_actions_are_legal_and_uniform():
    """Chi-square over 4,096 draws, beyond its quantile at a false alarm of 1e-6; fixed keys."""
    team = random_team(VectorizedAgents(Wishes(), 1024), 4, 1, seed=0)
    obs = MaskedObservation(jnp.zeros((1024, 4, 4)), jnp.broadcast_to(jnp.array([True, False, True, True]), (1024, 4, 4)))
    action, _ = team.choose_action((), (), obs, None, team.initial_carry(1024))
    counts = np.bincount(np.asarray(action).ravel(), minlength=4)
    assert action.shape == (1024, 4) and counts[1] == 0
    expected = 4096 / 3
    assert ((counts[[0, 2, 3]] - expected) ** 2 / expected).sum() < 27.6


@pytest.mark.parametrize("key", [None, jax.random.key(1)], ids=["greedy", "random"])
def test_teams_draw_actions_independently_of_each_other(key):
    agent = make_still("teams", Wishes(), **SMALL, teams={"red": TEXT, "blue_0": "random", "blue_1": "random"})
    start = jax.eval_shape(agent.init, jax.random.key(0))
    start = start._replace(params=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), start.params))
    obs = MaskedObservation(jnp.zeros((64, 4, 4)), jnp.ones((64, 4, 4), bool))
    action, _ = jax.jit(lambda obs: agent.act(start, obs, key, agent.initial_carry(64)))(obs)
    assert 4 < (action[:, 1] == action[:, 3]).sum() < 32 and len(np.unique(action[:, [1, 3]])) == 4


def test_a_run_is_long_enough_for_every_team():
    waiting = "vdn:hidden_sizes=(8,),trace_length=4,batch_size=4,replay.learning_starts=300"
    agent = make_still("teams", Wishes(), **SMALL, teams={"red": waiting, "blue": "random"})
    assert agent.learning_starts == 304  # 19 steps of 16 environments


@pytest.mark.parametrize(
    ("teams", "message"),
    [
        ({"red": TEXT}, r"agent 'blue_0' of Wishes has no learner; add a team for it, such as blue=random"),
        ({"red": TEXT, "all": "vdn:agents=*"}, r"agent 'red_0' of Wishes has 2 learners, teams 'red' and 'all'"),
        ({"red": TEXT, "blue": TEXT, "green": TEXT}, r"no agent's name begins with 'green', the name of a team; the agents of"),
        ({"red": TEXT, "blue": "ippo:agents=blue_0|bleu_1"}, r"no agent fits agents=bleu_1 of team 'blue'; the agents of"),
        ({"red": TEXT, "blue": "ippo:agents=('blue_0','blue_1')"}, r"team 'blue': cannot read agents in .*agents=ally_"),
        ({"red": TEXT, "blue": "ippo:gamma"}, r"team 'blue': cannot read 'gamma' in 'ippo:gamma'; write ippo:field=value"),
        ({"red": TEXT, "blue": "ippo:a=(,b"}, r"team 'blue': cannot read .*; write ippo:key=value,key=value"),
        ({"red": TEXT, "a=b": "ippo"}, r"a team cannot have the name 'a=b'"),
        ({"red": "random", "blue": "random"}, r"no team of .* learns"),
        ({}, r"Teams.teams is empty; give each agent of Wishes a team: red_0, blue_0"),
        ({"red": "ppo", "blue": "random"}, r"team 'red' has the algorithm 'ppo' \(did you mean 'ippo'\?\); teams"),
        ({"red": "ippo:num_envs=3", "blue": "random"}, r"team 'red' sets num_envs, which all teams share"),
        ({"red": "ippo:num_minibatches=3", "blue": "random"}, r"team 'red': IPPO.unroll_length=8 cannot be split"),
        ({"red": "random:epsilon=1", "blue": TEXT}, r"team 'red' sets epsilon, but random actions need no settings"),
        (("red", "blue=random"), r"Teams.teams has 'red'; write TEAM=ALGORITHM"),
        (("red=random", "red=ippo"), r"names a team twice"),
    ],
)
def test_bad_teams_are_refused(teams, message):
    with pytest.raises(ValueError, match=message):
        Teams(**SMALL, teams=teams).build(Wishes())


def test_agents_by_patterns():
    teams = {"one": "ippo:agents=a_[12] | c-1.5,hidden_sizes=(8,)", "b": "vdn:batch_size=8,agents=1_0|b*"}
    entries = Teams(teams=teams).entries()
    assert members_of(("b_0", "a_1", "c-1.5", "1_0"), entries, "Any") == {"one": (1, 2), "b": (0, 3)}
    assert entries[0].config.hidden_sizes == (8,) and entries[1].config.batch_size == 8


def test_configs_and_texts_are_the_same_teams():
    """They become one text, which JSON keeps, without fields that are the defaults and with all others."""
    mappo = MAPPO(learning_rate=7e-4, hidden_sizes=(8, 8), core="gru", max_grad_norm=None)
    qmix = QMIX(replay=Replay(priorities=Prioritized(beta=None)))
    forms = [
        {"red": mappo, "blue": qmix, "green": "random"},
        {
            "red": "mappo:learning_rate=7e-4,hidden_sizes=(8, 8),core=gru,max_grad_norm=None,clip_ratio=0.2",
            "blue": "qmix:replay=replay(priorities=prioritized(beta=None))",
            "green": "random",
        },
        "red=mappo:core='gru',learning_rate=0.0007,max_grad_norm=None,hidden_sizes=(8,8) "
        "blue=qmix:replay=replay(priorities=prioritized(beta=None)) green=random",
    ]
    first, *others = [Teams(**SMALL, teams=form) for form in forms]
    assert [hash(first)] * 2 == [hash(other) for other in others] and all(first == other for other in others)
    assert Teams(**SMALL, teams=json.loads(json.dumps(first.teams))) == first
    red, blue, green = (entry.config for entry in first.entries())
    assert red == dataclasses.replace(mappo, **SMALL) and blue == dataclasses.replace(qmix, **SMALL) and green is None
    patterns = Teams(teams={"a": "ippo:agents=a_[01] | b,num_epochs=2", "b": "vdn:exploration=per_env:base=0.3"})
    assert patterns.teams == ("a=ippo:agents=a_[01]|b,num_epochs=2", "b=vdn:exploration=per_env(base=0.3)")


def test_fragments_have_the_names_of_their_teams():
    agent = make_still("teams", Wishes(), **SMALL, teams={"red": TEXT, "blue": TEXT})
    names = fragments_of(agent.iteration, jax.eval_shape(agent.init, jax.random.key(0)))
    assert {"env_step", "choose/red", "choose/blue", "gradients/red", "gradients/blue"} <= set(names)
    assert len(names) == len(set(names))


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_teams(tmp_path):
    """In every form of the same teams; the learning rate of a team that falls over another number of steps is told."""
    teams = {"red": TEXT + ",anneal_learning_rate=True", "blue": "random"}
    run = {"out": tmp_path / "run", "eval_episodes": 0, **SMALL}
    msrl.train("teams", Wishes(), total_steps=256, teams=teams, **run)
    with pytest.warns(msrl.run.ResumeWarning, match="total_steps changes from 256 to 512, which rescales the"):
        result = msrl.train("teams", Wishes(), total_steps=512, teams=teams, resume=True, **run)
    assert result.history["iteration"][-1] == 4
    drawn = {line.get_label(): line.get_xydata()[:, 1] for line in msrl.plot(result).axes[0].lines}
    np.testing.assert_array_equal(drawn["team red"], result.history["episode_return/red"])
    np.testing.assert_array_equal(drawn["team blue"], result.history["episode_return/blue"])
    with pytest.raises(ValueError, match=r"cannot resume with teams="):
        msrl.train("teams", Wishes(), total_steps=512, teams=teams | {"blue": TEXT}, resume=True, **run)


@pytest.mark.long
def test_totals_do_not_rank_opposing_teams(tmp_path):
    """Opposing teams have no best checkpoint and no best member; the returns of each are shown."""
    result = msrl.train(
        "teams",
        Wishes(),
        total_steps=512,
        seeds=2,
        eval_every=128,
        out=tmp_path / "run",
        teams={"red": TEXT, "blue": "random"},
        policy="GPUOnly:num_devices=1",
        **SMALL,
    )
    with pytest.raises(ValueError, match=r"does not rank members; choose one: member=0"):
        result.evaluate(4)
    assert result.evaluate(4, member=1).team_returns["red"].shape == (4,)
    assert "(red " in repr(result) and ", blue " in repr(result)
    with pytest.raises(ValueError, match=r"no checkpoint 'best'"):
        msrl.Result.load(tmp_path / "run", env=Wishes(), checkpoint="best")
