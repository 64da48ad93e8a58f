"""R2D2 with its defaults solves a task that needs a recurrent state, which DQN cannot solve, and a task that does not."""

import numpy as np
import pytest

import msrl_jax as msrl

pytestmark = pytest.mark.slow

CHAIN = {"env": "MemoryChain-bsuite:memory_length=15", "total_steps": 80_000}


def greedy_returns(name, **options):
    """Mean return of greedy episodes after training. `[5]`"""
    evaluation = msrl.train(name, **options, seeds=5, eval_episodes=500, progress=False).evaluation
    assert evaluation is not None
    return np.asarray(evaluation.mean_return)


@pytest.mark.parametrize("core", ["gru", "lstm", "min_gru"])
def test_a_carry_makes_up_for_missing_observations(core):
    """The answer is shown once, and asked for 15 steps later."""
    assert (greedy_returns("r2d2", **CHAIN, core=core) > 0.9).all()


def test_without_a_carry_the_answer_is_a_guess():
    assert (np.abs(greedy_returns("dqn", **CHAIN)) < 0.2).all()


def test_cartpole_is_balanced_most_of_the_time():
    assert greedy_returns("r2d2", env="CartPole-v1", total_steps=150_000).mean() > 400
