"""Data sets: one of noise that fits an environment, and when two are the same."""

import numpy as np

from msrl_jax.data import Dataset
from msrl_jax.data.dataset import FIELDS
from msrl_jax.envs import Discrete
from msrl_jax.envs.spaces import is_integers


def noise(env, rows=640, length=16, seed=0):
    """Episodes of `length` rows; every other one terminates, the others are cut short. Better actions are the more frequent.

    Otherwise gradients would be sums that cancel, whose rounding Adam magnifies.
    """
    rng, space = np.random.default_rng(seed), env.action_space
    obs = rng.uniform(-0.4, 0.4, (rows + 1, *env.observation_space.shape)).astype(np.float32)
    if isinstance(space, Discrete):
        better = (obs[:-1, 0] > 0.1).astype(np.int32)
        action = np.where(rng.uniform(size=rows) < 0.7, better, rng.integers(0, space.n, rows))
        reward = action == better
    elif is_integers(space):
        better = np.where(obs[:-1, :1] > 0.1, space.high, space.low)
        action = np.where(rng.uniform(size=(rows, 1)) < 0.7, better, rng.integers(space.low, space.high + 1, better.shape))
        reward = (action == better).mean(-1)
    else:
        better = 0.2 + obs[:-1, :1]
        action = np.clip(better + rng.normal(0, 0.5, (rows, *space.shape)), space.low, space.high).astype(np.float32)
        reward = -((action - better) ** 2).sum(-1)
    last, odd = np.arange(rows) % length == length - 1, np.arange(rows) // length % 2 == 1
    return Dataset(obs[:-1], action, np.float32(reward), last & odd, last & ~odd, obs[1:], about={"env": "noise"})


def same(a, b):
    for name in FIELDS:
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype, name
        np.testing.assert_array_equal(x, y, err_msg=name)
    assert a.about == b.about
