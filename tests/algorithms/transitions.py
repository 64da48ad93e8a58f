"""A data set of noise that fits an environment."""

import numpy as np

from msrl_jax.data import Dataset
from msrl_jax.envs import Discrete


def noise(env, rows=640, length=16, seed=0):
    """Episodes of `length` rows; every other one terminates, the others are cut short. Rewards show the better actions."""
    rng, space = np.random.default_rng(seed), env.action_space
    obs = rng.uniform(-0.4, 0.4, (rows + 1, *env.observation_space.shape)).astype(np.float32)
    if isinstance(space, Discrete):
        action = rng.integers(0, space.n, rows)
        reward = action == (obs[:-1, 0] > 0)
    else:
        action = rng.uniform(space.low, space.high, (rows, *space.shape)).astype(np.float32)
        reward = -((action - obs[:-1, :1]) ** 2).sum(-1)
    last, odd = np.arange(rows) % length == length - 1, np.arange(rows) // length % 2 == 1
    return Dataset(obs[:-1], action, np.float32(reward), last & odd, last & ~odd, obs[1:], about={"env": "noise"})
