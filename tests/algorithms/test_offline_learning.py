"""From what a half-trained policy does, CQL and IQL learn more than to do the same, with their defaults."""

import functools

import numpy as np
import pytest

import msrl_jax as msrl

pytestmark = pytest.mark.slow

SEEDS = 5
UPDATES = {"CartPole-v1": 6_000, "Pendulum-v1": 6_000}


@functools.cache
def medium(env, seed=0):
    """20,000 steps: of DQN after 20,000, a third of them at random; or of SAC after 6,500, sampled."""
    options = {"progress": False, "seed": seed, "eval_episodes": 0}
    if env == "CartPole-v1":
        return msrl.data.record(msrl.train("dqn", env, total_steps=20_000, **options), 20_000, epsilon=0.3, seed=seed)
    result = msrl.train("sac", env, total_steps=6_500, hidden_sizes=(64, 64), **options)
    return msrl.data.record(result, 20_000, seed=seed)


@functools.cache
def learned(algorithm, env, seed=0):
    """Mean returns of greedy episodes. `[seeds]`"""
    options = {"seed": seed, "seeds": SEEDS, "eval_episodes": 64, "progress": False}
    result = msrl.train(algorithm, env, data=medium(env, seed), total_steps=UPDATES[env], **options)
    return result.evaluation.mean_return


@pytest.mark.parametrize("env", UPDATES)
@pytest.mark.parametrize("algorithm", ["cql", "iql"])
def test_medium_data_are_improved_on(algorithm, env):
    behaviour, cloned, returns = medium(env).episodes.returns.mean(), learned("bc", env), learned(algorithm, env)
    assert np.mean(returns) > max(behaviour, np.mean(cloned))
    assert np.sum((returns > behaviour) & (returns > cloned)) >= SEEDS - 1
