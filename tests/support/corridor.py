"""A user's own environment: a plain class, nothing inherited."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax import envs


class CorridorState(NamedTuple):
    cell: jax.Array
    steps: jax.Array


class Corridor:
    """Walk right to cell `length`, which pays 1; after `max_steps` steps the episode is cut off."""

    def __init__(self, length: int = 3, max_steps: int = 4):
        self.length, self.max_steps = length, max_steps
        self.observation_space = envs.Box(0, length, (1,))
        self.action_space = envs.Discrete(2)

    def reset(self, key):
        state = CorridorState(cell=jnp.int32(0), steps=jnp.int32(0))
        return state, self._observe(state)

    def step(self, key, state, action):
        cell = jnp.clip(state.cell + jnp.where(action == 1, 1, -1), 0, self.length)
        state = CorridorState(cell, state.steps + 1)
        terminated = cell == self.length
        truncated = (state.steps == self.max_steps) & ~terminated
        return state, self._observe(state), jnp.float32(terminated), terminated, truncated

    def _observe(self, state):
        return jnp.float32(state.cell)[None]
