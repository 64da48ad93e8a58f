"""gymnax environments as `Environment`s."""

import copy
import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments import spaces as gymnax_spaces
from gymnax.environments.environment import Environment as GymnaxBase
from gymnax.environments.environment import EnvParams

from msrl_jax._checks import whole
from msrl_jax._spelling import suggestion
from msrl_jax.envs import spaces
from msrl_jax.envs.base import PyTree, strong
from msrl_jax.envs.suites import common

_KNOWN = {
    "reset": {"gymnax.environments.environment.Environment.reset"},
    # DeepSea's own step differs from the common step only in counters that it keeps across resets; no other value uses them.
    "step": {"gymnax.environments.environment.Environment.step", "gymnax.environments.bsuite.deep_sea.DeepSea.step"},
}
"""Methods that may be left out, by the names that their definitions have."""


_NUMBERS = (bool, int, float, np.ndarray, np.generic, jax.Array)


@dataclasses.dataclass(frozen=True, eq=False)
class GymnaxEnvironment:
    """A gymnax environment with its parameters, without gymnax's automatic reset.

    Split a key with `jax.random.split`: `step` with the first half, then `reset` with the second half if the episode ended,
    give the results of gymnax's `step` with the whole key. The reward is always float32. No array has a weak type.

    Attributes:
      env: the gymnax environment.
      params: its parameters; the defaults if not given.
      name: name in messages; the name of its class if not given.
      observation_space: gymnax's space with the actual shapes and dtypes of observations.
      action_space: gymnax's space.
    """

    env: GymnaxBase
    params: Any = None
    name: str = ""
    observation_space: spaces.Space = dataclasses.field(init=False)
    action_space: spaces.Space = dataclasses.field(init=False)

    def __post_init__(self):
        kind = type(self.env)
        for method, known in _KNOWN.items():
            own = getattr(kind, method)
            if f"{own.__module__}.{own.__qualname__}" not in known:
                raise ValueError(
                    f"{kind.__name__} replaces gymnax's {method}, which is not called here; move its code to reset_env, "
                    "step_env and is_truncated"
                )
        params = self.env.default_params if self.params is None else self.params
        obs, _ = jax.eval_shape(lambda key: self.env.reset_env(key, params), jax.eval_shape(lambda: jax.random.key(0)))
        for field, value in {
            "params": params,
            "name": self.name or kind.__name__,
            "observation_space": _as_emitted(_convert(self.env.observation_space(params)), obs),
            "action_space": _convert(self.env.action_space(params)),
        }.items():
            object.__setattr__(self, field, value)

    @property
    def default_params(self) -> dict[str, Any]:
        """The parameters that are numbers or arrays of numbers, by name."""
        fields = [field.name for field in dataclasses.fields(self.params) if field.metadata.get("pytree_node", True)]
        return {name: x for name in fields if isinstance(x := getattr(self.params, name), _NUMBERS)}

    def with_params(self, params: Mapping[str, Any]) -> "GymnaxEnvironment":
        """The environment with other values of some parameters, which may be traced; its spaces stay the same."""
        env = copy.copy(self)  # the spaces of parameters that are traced are not known
        object.__setattr__(env, "params", dataclasses.replace(self.params, **params))
        return env

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Starts an episode."""
        obs, state = self.env.reset_env(key, self.params)
        return strong(state), strong(obs)

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> tuple[PyTree, PyTree, jax.Array, jax.Array, jax.Array]:
        """Advances the episode."""
        obs, state, reward, terminated, _ = self.env.step_env(key, state, action, self.params)
        truncated = self.env.is_truncated(state, self.params)
        reward, terminated, truncated = jnp.float32(reward), jnp.bool_(terminated), jnp.bool_(truncated)
        return strong(state), strong(obs), reward, terminated, truncated


def make(name: str, **params: Any) -> GymnaxEnvironment:
    """Builds a gymnax environment by name.

    Args:
      name: one of `gymnax.registered_envs`.
      **params: fields of the environment's gymnax `EnvParams` (`max_steps_in_episode=100`) and arguments of its
        constructor (`size=10` of DeepSea).

    Returns:
      The environment.

    Raises:
      ValueError: on a parameter that the environment lacks, or a value that does not fit it.
      RuntimeError: if the environment needs data that cannot be loaded.
    """
    env, defaults = _construct(name, {})
    fields = [field.name for field in dataclasses.fields(defaults)]
    arguments = [p for p in inspect.signature(type(env)).parameters if p not in fields]
    if unknown := [p for p in params if p not in [*fields, *arguments]]:
        raise ValueError(
            f"{name} has no parameter {unknown[0]!r}{suggestion(unknown[0], [*fields, *arguments])}; "
            f"its EnvParams fields are {fields}, its constructor arguments {arguments or 'none'}"
        )
    if chosen := {p: value for p, value in params.items() if p in arguments}:
        env, defaults = _construct(name, chosen)
    values = {p: common.fit(f"{name}: {p}", value, getattr(defaults, p)) for p, value in params.items() if p in fields}
    if "max_steps_in_episode" in values:
        whole(f"{name}: max_steps_in_episode", values["max_steps_in_episode"])
    return GymnaxEnvironment(env, dataclasses.replace(defaults, **values), name)


def _construct(name: str, arguments: dict[str, Any]) -> tuple[GymnaxBase, EnvParams]:
    try:
        return gymnax.make(name, **arguments)
    except OSError as error:
        raise RuntimeError(
            f"{name} could not load its data ({error}); gymnax downloads it at first use, so connect to the internet, "
            "or put the four MNIST files of https://storage.googleapis.com/cvdf-datasets/mnist/ into /tmp/mnist"
        ) from error


def _convert(space: gymnax_spaces.Space) -> spaces.Space:
    if isinstance(space, gymnax_spaces.Discrete):
        return spaces.Discrete(space.n, space.dtype)
    if isinstance(space, gymnax_spaces.Box):
        limit = np.finfo(np.float32).max if jnp.issubdtype(space.dtype, jnp.floating) else np.inf
        low, high = (np.asarray(bound) for bound in (space.low, space.high))
        low, high = np.where(low <= -limit, -np.inf, low), np.where(high >= limit, np.inf, high)
        return spaces.Box(low, high, space.shape, space.dtype)
    if isinstance(space, gymnax_spaces.Tuple):
        return spaces.Tuple(tuple(_convert(part) for part in space.spaces))
    if isinstance(space, gymnax_spaces.Dict):
        return spaces.Dict({name: _convert(part) for name, part in space.spaces.items()})
    raise TypeError(f"the gymnax space {space!r} is not supported; use Discrete, Box, Tuple or Dict")


def _as_emitted(space: spaces.Space, obs: PyTree) -> spaces.Space:
    """Corrects the shapes and dtypes of a space by an observation; some of gymnax's spaces are wrong (Catch, FourRooms)."""
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple(tuple(_as_emitted(part, x) for part, x in zip(space.spaces, obs, strict=True)))
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: _as_emitted(part, obs[name]) for name, part in space.spaces.items()})
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(space.n, obs.dtype)
    return spaces.Box(space.low, space.high, obs.shape, obs.dtype)
