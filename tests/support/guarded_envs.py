"""An environment that goes wrong at a known step, written as a user would."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import Box, Discrete

SCALE, SHIFT = np.ones(2, np.float32), np.zeros(2, np.float32)
"""Arrays that become constants of the program."""


class Walk(NamedTuple):
    x: jax.Array
    step: jax.Array


@dataclasses.dataclass(frozen=True)
class Faulty:
    """A random walk; reward or observation is nan in one step of every episode, `after` steps after its start."""

    what: str = "nothing"
    after: int = 20
    length: int = 30
    continuous: bool = False
    name: str = "Faulty"

    @property
    def observation_space(self):
        return Box(-1e6, 1e6, (2,), jnp.float32)

    @property
    def action_space(self):
        return Box(-1.0, 1.0, (1,), jnp.float32) if self.continuous else Discrete(2)

    def _observe(self, state):
        return jnp.stack([state.x, state.step / self.length]) * SCALE + SHIFT

    def reset(self, key):
        state = Walk(jax.random.uniform(key), jnp.int32(0))
        obs = self._observe(state)
        return state, obs * jnp.nan if self.what == "reset" else obs

    def step(self, key, state, action):
        state = Walk(0.9 * state.x + 0.1 * jax.random.normal(key), state.step + 1)
        wrong = state.step == self.after
        obs, reward = self._observe(state), state.x
        if self.what == "observation":
            obs = jnp.where(wrong, jnp.log(-1.0 - obs**2), obs)
        if self.what == "reward":
            reward = jnp.where(wrong, jnp.sqrt(-1.0 - reward**2), reward)
        return state, obs, reward, jnp.bool(False), state.step >= self.length
