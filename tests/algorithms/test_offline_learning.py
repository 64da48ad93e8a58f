"""CQL, IQL and AWAC with their defaults become better than the half-trained policy that made their data."""

import functools

import numpy as np
import pytest

import msrl_jax as msrl

pytestmark = pytest.mark.slow

SEEDS = 5
UPDATES = {"CartPole-v1": 20_000, "Pendulum-v1": 8_000}


@functools.cache
def medium(env, seed=0):
    """20,000 steps of a policy that is half trained, DQN's or SAC's; a part of its actions is random."""
    name, enough, epsilon, options = {
        "CartPole-v1": ("dqn", 80, 0.3, {"eval_every": 1_280, "num_updates": 8}),
        "Pendulum-v1": ("sac", -400, 0.5, {"eval_every": 320, "hidden_sizes": (64, 64)}),
    }[env]
    half_trained = lambda tick: bool(tick.metrics["eval_return"] > enough)  # noqa: E731
    result = msrl.train(name, env, total_steps=100_000, seed=seed, callbacks=[half_trained], progress=False, **options)
    assert result.status == "stopped"
    return msrl.data.record(result, 20_000, epsilon=epsilon, seed=seed)


@functools.cache
def learned(algorithm, env, seed=0):
    """Mean returns of greedy episodes. `[seeds]`"""
    algorithm, options = ("iql", {"critic": "of_policy"}) if algorithm == "awac" else (algorithm, {})
    options |= {"seed": seed, "seeds": SEEDS, "eval_episodes": 64, "progress": False}
    result = msrl.train(algorithm, env, data=medium(env, seed), total_steps=UPDATES[env], **options)
    return result.evaluation.mean_return


@pytest.mark.parametrize("env", UPDATES)
@pytest.mark.parametrize("algorithm", ["cql", "iql", "awac"])
def test_medium_data_are_improved_on(algorithm, env):
    behavior, cloned, returns = medium(env).episodes.returns.mean(), learned("bc", env), learned(algorithm, env)
    assert np.mean(returns) > max(behavior, np.mean(cloned))
    assert np.sum((returns > behavior) & (returns > cloned)) >= SEEDS - 1
