"""Evaluations of several agents: the returns of all, of each agent and of each team, in results, histories and files."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import algorithms, envs
from msrl_jax.cli import main
from msrl_jax.envs.registry import _factories
from msrl_jax.run.disk.store import read_evaluation
from msrl_jax.run.evaluation.evaluate import Behavior, Evaluation, make_evaluator
from tests.support.leaving import Leaving

IPPO = "ippo:num_epochs=1,num_minibatches=1,hidden_sizes=(4,)"
LIMIT, LEAVE = 4, np.array([1, 3, 9])


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A run of two teams, with an evaluation after every second of its four chunks."""
    _factories["Leaving-test"] = lambda: Leaving(leave=(1, 3, 9), limit=LIMIT)
    folder = tmp_path_factory.mktemp("teams") / "run"
    yield msrl.train(
        "teams",
        "Leaving-test",
        teams={"one": IPPO, "others": f"{IPPO},agents=t*"},
        num_envs=4,
        unroll_length=6,
        total_steps=4 * 24,
        chunk=1,
        eval_episodes=5,
        eval_every=48,
        out=folder,
        progress=False,
        devices=jax.devices()[:1],
    )
    del _factories["Leaving-test"]


def by_hand(result):
    """The return of each agent in an episode of `Leaving`, which depends on nothing but the greedy actions. `[3]`"""
    env, returns = Leaving(leave=(1, 3, 9), limit=LIMIT), np.zeros(3)
    for time in range(LIMIT):
        mask = np.asarray(env.action_mask(np.int32(time))) | (time >= LEAVE)[:, None]
        action = np.asarray(result.act(envs.MaskedObservation(env._observe(np.int32(time)), mask)))
        returns += np.where(time < LEAVE, action + 1, 0)
    return returns


@pytest.mark.long
def test_returns_of_agents_and_teams_are_those_of_their_rewards(played):
    agents, found = by_hand(played), played.evaluation
    assert found.agent_returns.shape == (5, 3) and list(found.team_returns) == ["one", "others"]
    np.testing.assert_array_equal(found.agent_returns, np.tile(agents, (5, 1)))
    np.testing.assert_array_equal(found.team_returns["one"], [agents[0]] * 5)
    np.testing.assert_array_equal(found.team_returns["others"], [agents[1:].sum()] * 5)
    np.testing.assert_array_equal(found.returns, [agents.sum()] * 5)
    again = played.evaluate(3)
    np.testing.assert_array_equal(again.agent_returns, np.tile(agents, (3, 1)))
    assert again.mean_length == LIMIT


class TolerantStream:
    """Two agents who are paid 1 and 2 in every step of an episode of one to six steps."""

    agents = ("one", "two")
    observation_space, action_space = envs.Box(0, 9, (2,)), envs.Discrete(2)

    def reset(self, key):
        return jax.random.randint(key, (), 1, 7), jnp.zeros((2, 2))

    def step(self, key, state, action):
        over = state <= 1
        return state - 1, jnp.zeros((2, 2)), jnp.array([1.0, 2.0]), jnp.stack([over, over]), jnp.asarray(False)


def test_returns_of_agents_stop_at_the_end_of_each_episode():
    env = TolerantStream()
    agent = algorithms.get("ippo")(num_envs=4, unroll_length=4, num_minibatches=1, hidden_sizes=(4,)).build(env)
    found = make_evaluator(Behavior(agent, env), 32)(jax.jit(agent.init)(jax.random.key(0)), jax.random.key(1))
    assert len(set(found.lengths.tolist())) > 3
    np.testing.assert_array_equal(found.agent_returns, found.lengths[:, None] * [1, 2])
    np.testing.assert_array_equal(found.returns, found.lengths * 3)


@pytest.mark.long
def test_histories_and_summaries_have_the_returns_of_teams(played):
    history, agents = played.history, by_hand(played)
    for name, value in {"": agents.sum(), "/one": agents[0], "/others": agents[1:].sum()}.items():
        column = history[f"eval_return{name}"]
        assert np.isnan(column).tolist() == [True, False, True, False] and column[-1] == value
        assert played.summary()[f"eval_return{name}"] == value
    for name in ("episode_return", "eval_return"):
        total = history[f"{name}/one"] + history[f"{name}/others"]
        np.testing.assert_allclose(total, history[name], rtol=1e-6)
    assert played.summary()["episode_return/one"] == history["episode_return/one"][-1]
    columns = (played.folder / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"eval_return/one", "eval_return/others"} <= {*columns}


@pytest.mark.long
def test_saved_evaluations_come_back(played, capsys):
    loaded = msrl.Result.load(played.folder)
    written = read_evaluation(json.loads((played.folder / "evaluation.json").read_text()))
    for other in (loaded.evaluation, written):
        assert other is not None and list(other.team_returns) == ["one", "others"]
        np.testing.assert_array_equal(other.agent_returns, played.evaluation.agent_returns)
        np.testing.assert_array_equal(other.team_returns["others"], played.evaluation.team_returns["others"])
    assert main(["evaluate", str(played.folder), "--episodes", "2"]) == 0
    shown = capsys.readouterr().out
    assert main(["evaluate", str(played.folder), "--episodes", "2", "--json"]) == 0
    outcome, agents = json.loads(capsys.readouterr().out), by_hand(played)
    assert f", of one {agents[0]:.3f} ± 0.000, of others {agents[1:].sum():.2f} ± 0.00, length 4.0" in shown
    assert outcome["agent_returns"] == [agents.tolist()] * 2 and outcome["eval_return/one"] == agents[0]
    assert outcome["team_returns"] == {"one": [agents[0]] * 2, "others": [agents[1:].sum()] * 2}


def test_evaluations_of_older_versions_are_read():
    old = read_evaluation({"returns": [1.0, 2.0], "lengths": [3, 4], "finished": [True, False]})
    assert old is not None and old.agent_returns is None and old.team_returns == {}
    assert old.means == {"eval_return": 1.5, "eval_length": 3.5}


def test_a_game_shows_what_each_agent_gains():
    rewards = np.float32([[1, -1], [2, -2], [2, -2], [-1, 1]])
    game = Evaluation(rewards.sum(1), np.full(4, 3), np.ones(4, bool), rewards)
    assert str(game) == "Evaluation(4 episodes: return 0.0 ± 0.0, of each agent [1.0, -1.0] ± [1.2, 1.2], length 3.0)"
    members = Evaluation(np.zeros((2, 4)), np.full((2, 4), 3), np.ones((2, 4), bool), np.stack([rewards, -rewards]))
    assert ", of each agent [[1.0, -1.0], [-1.0, 1.0]] ± [[1.2, 1.2], [1.2, 1.2]], " in str(members)
