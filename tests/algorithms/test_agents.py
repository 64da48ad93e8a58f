"""What agents say of themselves is what they do."""

import dataclasses

import jax
import optax
import pytest

import msrl_jax as msrl

from .transitions import noise


@pytest.mark.parametrize("algorithm", msrl.algorithms.ALGORITHMS.values(), ids=lambda a: a.name)
def test_an_iteration_makes_the_declared_number_of_updates(algorithm):
    fields = {f.name for f in dataclasses.fields(algorithm.config)}
    options = {"optimizer": "adam"} if "optimizer" in fields else {}  # it counts its updates
    if "learning_starts" in fields:
        options = {"num_envs": 16, "unroll_length": 4, "batch_size": 16, "learning_starts": 64}  # the first iteration learns
    if "trace_length" in fields:
        options |= {"burn_in": 0, "trace_length": 2, "n_step": 1}
    env = "Pendulum-v1" if algorithm.name in ("ddpg", "td3") else "CartPole-v1"
    env = msrl.envs.make(env)
    if algorithm.name in ("bc", "cql", "iql"):
        options = {"data": noise(env)}
    agent = algorithm.build(env, algorithm.config(**options))
    # XLA drops all that the count does not need.
    found = lambda state: [count for _, count in optax.tree.get_all_with_path(state.opt_state, "count")]  # noqa: E731
    counts = jax.jit(lambda key: found(agent.iteration(agent.with_data(agent.init(key)))[0]))
    assert max(counts(jax.random.key(0))) == agent.updates_per_iteration
