"""Self-play: who sits where, what the pool holds, whose experience counts, and equilibria of small games."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linprog

import msrl_jax as msrl
from msrl_jax.algorithms import MAPPO, Progress
from msrl_jax.envs import VectorizedAgents
from msrl_jax.fragments.counters import counter
from msrl_jax.games import SelfPlay
from msrl_jax.games.self_play import draw_slots, enter, no_games, replicator_dynamics, two_players
from msrl_jax.games.small_games import KuhnPoker, RockPaperScissors
from msrl_jax.loops.teams import Experience, Now
from tests.support.agents import make_still, still
from tests.support.runs import assert_same_state

SMALL = {"num_envs": 8, "unroll_length": 4, "hidden_sizes": (4,), "num_epochs": 1, "num_minibatches": 2, "num_opponents": 2}


START = Progress(counter())


def build(env, **options):
    return make_still("self_play", env, **{**SMALL, **options})


def team(**options):
    config = SelfPlay(**{**SMALL, **options})
    return two_players(VectorizedAgents(RockPaperScissors(), config.num_envs), config)


def always(params, action):
    """The parameters with a bias of the policy that leaves one action."""
    bias = 50.0 * jax.nn.one_hot(action, 3) * jnp.ones_like(params["params"]["actor_head"]["bias"])
    return {"params": params["params"] | {"actor_head": params["params"]["actor_head"] | {"bias": bias}}}


def exploitability(result, env, member=0):
    obs = jax.tree.map(lambda x: x.swapaxes(0, 1), env.information_states())
    return env.exploitability(result.probabilities(obs, member=member).swapaxes(0, 1))


def test_a_new_copy_replaces_the_oldest():
    """With three places and a copy every second iteration: after iterations 0, 2, 4, 6 they are of 6, 2 and 4."""
    agent = build(RockPaperScissors(), pool_size=3, pool_period=2, latest_share=0.0, learning_rate=0.1)

    def step(state, _):
        after, _ = agent.iteration(state)
        pool = after.teams["agents"].pool
        return after, (state.params["agents"], pool.filled, pool.drawn)

    state = jax.jit(agent.init)(jax.random.key(0))
    state, (params, filled, drawn) = jax.jit(lambda s: jax.lax.scan(step, s, None, length=7))(state)
    jax.tree.map(
        lambda pool, past: np.testing.assert_array_equal(pool, past[jnp.array([6, 2, 4])]),
        state.teams["agents"].pool.params,
        params,
    )
    np.testing.assert_array_equal(filled, [1, 1, 2, 2, 3, 3, 3])
    assert (drawn >= 0).all() and (drawn < filled[:, None]).all(), "places without parameters are never drawn"
    kernels = np.asarray(params["params"]["actor_head"]["bias"])
    assert len(np.unique(kernels, axis=0)) == 7, "the parameters change, or else this proves nothing"


def test_opponents_are_drawn_by_the_rule():
    """The shares of the four slots, and of the current parameters, among 4,000 draws."""
    players = team(pool_size=4, pool_period=1, latest_share=0.6, num_opponents=4)
    params, rest = players.init(*jax.random.split(jax.random.key(0), 3))
    rest = rest._replace(pool=rest.pool._replace(filled=jnp.int32(4)))

    def draw(rest, _):
        _, rest, _ = players.begin(params, rest, START)
        return rest, rest.pool.drawn

    _, drawn = jax.jit(lambda rest: jax.lax.scan(draw, rest, None, length=1000))(rest)
    slots = np.array([0, 1, 2, 3, -1])
    np.testing.assert_allclose((np.ravel(drawn)[:, None] == slots).mean(0), [0.1] * 4 + [0.6], atol=0.03)


def test_games_between_past_policies_weigh_opponents():
    """A pool of rock, paper and scissors, of which paper enters last: its returns fill the payoff matrix, whose equilibrium is
    uniform; without scissors paper beats all, and nine tenths of the opponents are paper."""
    players = team(pool_size=3, pool_period=2, latest_share=0.0, num_opponents=4, opponents="payoff")
    params, rest = players.init(*jax.random.split(jax.random.key(0), 3))
    fixed = [always(params, action) for action in (0, 1, 2)]
    pool = rest.pool
    for slot, action in enumerate((0, 2)):  # rock, scissors
        pool = pool._replace(params=jax.tree.map(lambda p, x, i=slot: p.at[i].set(x), pool.params, fixed[action]))
    payoff = jnp.zeros((3, 3)).at[0, 1].set(1.0).at[1, 0].set(-1.0)
    results = {"total": jnp.array([6.0, -4.0, 0.0]), "games": jnp.array([6.0, 4.0, 0.0])}  # of paper against both
    standings = no_games(3)._replace(payoff=payoff, **results)
    pool = pool._replace(filled=jnp.int32(2), slot=jnp.int32(2), wait=jnp.int32(0), standings=standings)
    _, after, _ = jax.jit(players.begin)(fixed[1], rest._replace(pool=pool), START)
    found = after.pool.standings
    np.testing.assert_allclose(found.payoff, [[0, 1, -1], [-1, 0, 1], [1, -1, 0]])
    np.testing.assert_allclose(found.weights, np.full(3, 1 / 3), atol=1e-5)
    assert not found.games.any() and not found.total.any()
    no_scissors = no_games(3)._replace(weights=replicator_dynamics(jnp.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 0]]), THERE))
    drawn = np.asarray(draw_slots(no_scissors, jax.random.key(0), jnp.int32(2), 4000))
    assert abs((drawn == 1).mean() - 0.95) < 0.04 and (drawn < 2).all()


THERE = jnp.array([True, True, False])


@pytest.mark.slow
def test_results_are_those_of_the_games_played():
    """Paper against a pool of rock: every game gives 1; its opponents are counted by place."""
    agent = build(RockPaperScissors(), pool_size=2, pool_period=100, latest_share=0.0, opponents="payoff", learning_rate=1e-9)
    state = jax.jit(agent.init)(jax.random.key(0))
    state = state._replace(params={"agents": always(state.params["agents"], 1)})
    after, _ = jax.jit(agent.iteration)(state)
    pool = after.teams["agents"].pool
    rock = jax.tree.map(lambda p, x: p.at[0].set(x), pool.params, always(state.params["agents"], 0))
    pool = pool._replace(params=rock)
    after = after._replace(teams={"agents": after.teams["agents"]._replace(pool=pool)})
    last, _ = jax.jit(agent.iteration)(after)
    now, before = (s.teams["agents"].pool.standings for s in (last, after))
    games, total = now.games - before.games, now.total - before.total
    assert games[0] == games.sum() > 0 and games[1] == 0
    np.testing.assert_allclose(total, games)


@pytest.mark.parametrize("size", [2, 5, 16])
def test_weights_are_those_of_an_equilibrium(size):
    """Against linear programming: the best reply to the weights gains no more than the stated bound, and often far less."""
    rng = np.random.default_rng(size)
    for _ in range(3):
        x = rng.normal(size=(size, size))
        payoff = x - x.T
        weights = np.asarray(jax.jit(replicator_dynamics)(jnp.asarray(payoff, jnp.float32), jnp.ones(size, bool)))
        # max v with x' A >= v and sum x = 1: the value of a symmetric game is 0.
        exact = linprog(
            [*np.zeros(size), -1.0],
            A_ub=np.hstack([-payoff.T, np.ones((size, 1))]),
            b_ub=np.zeros(size),
            A_eq=[[*np.ones(size), 0.0]],
            b_eq=[1.0],
            bounds=[*[(0, None)] * size, (None, None)],
        )
        assert abs(exact.fun) < 1e-9 and (payoff @ exact.x[:-1]).max() < 1e-9
        np.testing.assert_allclose(weights.sum(), 1.0, atol=1e-5)
        assert (payoff @ weights).max() <= np.sqrt(2 * np.log(size) / 2048) * np.abs(payoff).max() + 1e-5
        np.testing.assert_allclose(weights, exact.x[:-1], atol=0.2)


def test_the_learner_has_each_seat_as_often_against_every_opponent():
    """The learner always plays 2; opponent 0, in the even environments, 0; and opponent 1 plays 1."""
    players = team()
    params, rest = players.init(*jax.random.split(jax.random.key(0), 3))
    opponents = jax.tree.map(lambda *x: jnp.stack(x), always(params, 0), always(params, 1))
    _, _, keys = players.begin(params, rest, START)
    now = Now(jnp.zeros((8, 2, 1)), jnp.zeros((8, 2)), jnp.ones(8, bool))
    acted = players.act((always(params, 2), opponents), now, (), jax.tree.map(lambda k: k[0], keys))[0]
    np.testing.assert_array_equal(acted, [[2, 0], [2, 1], [0, 2], [1, 2]] * 2)


def test_only_the_learners_seat_teaches():
    """Whatever the other seat saw, did and got, the parameters become the same; it is not so for the learner's seat."""
    players = team()
    params, rest = players.init(*jax.random.split(jax.random.key(0), 3))
    rng = np.random.default_rng(0)
    learners = np.arange(2) != (np.arange(8) // 2 % 2)[:, None] ^ np.ones((8, 2), int)  # [E, 2]: seat 0 where e // 2 is even

    def learned(changed):
        """The parameters after experience with other numbers where `changed` `[E, 2]`."""
        rng = np.random.default_rng(1)
        normal = lambda *shape: np.where(changed[..., None], 3.0, rng.normal(size=shape)).astype(np.float32)
        experience = Experience(
            obs=normal(4, 8, 2, 1),
            state=np.zeros((4, 8, 2), np.float32),
            is_first=np.ones((4, 8), bool),
            action=np.where(changed, 0, rng.integers(3, size=(4, 8, 2))),
            extras=(log_prob, (), ()),
            reward=normal(4, 8, 2, 1)[..., 0],
            terminated=np.ones((4, 8, 2), bool),
            truncated=np.zeros((4, 8), bool),
            valid=np.ones((4, 8, 2), bool) & ~changed | (rng.random((4, 8, 2)) < 0.5),
            final_obs=normal(4, 8, 2, 1),
            final_state=np.zeros((4, 8, 2), np.float32),
        )
        now = Now(normal(8, 2, 1), jnp.zeros((8, 2)), jnp.ones(8, bool))
        return learn(params, rest, experience, now)

    log_prob = rng.normal(-1, 0.1, size=(4, 8, 1)).astype(np.float32)
    learn = jax.jit(lambda *args: players.learn(*args, (), START)[0])
    reference = learned(np.zeros((8, 2), bool))
    jax.tree.map(np.testing.assert_array_equal, learned(~learners), reference)
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), learned(learners), reference)
    assert not any(jax.tree.leaves(same))


