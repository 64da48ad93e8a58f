"""A user's own environment with legal actions, which remembers for ever that an illegal action was taken."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax import envs

LEFT, RIGHT, JUMP = 0, 1, 2


class MazeState(NamedTuple):
    cell: jax.Array
    steps: jax.Array
    broken: jax.Array


def legal(cell, length):
    """Whether left, right and a jump of two cells stay on the cells from 0 to `length`; no action is legal at the end."""
    cell = np.asarray(cell)
    at = [cell > 0, np.ones_like(cell, bool), cell + 2 <= length]
    return np.stack(at, -1) & (cell < length)[..., None]


class Maze:
    """Walk to cell `length`, which pays 1; after `max_steps` steps the episode is cut off.

    An illegal action breaks the maze: its episode never ends, so the state tells at the end of a run.
    """

    def __init__(self, length: int = 4, max_steps: int = 6, stuck: int | None = None):
        self.length, self.max_steps, self.stuck = length, max_steps, stuck
        self.observation_space = envs.Box(0, length, (2,))
        self.action_space = envs.Discrete(3)

    def action_mask(self, state):
        return self._legal(state)

    def _legal(self, state):
        mask = jnp.asarray(legal(np.arange(self.length + 1), self.length))[state.cell]
        return mask if self.stuck is None else mask & (state.cell != self.stuck)

    def reset(self, key):
        state = MazeState(jax.random.randint(key, (), 0, self.length - 1), jnp.int32(0), jnp.bool(False))
        return state, self._observe(state)

    def step(self, key, state, action):
        broken = state.broken | ~self._legal(state)[action]
        cell = jnp.clip(state.cell + jnp.array([-1, 1, 2])[action], 0, self.length)
        state = MazeState(cell, state.steps + 1, broken)
        terminated = (cell == self.length) & ~broken
        truncated = (state.steps >= self.max_steps) & ~terminated & ~broken
        return state, self._observe(state), jnp.float32(terminated), terminated, truncated

    def _observe(self, state):
        return jnp.stack([state.cell, state.broken]).astype(jnp.float32)
