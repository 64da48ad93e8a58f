"""PPO is the same training run under every synchronous policy with one environment of each suite on devices."""

import functools

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from tests.support.agents import make_counted
from tests.support.slow import slow_unless
from tests.support.small_runs import relative_difference

ENVS = [
    "brax:inverted_pendulum",
    "playground:CartpoleBalance",
    "craftax:Craftax-Classic-Symbolic-v1:reset_ratio=2",
    "jumanji:Maze-v0",
    "xminigrid:MiniGrid-DoorKey-5x5",
]
# Adam divides a gradient near 0 by its size, so that a step depends on its rounding.
CONFIG = {
    "num_envs": 16,
    "unroll_length": 4,
    "num_epochs": 1,
    "num_minibatches": 2,
    "hidden_sizes": (16,),
    "optimizer": "sgd",
    "learning_rate": 0.02,
}
ITERATIONS = 2
MATRIX = [
    slow_unless((env, policy) == (ENVS[-1], "SingleLearnerCoarse"), env, policy, id=f"{env.split(':')[0]}-{policy}")
    for env in ENVS
    for policy in msrl.policies.names()
]


@functools.cache
def reference(env):
    """The agent, its initial state, and parameters and observations after plain `jit(scan)`."""
    agent = make_counted("ppo", msrl.envs.make(env), **CONFIG)
    state = jax.jit(agent.init)(jax.random.key(0))
    run = jax.jit(lambda state: jax.lax.scan(lambda s, _: agent.iteration(s), state, length=ITERATIONS)[0])
    after = run(state).inner
    return agent, state, jax.device_get((after.params, after.obs))


@pytest.mark.slow
@pytest.mark.parametrize(("env", "policy"), MATRIX)
def test_the_same_training_run_with_an_environment_of_each_suite(env, policy):
    agent, state, (params, obs) = reference(env)
    program = msrl.compile(
        agent.iteration, state, policy=msrl.policies.get(policy), axes=agent.axes, groups={"env": agent.env_group}
    )
    after = program.run(state, ITERATIONS)[0].inner
    discrete = env.startswith(("craftax", "jumanji", "xminigrid"))
    for a, b in zip(jax.tree.leaves(after.obs), jax.tree.leaves(obs), strict=True):
        # Physics takes actions of floats, which carry the rounding of the gradient's sum.
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=0, atol=0 if discrete else 1e-4)
    pairs = zip(jax.tree.leaves(after.params), jax.tree.leaves(params), strict=True)
    assert max(relative_difference(a, b) for a, b in pairs) < (1e-5 if discrete else 1e-4)