@pytest.mark.slow
def test_the_learner_beats_a_frozen_opponent():
    """All opponents always play rock, and are never replaced; paper wins."""
    agent = build(RockPaperScissors(), latest_share=0.0, pool_size=2, num_envs=64, learning_rate=0.03, entropy_coef=0.0)
    state = jax.jit(agent.init)(jax.random.key(0))
    rest = state.teams["agents"]
    rocks = jax.tree.map(lambda x: jnp.stack([x, x]), always(state.params["agents"], 0))
    pool = rest.pool._replace(params=rocks, filled=jnp.int32(2), wait=jnp.int32(10**6))
    state = state._replace(teams={"agents": rest._replace(pool=pool)})
    state, metrics = jax.jit(lambda s: jax.lax.scan(lambda s, _: agent.iteration(s), s, None, length=60))(state)
    np.testing.assert_array_less(0.95, agent.probabilities(state, jnp.zeros((1, 2, 1)))[0, :, 1])
    assert abs(metrics["return_against_pool"][:2].mean()) < 0.3 and metrics["return_against_pool"][-5:].mean() > 0.9
    assert metrics["return_against_pool"].count[-1] == 64 * 4


@pytest.mark.slow
def test_the_pool_stays_where_actors_are():
    """No opponent crosses devices, and the learner gets one seat of all that was seen: less than the observations of both."""
    agent = build(KuhnPoker())
    state = jax.eval_shape(agent.init, jax.random.key(0))
    program = msrl.compile(
        agent.iteration,
        state,
        policy=msrl.policies.SingleLearnerCoarse(actors=4, learners=1),
        axes=agent.axes,
        groups={"env": agent.env_group},
        devices=jax.devices()[:5],
    )
    plan = program.explain()
    assert not [c for c in plan.crossings if "pool" in c.value or "draw_opponents" in c.value]
    up = sum(c.nbytes * c.times for c in plan.crossings if c.source == "actors")
    assert 0 < up < 4 * 8 * 2 * 11 * 4
    # Sums of episodes and of scores, six numbers, and how many were cut, are all that actors say to each other.
    assert plan.bytes_of_collectives["actors"] == 28


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("unroll_length", 30, "cannot be split into num_minibatches=4 groups of time steps; use unroll_length=32"),
        ("num_envs", 20, "cannot be split into both seats against each of num_opponents=8; use num_envs=32"),
        ("latest_share", 1.5, "use a finite number at least 0 and at most 1"),
        ("pool_size", 0, "use an integer of at least 1"),
    ],
)
def test_a_bad_field_is_refused(field, value, remedy):
    with pytest.raises(ValueError, match=rf"SelfPlay\.{field}={value!r}.*{remedy}"):
        SelfPlay(**{field: value})


