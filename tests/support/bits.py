"""A goal-conditioned environment with discrete actions and legal ones: flip bits until they are those of the goal."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax.envs import Box, Dict, Discrete


class BitsState(NamedTuple):
    bits: jax.Array
    goal: jax.Array
    steps: jax.Array


@dataclasses.dataclass(frozen=True)
class Bits:
    """The experiment of section 3.1 of arXiv 1707.01495; an episode ends at the goal, or after `size` steps."""

    size: int = 4
    metrics: ClassVar = {"success": "last"}

    @property
    def observation_space(self):
        return Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), Box(0, 1, (self.size,))))

    @property
    def action_space(self):
        return Discrete(self.size)

    def reset(self, key):
        bits, goal = jax.random.bernoulli(key, shape=(2, self.size)).astype(jnp.float32)
        state = BitsState(bits, goal, jnp.int32(0))
        return state, self._observe(state)

    def step(self, key, state, action):
        state = BitsState(state.bits.at[action].set(1 - state.bits[action]), state.goal, state.steps + 1)
        reward, reached = self.goal_reward(state.bits, state.goal)
        return state, self._observe(state), reward, reached, (state.steps >= self.size) & ~reached

    def goal_reward(self, achieved, desired):
        reached = (achieved == desired).all()
        return jnp.where(reached, 0.0, -1.0), reached

    def report(self, state):
        return {"success": (state.bits == state.goal).all()}

    def _observe(self, state):
        return {"observation": state.bits, "achieved_goal": state.bits, "desired_goal": state.goal}
