"""A small environment whose actions are several integers, and environments with one integer in place of a choice."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import Box, MultiDiscrete

SIZES, LOWEST = (2, 4, 3), (0, -1, 5)
COUNT = 4


class Tried(NamedTuple):
    shown: jax.Array
    time: jax.Array


class Lock:
    """A lock shows one of four numbers, and opens if all three wheels are where that number wants them.

    It may be tried four times; who fails the second time has to stop.
    """

    observation_space = Box(-1, 1, (COUNT,))
    action_space = Box(np.array(LOWEST), np.add(LOWEST, SIZES) - 1, (3,), jnp.int32)

    def reset(self, key):
        state = Tried(jax.random.randint(key, (), 0, COUNT), jnp.int32(0))
        return state, jax.nn.one_hot(state.shown, COUNT)

    def step(self, key, state, action):
        opened = (action == self.wanted(state.shown)).all()
        after = Tried(jax.random.randint(key, (), 0, COUNT), state.time + 1)
        obs = jax.nn.one_hot(after.shown, COUNT)
        return after, obs, jnp.float32(opened), (after.time == 2) & ~opened, after.time == 4

    @staticmethod
    def wanted(shown):
        """The places of the wheels `[3]` for a number."""
        return jnp.array(LOWEST) + (shown + jnp.arange(3)) % jnp.array(SIZES)


@dataclasses.dataclass(frozen=True)
class OneInteger:
    """An environment with choices, of one agent or several, in which a choice is an action of one integer."""

    env: Any

    def __post_init__(self):
        if hasattr(self.env, "agents"):
            object.__setattr__(self, "agents", self.env.agents)

    @property
    def observation_space(self):
        return self.env.observation_space

    @property
    def action_space(self):
        return MultiDiscrete([self.env.action_space.n])

    def reset(self, key):
        return self.env.reset(key)

    def step(self, key, state, action):
        return self.env.step(key, state, action[..., 0])
