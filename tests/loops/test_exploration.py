"""When agents act at random, and when they do not: at the first updates and wherever a counter of 32 bits would wrap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import algorithms
from msrl_jax.algorithms import Annealed, PerEnv, Progress
from msrl_jax.envs import Discrete
from msrl_jax.envs.actions import uniform_actions
from msrl_jax.fragments.counters import counter
from msrl_jax.networks.q_network import epsilon_greedy, exploration_rate
from tests.support.many_agents import Homes
from tests.support.random_walk import RandomWalk

E, STARTS = 16, 64
LATE = [2**24 - E, 2**24, 2**31 - E, 2**31, 2**32 - E, 2**32, 10**13]
OPTIONS = {"num_envs": E, "unroll_length": 1, "num_updates": 1, "batch_size": 16, "replay.capacity": 256, "hidden_sizes": (4,)}
GREEDY = {"exploration.steps": STARTS, "exploration.final": 0.0}


@pytest.mark.parametrize("name", [pytest.param("sac", marks=pytest.mark.slow), "dqn"])
def test_actions_follow_the_network_from_the_first_update_on(name):
    """Random actions are the same for all parameters; others are not."""
    config = algorithms.make(name, {"replay.learning_starts": STARTS} | OPTIONS | (GREEDY if name == "dqn" else {}))
    agent = config.build(RandomWalk(name != "dqn"))
    state = jax.jit(agent.init)(jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 64))
    other = jax.tree.map(lambda x: x + jax.random.normal(next(keys), x.shape), state.params)
    # XLA drops all but acting.
    actions = jax.jit(lambda state, done: agent.iteration(state, Progress(done))[0].replay.items[1][:, 0])

    def share_that_follows(steps):
        done = counter(steps // E)  # of E steps each
        a, b = np.asarray(actions(state, done)), np.asarray(actions(state._replace(params=other), done))
        return (a != b).mean()

    for steps in (0, STARTS - E):
        assert share_that_follows(steps) == 0
    for steps in (STARTS, STARTS + E, *LATE):
        assert share_that_follows(steps) > (0.2 if name == "dqn" else 0.9), steps


def exploring(exploration):
    """Epsilon-greedy actions, compiled: `(greedy, keys, steps) -> actions`."""

    def explore(greedy, keys, steps):
        return epsilon_greedy(exploration_rate(exploration, steps, len(greedy), STARTS), greedy, keys, None, 1000)

    return jax.jit(explore)


@pytest.fixture(scope="module")
def explore():
    return exploring(Annealed(10_000, 0.25))


@pytest.mark.parametrize("steps", [STARTS, 10_000, *LATE])
def test_epsilon_stays_at_the_end_of_its_schedule(explore, steps):
    found = np.asarray(explore(jnp.full(4000, -1), jax.random.split(jax.random.key(0), 4000), counter(steps)))
    epsilon = max(0.25, 1 - 0.75 * steps / 10_000)
    # Five deviations of a binomial's mean.
    assert abs((found >= 0).mean() - epsilon) <= 5 * np.sqrt(epsilon * (1 - epsilon) / 4000)
    random = found[found >= 0]
    assert abs(random.mean() - 999 / 2) <= 5 * 1000 / np.sqrt(12 * len(random))


def test_discrete_actions_are_drawn_with_equal_probabilities():
    found = np.bincount(uniform_actions(jax.random.split(jax.random.key(0), 3000), Discrete(3)))
    assert len(found) == 3 and np.abs(found - 1000).max() <= 5 * np.sqrt(3000 * 2 / 9)


def test_every_environment_has_its_own_epsilon():
    explore = exploring(PerEnv(0.4))
    keys = jax.random.split(jax.random.key(0), (2000, 3))
    for steps in (STARTS, 2**31, 10**13):
        found = jax.vmap(explore, (None, 0, None))(jnp.full(3, -1), keys, counter(steps))
        np.testing.assert_allclose((np.asarray(found) >= 0).mean(0), [0.4, 0.4**4.5, 0.4**8], atol=0.03)
    before = explore(jnp.full(3, -1), keys[0], counter(STARTS - 1))
    assert (np.asarray(before) >= 0).all()


def test_all_agents_of_an_environment_have_its_epsilon(monkeypatch):
    """Only the agents of the first environment act at random, so only their actions do not depend on the parameters."""
    monkeypatch.setattr(PerEnv, "epsilon", lambda self, steps, num_envs: (jnp.arange(num_envs) == 0).astype(jnp.float32))
    fields = {"num_envs": 4, "unroll_length": 8, "num_updates": 1, "batch_size": 4, "hidden_sizes": (4,), "core": None}
    fields |= {"replay.learning_starts": 128, "replay.capacity": 256, "exploration": "per_env"}
    agent = algorithms.build(algorithms.make("qmix", fields), Homes())
    state = jax.jit(agent.init)(jax.random.key(0))
    iterate = jax.jit(lambda state: agent.iteration(state, Progress(counter(10)))[0])

    def actions(preferred):
        params = jax.tree.map(lambda x: x.at[preferred].set(100.0) if x.shape == (3,) else x, state.params)  # a bias
        return np.asarray(iterate(state._replace(params=params)).teams["agents"].replay.items[3])  # [E, steps, 1, A]

    differ = actions(0) != actions(1)
    assert not differ[0].any() and (differ[1:].sum((1, 2)) == 8).all()


def test_a_rate_of_another_shape_is_refused(monkeypatch):
    monkeypatch.setattr(PerEnv, "epsilon", lambda self, steps, num_envs: jnp.zeros(3))
    with pytest.raises(ValueError, match=r"PerEnv.epsilon returns an array of shape \[3\]; return a number, or one .* 16 env"):
        exploration_rate(PerEnv(), counter(0), E)