def test_each_agent_has_the_probabilities_of_its_own_network():
    """Of two networks, in Kuhn poker: the shares of sampled actions, and none for illegal ones."""
    agent = still(MAPPO(num_envs=8, unroll_length=4, hidden_sizes=(4,), share_parameters=False).build(KuhnPoker()))
    state = jax.jit(agent.init)(jax.random.key(0))
    heads = state.params["agents"]["actor"]["params"]
    name, head = next((n, x) for n, x in heads.items() if "bias" in x and x["bias"].shape[-1] == 3)
    heads[name] = head | {"bias": jnp.array([[0.0, 1, 2], [0, 2, 1]])}
    obs = jax.tree.map(lambda x: x.swapaxes(0, 1), KuhnPoker().information_states())
    p = agent.probabilities(state, obs)
    assert p.shape == (6, 2, 3) and (p[..., 0] == 0).all()
    assert (p[:, 0, 2] > 0.6).all() and (p[:, 1, 2] < 0.4).all()
    act = jax.vmap(lambda key: agent.act(state, obs, key, agent.initial_carry(1))[0])
    actions = jax.jit(act)(jax.random.split(jax.random.key(1), 4000))
    np.testing.assert_allclose((actions[..., None] == np.arange(3)).mean(0), p, atol=0.04)


