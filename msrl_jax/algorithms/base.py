"""What an algorithm is: a config, and a function that builds pure functions for one environment.

In the shape descriptions of this package, `T` denotes the length of an unroll and `E` the number of environments.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import jax

from msrl_jax import _registry, envs
from msrl_jax.envs import Environment, VectorEnvironment
from msrl_jax.metrics import Mean

Metrics = Mapping[str, jax.Array | Mean]


@dataclasses.dataclass(frozen=True)
class Agent:
    """An algorithm bound to one environment and one config: pure functions, and nothing else.

    Attributes:
      init: makes the state of a run from a typed PRNG key. The state is a NamedTuple of arrays with a field `params`.
      iteration: one training iteration, `state -> (state, metrics)`; it calls fragments and knows no placement.
      act: `(state, obs [E, ...], key) -> action [E, ...]`. Observations and actions are those of `env`; the action is the
        most probable one if `key` is None. With an `initial_carry`, it is `(state, obs, key, carry) -> (action, carry)`.
      axes: a prefix tree of the state with the logical axis names of its dimensions, as PartitionSpecs.
      steps_per_iteration: environment steps per iteration, over all environments.
      updates_per_iteration: gradient steps per iteration, at most: how often the optimizer changes the parameters.
      env: the vector environment that `iteration` steps.
      initial_carry: `num_envs -> carry [E, ...]`, the recurrent state at the start of an episode; None if acting needs none.
      env_group: environments come in groups of this many adjacent ones; a group has to lie on one device.
      data: for every field of the state that holds data from outside of the run, such as a data set: a pytree of host
        arrays. `init` gives `()` for such a field, `with_data` fills it in, and `iteration` leaves it as it is. So data are
        arguments of a program rather than constants, are held once for all members, and are no part of a checkpoint.
      unit: what a step of the run is.
    """

    init: Callable[[jax.Array], Any]
    iteration: Callable[[Any], tuple[Any, Metrics]]
    act: Callable[..., Any]
    axes: Any
    steps_per_iteration: int
    updates_per_iteration: int
    env: VectorEnvironment
    initial_carry: Callable[[int], Any] | None = None
    env_group: int = 1
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unit: Literal["environment steps", "updates"] = "environment steps"

    def with_data(self, state: Any) -> Any:
        """A state as `init` made it, or without its data, with the data in it."""
        return state._replace(**self.data) if self.data else state

    def without_data(self, state: Any) -> Any:
        """A state without its data."""
        return state._replace(**dict.fromkeys(self.data, ())) if self.data else state


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """An entry of the registry.

    Attributes:
      name: the name by which it is asked for, such as `"ppo"`.
      config: its config class, a frozen dataclass whose defaults are a sensible start.
      build: `(env, config) -> Agent`.
    """

    name: str
    config: type
    build: Callable[[Environment, Any], Agent]


def training_environment(
    env: Environment, num_envs: int, *, normalize_observations: bool, normalize_rewards: bool, discount: float
) -> VectorEnvironment:
    """Makes the vector environment that an algorithm trains on: episode statistics, then normalization if wanted.

    Args:
      env: one environment.
      num_envs: how many, `E`.
      normalize_observations: whether observations are standardized by running statistics.
      normalize_rewards: whether rewards are divided by the running deviation of the discounted return.
      discount: the factor per step of that return.

    Returns:
      The vector environment; its statistics are of raw rewards.
    """
    vector: VectorEnvironment = envs.EpisodeStatistics(envs.vectorize(env, num_envs))
    observed = envs.NormalizeObservation(vector) if normalize_observations else vector
    return envs.NormalizeReward(observed, discount) if normalize_rewards else observed


StateT = TypeVar("StateT")


def logical_axes(state: type[StateT], **axes: Any) -> StateT:
    """Names the logical axes of the fields of a state.

    Args:
      state: its class, a NamedTuple.
      **axes: for every field without a default, a `PartitionSpec` of logical axis names for the dimensions of its leaves, or
        a prefix tree of such.

    Returns:
      A tree as the state, with these in place of arrays: `Agent.axes`.

    Raises:
      TypeError: if a field is missing, or if there is no such field.
    """
    return state(**axes)


ALGORITHMS: dict[str, Algorithm] = {}


def register(algorithm: Algorithm) -> Algorithm:
    """Adds an algorithm to the registry, so that `get` finds it by its name.

    Args:
      algorithm: the entry to add.

    Returns:
      The same entry.

    Raises:
      ValueError: if another algorithm has that name.
    """
    return _registry.add("algorithm", ALGORITHMS, algorithm.name, algorithm)


def names() -> list[str]:
    """The names of all algorithms."""
    return sorted(ALGORITHMS)


def get(name: str) -> Algorithm:
    """Looks up an algorithm by name.

    Args:
      name: a key of `ALGORITHMS`.

    Returns:
      The registered algorithm.

    Raises:
      ValueError: on an unknown name; the message suggests the nearest one.
    """
    return _registry.find("algorithm", ALGORITHMS, name)
