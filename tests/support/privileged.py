"""Environments in which critics see more than actors; or nobody sees what the reward will be."""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax.envs import Box, Discrete, make
from msrl_jax.envs.wrappers import EnvironmentWrapper


class OccludedState(NamedTuple):
    env_state: Any
    obs: jax.Array


@dataclass(frozen=True)
class Occluded(EnvironmentWrapper):
    """Actors see the first numbers of an observation, critics all."""

    env: Any
    visible: int = 2
    _inner = attrgetter("env_state")

    @property
    def observation_space(self):
        space = self.env.observation_space
        return Box(space.low[: self.visible], space.high[: self.visible], (self.visible,))

    def reset(self, key):
        env_state, obs = self.env.reset(key)
        return OccludedState(env_state, obs), obs[: self.visible]

    def step(self, key, state, action):
        env_state, obs, *outcome = self.env.step(key, state.env_state, action)
        return OccludedState(env_state, obs), obs[: self.visible], *outcome

    def privileged_state(self, state):
        return state.obs


def cartpole() -> Occluded:
    return Occluded(make("CartPole-v1"))  # of which the first two numbers are the position and the speed of the cart


def pendulum() -> Occluded:
    return Occluded(make("Pendulum-v1", max_steps_in_episode=15))


DISCRETE = Discrete(2)


class GuessState(NamedTuple):
    sign: jax.Array
    steps: jax.Array


@dataclass(frozen=True)
class Unseen:
    """Every step of an episode gives the reward -1, or every step 1, whatever is done, and nobody sees which.

    Episodes are truncated after two steps, so with a discount of 1/2 a state is worth 2 or -2.
    """

    action_space: Any = DISCRETE
    name = "Unseen"
    observation_space = Box(0, 1, (3,))

    def _obs(self, state):
        return jnp.zeros(3).at[state.steps].set(1.0)

    def reset(self, key):
        state = GuessState(jax.random.rademacher(key, (), jnp.float32), jnp.int32(0))
        return state, self._obs(state)

    def step(self, key, state, action):
        state = state._replace(steps=state.steps + 1)
        return state, self._obs(state), state.sign, jnp.asarray(False), state.steps >= 2


class Seen(Unseen):
    """The same environment, but critics see which, in a dict."""

    def privileged_state(self, state):
        return {"sign": state.sign, "obs": self._obs(state)}
