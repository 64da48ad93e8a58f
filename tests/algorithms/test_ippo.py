"""PPO for several agents, some of which leave early: one iteration against an independent implementation."""

import jax
import numpy as np
import pytest

from msrl_jax import algorithms
from tests.support.agents import make_still
from tests.support.ippo import EPOCHS, MINIBATCHES, E, T, plain_rollout, plain_update
from tests.support.many_agents import Homes


class Restless(Homes):
    """Agents also leave by chance, so that in some episodes all do."""

    def step(self, key, state, action):
        key, leave_key = jax.random.split(key)
        state, obs, reward, home, late = super().step(key, state, action)
        return state, obs, reward, home | jax.random.bernoulli(leave_key, 0.3, (self.num_agents,)), late


SMALL = {
    "num_envs": E,
    "unroll_length": T,
    "num_epochs": EPOCHS,
    "num_minibatches": MINIBATCHES,
    "hidden_sizes": (8, 6),
    "clip_value": 0.1,
    "normalize_values": True,
}
CASES = {
    "ippo": ("ippo", {}),
    "ippo-gru": ("ippo", {"core": "gru:4"}),
    "ippo-own-gru": ("ippo", {"core": "gru:4", "share_parameters": False}),
    "mappo": ("mappo", {}),
    "mappo-own": ("mappo", {"share_parameters": False}),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "case", ["mappo", *(pytest.param(x, marks=pytest.mark.slow) for x in ("ippo", "ippo-gru", "ippo-own-gru", "mappo-own"))]
)
def test_one_iteration_equals_an_independent_implementation(case):
    name, options = CASES[case]
    config = algorithms.get(name)(**SMALL | options)
    agent = make_still(name, Restless(3, horizon=5), **SMALL | options)
    iterate, state = jax.jit(agent.iteration), jax.jit(agent.init)(jax.random.key(0))
    for _ in range(2):  # until there are statistics of targets, and an unroll begins within an episode
        state, _ = iterate(state)
    assert not state.now["agents"].is_first.all()
    obs, is_first, carry, rollout = plain_rollout(agent, state, config.share_parameters)
    *_, terminated, truncated, valid = rollout
    assert truncated.any() and terminated.any() and not valid.all() and terminated.all(-1).any()
    after, _ = iterate(state)
    now = after.now["agents"]
    np.testing.assert_allclose(now.obs, obs, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(now.is_first, is_first)
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5),
        jax.tree.leaves(after.carry["agents"]),
        carry,
    )
    networks = plain_update(agent, config, state, rollout, config.share_parameters)
    for i, (want, scale) in enumerate(networks):
        own = lambda tree, i=i: tree if config.share_parameters else jax.tree.map(lambda x: x[i], tree)
        got, before = own(after.params["agents"]), own(state.params["agents"])
        jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-6), got, want)
        moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a - b)).max(), got, before)
        assert min(jax.tree.leaves(moved)) > 1e-5
        np.testing.assert_allclose(own(after.teams["agents"].value_scale).divisor, scale, rtol=1e-4)
