"""A reference for replay buffers: a record of all insertions with NumPy, deques and Python loops."""

from collections import deque
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax import replay

EXAMPLE = replay.Transition(jnp.zeros(2), jnp.int32(0), jnp.float32(0), jnp.bool_(0), jnp.bool_(0), jnp.zeros(2))


class Functions(NamedTuple):
    """A buffer with its functions compiled once."""

    buffer: replay.ReplayBuffer
    insert: object
    sample: object
    update: object


def compiled(buffer):
    return Functions(buffer, *map(jax.jit, (buffer.insert, buffer.sample, buffer.update)))


def steps(rng, unroll_length, num_envs, begin):
    """Steps of all environments with random ends of episodes; an observation contains its step and environment."""
    when = np.arange(begin, begin + unroll_length)[:, None] + np.zeros((1, num_envs))
    where = np.zeros((unroll_length, 1)) + np.arange(num_envs)
    shape = (unroll_length, num_envs)
    return replay.Transition(
        obs=np.stack([when, where], -1).astype(np.float32),
        action=rng.integers(0, 9, shape).astype(np.int32),
        reward=rng.normal(size=shape).astype(np.float32),
        terminated=rng.random(shape) < 0.15,
        truncated=rng.random(shape) < 0.15,
        next_obs=np.stack([when + 0.5, where], -1).astype(np.float32),
    )


class History:
    """The last `length` steps of every environment."""

    def __init__(self, num_envs, length, modulus):
        self.kept = [deque(maxlen=length) for _ in range(num_envs)]
        self.modulus = modulus

    def insert(self, items, begin):
        for t in range(len(items.reward)):
            for env, kept in enumerate(self.kept):
                kept.append(((begin + t) % self.modulus, jax.tree.map(lambda x, t=t, env=env: x[t, env], items)))

    def windows(self, length, stride):
        """(first step, environment) -> the items of the window, for all windows."""
        found = {}
        for env, kept in enumerate(self.kept):
            held = list(kept)
            for i in range(len(held) - length + 1):
                if held[i][0] % stride == 0:
                    found[held[i][0], env] = [item for _, item in held[i : i + length]]
        return found