@pytest.mark.slow
def test_rock_paper_scissors_ends_near_its_equilibrium():
    env = RockPaperScissors()
    result = msrl.train("self_play", env, total_steps=500_000, entropy_coef=0.3, learning_rate=2e-3, eval_episodes=1)
    assert exploitability(result, env) < 0.02


@pytest.mark.slow
def test_kuhn_poker_ends_near_an_equilibrium():
    """Random play has 0.46; ten seeds ended between 0.026 and 0.046."""
    env = KuhnPoker()
    result = msrl.train("self_play", env, total_steps=2_000_000, hidden_sizes=(32, 32), seeds=3, eval_episodes=1)
    assert max(exploitability(result, env, member) for member in range(3)) < 0.05


@pytest.mark.slow
def test_a_run_goes_on_exactly(tmp_path):
    """Also the pool, who waits in it and who is drawn."""
    options = {**SMALL, "total_steps": 10 * 32, "pool_size": 3, "pool_period": 2, "latest_share": 0.5, "eval_episodes": 1}
    whole = msrl.train("self_play", "KuhnPoker", **options)
    stopped = msrl.train(
        "self_play", "KuhnPoker", **options, out=tmp_path, chunk=1, callbacks=[lambda tick: tick.iteration >= 5]
    )
    assert stopped.history["iteration"][-1] == 5
    resumed = msrl.train(out=tmp_path, resume=True)
    assert_same_state(resumed.state, whole.state)


def test_a_policy_enters_the_game_with_its_mean_results_even_of_one_episode():
    met = no_games(3)._replace(total=jnp.array([0.5, 0.0, -6.0]), games=jnp.array([1.0, 0.0, 4.0]))
    payoff = enter(met, jnp.int32(1), jnp.int32(3)).payoff
    np.testing.assert_array_equal(payoff, [[0, -0.5, 0], [0.5, 0, -1.5], [0, 1.5, 0]])
