"""Small environments of several agents, and their one-agent form."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import Box, Discrete


class Line(NamedTuple):
    position: jax.Array
    goal: jax.Array
    time: jax.Array


@dataclasses.dataclass(frozen=True)
class Homes:
    """Agents on a line; each looks for its home, and leaves the episode there if `leave`. All see who is where."""

    num_agents: int = 3
    horizon: int = 12
    leave: bool = True
    action_space = Discrete(3)

    @property
    def agents(self):
        return tuple(f"walker_{i}" for i in range(self.num_agents))

    @property
    def observation_space(self):
        return Box(-np.inf, np.inf, (2 + self.num_agents,))

    def _observe(self, s):
        near = jnp.broadcast_to(s.position, (self.num_agents, self.num_agents)) - s.position[:, None]
        own = jnp.stack([s.position, s.goal - s.position], -1)
        return jnp.concatenate([own, near], -1)

    def reset(self, key):
        position, goal = jax.random.uniform(key, (2, self.num_agents), minval=-1.0)
        state = Line(position, goal, jnp.int32(0))
        return state, self._observe(state)

    def step(self, key, state, action):
        noise = 0.05 * jax.random.normal(key, (self.num_agents,))
        state = Line(jnp.clip(state.position + 0.3 * (action - 1) + noise, -2.0, 2.0), state.goal, state.time + 1)
        distance = jnp.abs(state.goal - state.position)
        home = (distance < 0.1) & self.leave
        return state, self._observe(state), -distance, home, state.time >= self.horizon


@dataclasses.dataclass(frozen=True)
class Alone:
    """The first agent of an environment, as an environment of one agent."""

    env: Homes

    @property
    def observation_space(self):
        return self.env.observation_space

    @property
    def action_space(self):
        return self.env.action_space

    def reset(self, key):
        state, obs = self.env.reset(key)
        return state, obs[0]

    def step(self, key, state, action):
        state, obs, reward, terminated, truncated = self.env.step(key, state, action[None])
        return state, obs[0], reward[0], terminated[0], truncated
