"""Off-policy algorithms swing the pendulum up with their defaults, within the steps they should need."""

import jax
import numpy as np
import pytest
from msrl_jax.training.members import initial_key, population

import msrl_jax as msrl
from msrl_jax import algorithms, envs

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["sac", "td3"])
def test_defaults_swing_the_pendulum_up_on_all_of_five_seeds(name):
    """The mean return of the episodes that end in the last tenth of 50,000 steps, exploration included."""
    algorithm = algorithms.get(name)
    single = algorithm.build(envs.make("Pendulum-v1"), algorithm.config())
    agent = population(single)
    state = jax.jit(agent.init)(initial_key(0, 5))
    program = msrl.compile(agent.iteration, state, policy=msrl.policies.GPUOnly(), axes=agent.axes, devices=jax.devices()[:1])
    length = 50_000 // single.steps_per_iteration
    _, metrics = program.run(state, length, donate=True)
    episodes = metrics["episode_return"][-(length // 10) :]
    assert (np.asarray(episodes.mean(axis=0)) > -200).all()
