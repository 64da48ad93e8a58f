"""Privileged state: environments with a method `privileged_state(state)` that only critics see, and its observations.

Algorithms whose critics use it (`config(..., privileged=True)`) train in `with_privileged(env)`; everything else, such as
evaluation, uses the environment itself. The functions of observations also accept plain ones, and then change nothing.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, TypeGuard

import jax

from msrl_jax.envs import spaces
from msrl_jax.envs.base import Environment, PyTree, Stepped, env_name, output_shapes
from msrl_jax.envs.check_types import check_space
from msrl_jax.envs.masks import unmasked, with_mask_of
from msrl_jax.envs.running import RunningStatistics
from msrl_jax.envs.wrappers import EnvironmentWrapper


class PrivilegedObservation(NamedTuple):
    """An observation, and what a critic sees instead; a `Tuple` of two spaces in this form is the space of both.

    Attributes:
      obs: the observation. `[..., *observation_shape]`
      privileged_state: an array, or dicts and tuples of arrays. `[..., *shape]`
    """

    obs: Any
    privileged_state: Any


def has_privileged(env: object) -> bool:
    """Whether an environment has a privileged state."""
    return getattr(env, "privileged_state", None) is not None


def with_privileged(env: Environment) -> Environment:
    """Returns the environment with `PrivilegedObservation`s if it has a privileged state, otherwise the environment itself.

    Raises:
      TypeError: if the privileged state is not an array of numbers, or dicts and tuples of them, or if the environment creates
        its own parallel copies.
    """
    if not has_privileged(env):
        return env
    if hasattr(env, "vectorize"):
        if not dataclasses.is_dataclass(env) or not hasattr(env, "env"):
            raise TypeError(
                f"{env_name(env)} creates its own parallel copies, so critics cannot see its privileged_state; remove that"
            )
        return dataclasses.replace(env, env=with_privileged(env.env))  # type: ignore[type-var]
    return _Privileged(env)  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class _Privileged(EnvironmentWrapper):
    """The environment that `with_privileged` returns."""

    env: Any
    privileged_state = None  # it is in the observations

    def __post_init__(self):
        _ = self.observation_space

    @functools.cached_property
    def observation_space(self) -> spaces.Tuple:  # type: ignore[override]
        name, types = f"{env_name(self.env)}.privileged_state", []
        output_shapes(lambda key: types.append(self.env.privileged_state(self.env.reset(key)[0])))
        try:
            space = spaces.unbounded(types[0])
        except TypeError as error:
            raise TypeError(f"{name} returned {error}; return an array of numbers, or a dict or a tuple of them") from None
        check_space(space, name)
        return spaces.Tuple(PrivilegedObservation(self.env.observation_space, space))

    def _observation(self, state: PyTree, obs: PyTree) -> PrivilegedObservation:
        return PrivilegedObservation(obs, self.env.privileged_state(state))

    def reset(self, key: jax.Array) -> tuple[PyTree, PrivilegedObservation]:
        state, obs = self.env.reset(key)
        return state, self._observation(state, obs)

    def step(self, key: jax.Array, state: PyTree, action: PyTree) -> Stepped:
        state, obs, *outcome = self.env.step(key, state, action)
        return state, self._observation(state, obs), *outcome  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class Unprivileged(EnvironmentWrapper):
    """Removes the `privileged_state` of an environment: critics see the same as actors.

    Attributes:
      env: the environment.
    """

    env: Environment
    privileged_state = None


def are_privileged(space: spaces.Space) -> TypeGuard[spaces.Tuple]:
    """Whether the observations of a space are `PrivilegedObservation`s."""
    return isinstance(space, spaces.Tuple) and isinstance(space.spaces, PrivilegedObservation)


def actor_obs(obs: Any) -> Any:
    """Returns the actor's part of observations: all but the privileged state, with masks if present."""
    plain = unmasked(obs)
    return with_mask_of(obs, plain.obs) if isinstance(plain, PrivilegedObservation) else obs


def with_privileged_of(obs: Any, features: PyTree) -> Any:
    """Features of observations, with the privileged states and the masks of the observations, if any."""
    plain = unmasked(obs)
    return with_mask_of(obs, plain._replace(obs=features) if isinstance(plain, PrivilegedObservation) else features)


def statistics_of(obs: Any, statistics: RunningStatistics) -> RunningStatistics:
    """Returns the statistics of the actor's part if `obs` has only that and the statistics are of `PrivilegedObservation`s."""
    mean, var = statistics.mean, statistics.var
    if not isinstance(mean, PrivilegedObservation) or isinstance(obs, PrivilegedObservation):
        return statistics
    return statistics.replace(mean=mean.obs, var=var.obs)  # type: ignore[attr-defined]
