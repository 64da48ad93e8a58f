"""Wrappers of one environment, with one agent or several. Environments do not reset themselves, so wrappers need no special
case for the end of an episode.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import spaces
from msrl_jax.envs.base import (
    Environment,
    PyTree,
    Stepped,
    TimeStep,
    VectorEnvironment,
    WithoutStatistics,
    Wrapper,
    delegate,
    is_on_host,
)
from msrl_jax.fragments.metrics import Mean
from msrl_jax.fragments.support.checks import whole
from msrl_jax.fragments.support.tracebacks import entry


class EnvironmentWrapper(Wrapper):
    """Base class of environment wrappers: missing attributes are those of the inner environment, or raise AttributeError."""

    agents = delegate("agents")
    goal_reward = delegate("goal_reward")
    action_mask = property(lambda self: self._delegate("action_mask"))
    global_state = property(lambda self: self._delegate("global_state"))
    privileged_state = property(lambda self: self._delegate("privileged_state"))
    report = property(lambda self: self._delegate("report"))
    render = property(lambda self: self._delegate("render"))
    to_move = property(lambda self: self._delegate("to_move"))
    _inner = staticmethod(lambda state: state)  # returns the inner state; override it in wrappers that add a state

    def _delegate(self, method: str) -> Callable[[Any], jax.Array]:
        delegate = getattr(self.env, method)
        return lambda state: delegate(self._inner(state))

    def reset(self, key: jax.Array) -> tuple[Any, PyTree]:
        """Starts an episode."""
        return self.env.reset(key)

    def step(self, key: jax.Array, state: Any, action: PyTree) -> Stepped:
        """Advances the episode."""
        return self.env.step(key, state, action)


class ObservationWrapper(EnvironmentWrapper):
    """Base class of wrappers that map each observation with `observe`; they also wrap simulators on the host."""

    def observe(self, obs: PyTree) -> PyTree:
        """Maps observations `[..., *observation_shape]`."""
        raise NotImplementedError

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Starts an episode."""
        state, obs = self.env.reset(key)
        return state, self.observe(obs)

    def step(self, key: jax.Array, state: PyTree, action: PyTree) -> Stepped:
        """Advances the episode."""
        state, obs, reward, terminated, truncated = self.env.step(key, state, action)
        return state, self.observe(obs), reward, terminated, truncated

    @property
    def vectorize(self) -> Callable[[int], "ObservedVector"]:
        """Makes copies of host simulators; AttributeError for other environments."""
        if not is_on_host(self.env):
            raise AttributeError(f"{self.name} does not define vectorize")
        return lambda num_envs: ObservedVector(self.env.vectorize(num_envs), self)

    @property
    def film(self) -> Callable[..., Any]:
        """Plays an episode of a simulator that renders itself; AttributeError otherwise."""
        film = self.env.film
        return lambda act, *options: film(lambda obs: act(self.observe(obs)), *options)


