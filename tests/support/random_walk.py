"""A small environment whose episodes end in both ways, within a few steps."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import Box, Discrete


class Walk(NamedTuple):
    position: jax.Array
    time: jax.Array


@dataclasses.dataclass(frozen=True)
class RandomWalk:
    """A walker on a line starts near 0 and moves by its action and by chance. Beyond 1 it terminates; time truncates."""

    continuous: bool = False
    max_steps: int = 5
    observation_space = Box(-np.inf, np.inf, (3,))

    @property
    def action_space(self):
        return Box(np.float32([-0.5, 0.0]), np.float32([0.5, 1.0]), (2,)) if self.continuous else Discrete(3)

    def reset(self, key):
        state = Walk(jax.random.uniform(key, (), minval=-0.3, maxval=0.3), jnp.int32(0))
        return state, self._observe(state)

    def step(self, key, state, action):
        push = action[0] * action[1] if self.continuous else (action - 1) * 0.3
        state = Walk(state.position + push + 0.3 * jax.random.normal(key), state.time + 1)
        terminated = jnp.abs(state.position) > 1
        return state, self._observe(state), state.position, terminated, state.time >= self.max_steps

    def _observe(self, state):
        return jnp.stack([state.position, jnp.square(state.position), state.time / self.max_steps])
