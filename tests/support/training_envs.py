"""Environments whose episodes are known beforehand, written as a user would."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax.envs import Box, Discrete


class Clock(NamedTuple):
    step: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True)
class Lottery:
    """An episode is short or long, by even chances that the first observation shows; every step is worth 1.

    Episodes terminate, or are truncated.
    """

    short: int = 1
    long: int = 40
    name: str = "Lottery"
    truncates: bool = False

    @property
    def observation_space(self):
        return Box(-1e6, 1e6, (3,), jnp.float32)

    @property
    def action_space(self):
        return Discrete(2)

    def _observe(self, state):
        return jnp.stack([state.step, state.length, jnp.int32(100)]).astype(jnp.float32)

    def reset(self, key):
        length = jnp.where(jax.random.bernoulli(key), self.long, self.short).astype(jnp.int32)
        state = Clock(jnp.int32(0), length)
        return state, self._observe(state)

    def step(self, key, state, action):
        state = Clock(state.step + 1, state.length)
        done = state.step >= state.length
        return state, self._observe(state), jnp.float32(1), done & (not self.truncates), done & self.truncates


@dataclasses.dataclass(frozen=True)
class Poison:
    """Endless; its reward is nan from one step on."""

    after: int = 20
    name: str = "Poison"

    @property
    def observation_space(self):
        return Box(-1e6, 1e6, (1,), jnp.float32)

    @property
    def action_space(self):
        return Discrete(2)

    def reset(self, key):
        return jnp.int32(0), jnp.zeros(1)

    def step(self, key, state, action):
        reward = jnp.where(state + 1 >= self.after, jnp.nan, 0.0).astype(jnp.float32)
        return state + 1, jnp.zeros(1), reward, jnp.bool(False), jnp.bool(False)
