"""DQN solves CartPole with its defaults and does not forget it; it learns from images."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import algorithms, envs
from msrl_jax.algorithms import counted

pytestmark = pytest.mark.slow

SEEDS = 16


def curves(name, env, total_steps, seeds, **options):
    """Mean return of the episodes that ended in each tenth of training. `[10, seeds]`"""
    single = algorithms.build(algorithms.make(name, options), envs.make(env))
    length = total_steps // single.steps_per_iteration
    agent = counted(single, length)
    train = jax.vmap(lambda key: jax.lax.scan(lambda s, _: agent.iteration(s), agent.init(key), None, length=length)[1])
    keys = jnp.stack([jax.random.key(seed) for seed in range(seeds)])
    episodes = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), jax.jit(train)(keys)["episode_return"])
    return np.array([episodes[tenth].mean(axis=0) for tenth in np.array_split(np.arange(length), 10)])


OPTIONS = {
    "defaults": {},
    "plain": {"target": "greedy"},
    "dueling": {"dueling": True},
    "n-step": {"replay.n_step": 3},
    "prioritised": {"replay.priorities": "prioritized"},
    "c51": {"returns": "c51"},
    "munchausen": {"target": "munchausen"},
    "qr": {"returns": "qr", "learning_rate": 5e-4, "tau": 0.005},
}


@pytest.mark.parametrize(("name", "solved"), [(name, 13 if name == "defaults" else 8) for name in OPTIONS])
def test_every_option_solves_cartpole_and_most_seeds_do_not_forget_it(name, solved):
    """How many of 16 seeds return 475 and more over the last tenth of training.

    A seed may lose late what it knew: one in sixteen with the defaults, and more than one in four with the most forgetful
    option, priorities. With these rates, fewer than 13 and 8 have a probability of 1.5 % each.
    """
    returns = curves("dqn", "CartPole-v1", 500_000, SEEDS, **OPTIONS[name])[-1]
    assert (returns >= 475).sum() >= solved


def test_breakout_improves_from_images():
    options = {"hidden_sizes": (128,), "replay.capacity": 100_000, "replay.storage": "uint8", "replay.learning_starts": 5_000}
    options |= {"exploration.steps": 50_000, "num_updates": 4, "batch_size": 64}
    curve = curves("dqn", "Breakout-MinAtar", 200_000, 5, **options)
    assert (curve[0] < 1).all() and curve[-1].mean() > 4 and (curve[-1] > 2).all()