@dataclass(frozen=True)
class ObservedVector(WithoutStatistics, Wrapper):
    """Copies of host simulators inside an `ObservationWrapper`.

    Attributes:
      env: the copies.
      by: the wrapper.
    """

    env: VectorEnvironment
    by: ObservationWrapper
    num_envs = delegate("num_envs")
    observation_space = property(lambda self: self.by.observation_space)

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Starts all environments."""
        state, obs = self.env.reset(key)
        return state, self.by.observe(obs)

    def step(self, state: PyTree, action: PyTree) -> tuple[PyTree, TimeStep]:
        """Advances all environments."""
        state, t = self.env.step(state, action)
        return state, t._replace(obs=self.by.observe(t.obs), final_obs=self.by.observe(t.final_obs))

    def pop_episodes(self, state: PyTree) -> tuple[PyTree, dict[str, Mean]]:
        """Returns the metrics of the environments."""
        return self.env.pop_episodes(state)


@dataclass(frozen=True)
class FlattenObservation(ObservationWrapper):
    """Converts every observation to a float32 vector `[D]`.

    It ravels arrays, one-hot encodes integers of a `Discrete` space, and concatenates the parts of a `Tuple` or `Dict` space
    (a dict in the order of its sorted names).

    Attributes:
      env: the environment.
    """

    env: Environment

    @property
    def observation_space(self) -> spaces.Box:
        """A `Box` of shape `[D]`."""
        return spaces.flat_space(self.env.observation_space)

    def observe(self, obs: PyTree) -> jax.Array:
        """Flattens observations. `[..., D]`"""
        return spaces.flatten(self.env.observation_space, obs)


class TimeLimitState(NamedTuple):
    """State of `TimeLimit`: that of the environment, and the number of steps in the episode so far, int32."""

    env_state: PyTree
    steps: jax.Array


@entry
@dataclass(frozen=True)
class TimeLimit(EnvironmentWrapper):
    """Truncates an episode at its `max_steps`-th step.

    A step that terminates (for all agents) is not marked as truncated at the limit. The environment's own truncations pass
    through.

    Attributes:
      env: the environment.
      max_steps: maximum length of an episode in steps, at least 1.
    """

    env: Environment
    max_steps: int
    _inner = attrgetter("env_state")

    def __post_init__(self):
        object.__setattr__(self, "max_steps", whole("TimeLimit: max_steps", self.max_steps, most=2**31 - 1))

    def reset(self, key: jax.Array) -> tuple[TimeLimitState, PyTree]:
        """Starts an episode."""
        env_state, obs = self.env.reset(key)
        return TimeLimitState(env_state, jnp.zeros((), jnp.int32)), obs

    def step(self, key: jax.Array, state: TimeLimitState, action: PyTree) -> Stepped:
        """Advances the episode."""
        env_state, obs, reward, terminated, truncated = self.env.step(key, state.env_state, action)
        steps = state.steps + 1
        at_limit = (steps >= self.max_steps) & jnp.logical_not(jnp.all(terminated))
        return TimeLimitState(env_state, steps), obs, reward, terminated, truncated | at_limit


class FrameStackState(NamedTuple):
    """State of `FrameStack`: that of the environment, and its last `n` observations, oldest first. `[H, W, C*n]` or `[D*n]`"""

    env_state: PyTree
    frames: jax.Array


@entry
@dataclass(frozen=True)
class FrameStack(EnvironmentWrapper):
    """Stacks the last `num_frames` observations along the last axis, oldest first.

    Images `[H, W, C]` become `[H, W, C*n]`, images `[H, W]` become `[H, W, n]`, and vectors `[D]` become `[D*n]`. At the start
    of an episode, the first observation is repeated `n` times.

    Attributes:
      env: the environment; its observations are arrays.
      num_frames: `n`, at least 1.
    """

    env: Environment
    num_frames: int
    _inner = attrgetter("env_state")

    def __post_init__(self):
        space = self.env.observation_space
        if not isinstance(space, spaces.Box) or space.shape == ():
            raise ValueError(f"FrameStack cannot stack observations of {space}; apply FlattenObservation first")
        object.__setattr__(self, "num_frames", whole("FrameStack: num_frames", self.num_frames))

    @property
    def observation_space(self) -> spaces.Box:
        """The `Box` of the stacked frames."""
        space = self.env.observation_space
        assert isinstance(space, spaces.Box)
        bounds = (x[..., None] if x.ndim == 2 else x for x in (space.low, space.high))
        low, high = (np.concatenate([x] * self.num_frames, axis=-1) for x in bounds)
        return spaces.Box(low, high, low.shape, space.dtype)

    def _frame(self, obs: jax.Array) -> jax.Array:
        """Returns the observation, per agent if there are several, with a channel axis."""
        return obs[..., None] if len(self.env.observation_space.shape) == 2 else obs

    def reset(self, key: jax.Array) -> tuple[FrameStackState, jax.Array]:
        """Starts an episode."""
        env_state, obs = self.env.reset(key)
        frames = jnp.concatenate([self._frame(obs)] * self.num_frames, axis=-1)
        return FrameStackState(env_state, frames), frames

    def step(self, key: jax.Array, state: FrameStackState, action: PyTree) -> Stepped:
        """Advances the episode."""
        env_state, obs, reward, terminated, truncated = self.env.step(key, state.env_state, action)
        frame = self._frame(obs)
        frames = jnp.concatenate([state.frames[..., frame.shape[-1] :], frame], axis=-1)
        return FrameStackState(env_state, frames), frames, reward, terminated, truncated
