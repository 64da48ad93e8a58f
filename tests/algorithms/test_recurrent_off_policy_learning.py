"""SAC and TD3 swing up a pendulum whose speed nobody sees, if they have a memory."""

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import envs
from tests.support.privileged import Occluded

pytestmark = pytest.mark.slow

COMMON = {
    "unroll_length": 8, "num_updates": 48, "hidden_sizes": (64,), "replay.learning_starts": 1024, "learning_rate": 2e-3,
    "tau": 0.02,
    "discount": 0.98,
}  # fmt: skip
# With it seeds 10000 to 10002 reached -160 to -310 in 40,000 steps, without it -1,140 to -1,240.
GRU = {"core": "gru", "batch_size": 32, "burn_in": 4, "trace_length": 8}


def greedy_returns(name, **options):
    """Mean return of greedy episodes after training. `[3]`"""
    env = envs.Unprivileged(Occluded(envs.make("Pendulum-v1")))
    run = {"total_steps": 50_000, "seeds": 3, "eval_episodes": 64, "devices": jax.devices()[:1], "progress": False}
    evaluation = msrl.train(name, env, **options, **run).evaluation
    assert evaluation is not None
    return np.asarray(evaluation.mean_return)


@pytest.mark.parametrize("name", ["sac", "td3"])
def test_a_core_makes_up_for_a_speed_that_nobody_sees(name):
    assert (greedy_returns(name, **COMMON, **GRU) > -400).all()


@pytest.mark.parametrize("name", ["sac", "td3"])
def test_without_a_core_it_does_not_swing_up(name):
    assert (greedy_returns(name, **COMMON, batch_size=256) < -600).all()
