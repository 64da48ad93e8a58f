"""With goals in hindsight SAC and DQN reach theirs, in steps that are too few without."""

import jax
import numpy as np
import pytest

from msrl_jax import algorithms, envs
from msrl_jax.algorithms import counted
from tests.support.bits import Bits

pytestmark = pytest.mark.slow

SEEDS = range(5)


def success(config, env, steps):
    """The share of the episodes that reach their goal, of those that end in the last tenth, for each seed."""
    single = config.build(env)
    length = steps // single.steps_per_iteration
    agent = counted(single, length)
    train = jax.jit(lambda key: jax.lax.scan(lambda s, _: agent.iteration(s), agent.init(key), None, length=length)[1])
    found = [train(jax.random.key(seed))["episode_success"][-(length // 10) :] for seed in SEEDS]
    return np.array([x.total.sum() / x.count.sum() for x in found])


@pytest.mark.parametrize("relabel", [0.8, 0.0])
def test_a_point_finds_a_small_goal_in_a_maze(relabel):
    config = algorithms.SAC(
        hindsight=algorithms.Hindsight(relabel) if relabel else None, hidden_sizes=(64, 64), batch_size=128, tau=0.02
    )
    found = success(config, envs.make("PointMaze:maze=u,tolerance=0.05,max_steps=50"), 15_000)
    assert (found > 0.9).all() if relabel else (found < 0.9).all()


@pytest.mark.parametrize("relabel", [0.8, 0.0])
def test_bits_are_flipped_until_they_are_those_of_the_goal(relabel):
    """The experiment of section 3.1 of arXiv 1707.01495 with 12 bits."""
    config = algorithms.DQN(
        hindsight=algorithms.Hindsight(relabel) if relabel else None, learning_rate=1e-3, hidden_sizes=(256,), num_updates=8
    )
    found = success(config, Bits(12), 20_000)
    assert (found > 0.9).all() if relabel else (found < 0.1).all()
