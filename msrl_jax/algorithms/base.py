"""The interface of an algorithm: a config, and a function that builds an agent for one environment.

In the shape descriptions of this package, `T` denotes the length of an unroll and `E` the number of environments.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import jax

from msrl_jax import _registry, envs
from msrl_jax._spelling import suggestion
from msrl_jax.algorithms.configs.rollout import OnPolicyConfig
from msrl_jax.envs import Environment, VectorEnvironment
from msrl_jax.envs.base import check_made, env_name
from msrl_jax.metrics import Mean

Metrics = Mapping[str, jax.Array | Mean]


@dataclasses.dataclass(frozen=True)
class Agent:
    """An algorithm for one environment and one config, as pure functions.

    Attributes:
      init: makes the state of a run from a typed PRNG key. The state is a NamedTuple of arrays with a field `params`.
      iteration: one training iteration, `state -> (state, metrics)`; it calls fragments and knows no placement.
      act: `(state, obs [E, ...], key) -> action [E, ...]`. Observations and actions are those of `env`; the action is the
        most probable one if `key` is None. A recurrent agent has `(state, obs, key, carry) -> (action, carry)` instead.
      axes: a prefix tree of the state with the logical axis names of its dimensions, as PartitionSpecs.
      steps_per_iteration: environment steps per iteration, over all environments.
      updates_per_iteration: largest number of gradient steps per iteration.
      env: the vector environment that `iteration` steps.
      initial_carry: `num_envs -> carry [E, ...]`, the recurrent state at the start of an episode; None if the agent has none.
      env_group: size of a group of adjacent environments; all environments of a group must be on one device.
      probabilities: `(state, obs [E, ...]) -> [E, ..., N]`, or `[E, ..., K, N]` of `K` integers: what the agent plays outside
        of training with a key; None if its policy is not categorical, or if it is recurrent.
      data: fields of the state that hold data from outside the run, such as a data set, and their values as host arrays.
        `init` sets such a field to `()`, `with_data` fills it in, and `iteration` does not change it. So the data are
        arguments of a program, not constants; all members share one copy; and checkpoints leave them out.
      unit: the unit in which the run counts its steps.
      ranked: whether a run with a higher return is a better one; not if teams oppose each other.
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
    probabilities: Callable[[Any, Any], jax.Array] | None = None
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unit: Literal["environment steps", "updates"] = "environment steps"
    ranked: bool = True

    def with_data(self, state: Any) -> Any:
        """A state with its data filled in."""
        return state._replace(**self.data) if self.data else state

    def without_data(self, state: Any) -> Any:
        """A state without its data."""
        return state._replace(**dict.fromkeys(self.data, ())) if self.data else state


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """An entry of the registry.

    Attributes:
      name: the name for `get`, such as `"ppo"`.
      config: its config class, a frozen dataclass with sensible defaults.
      build: `(env, config) -> Agent`.
      many_agents: whether `env` is a `MultiAgentEnvironment`.
      make_team: `(venv, num_agents, config) -> Team` if the algorithm can train a team beside others.
    """

    name: str
    config: type
    build: Callable[[Any, Any], Agent]
    many_agents: bool = False
    make_team: Callable[..., Any] | None = None

    def make_config(self, config: Any, overrides: Mapping[str, Any]) -> Any:
        """Makes the config of a run.

        Args:
          config: the config to start from; the defaults if None.
          overrides: fields to replace.

        Returns:
          An instance of `self.config`.

        Raises:
          ValueError: on a config of another type, on an unknown field (the message suggests the nearest one), and on a field
            that has no effect with the other fields.
        """
        config = self.config() if config is None else config
        if not isinstance(config, self.config):
            raise ValueError(
                f"config is a {type(config).__name__}, but algorithm {self.name!r} takes a {self.config.__name__}"
            )
        fields = [f.name for f in dataclasses.fields(config)]
        for name in overrides:
            if name not in fields:
                near, kind = suggestion(name, fields), type(config).__name__
                raise ValueError(f"{kind} has no field {name!r}{near}; its fields are {', '.join(fields)}")
        config = dataclasses.replace(config, **overrides)
        config.check_given(overrides)
        return config

    @property
    def offline(self) -> bool:
        """Whether it learns from data alone, with no steps of environments to unroll."""
        return "unroll_length" not in {field.name for field in dataclasses.fields(self.config)}

    def check_env(self, env: Any) -> None:
        """Checks that the algorithm can train in an environment.

        Raises:
          TypeError: if the environment is a class, or has several agents and the algorithm trains one, or the reverse.
          ValueError: if JAX is set not to promote dtypes or ranks.
        """
        check_made(env)
        for setting, default in {"dtype": "standard", "rank": "allow"}.items():
            if (value := str(getattr(jax.config, f"jax_numpy_{setting}_promotion"))) not in (default, "warn"):
                raise ValueError(
                    f"jax_numpy_{setting}_promotion={value!r}: algorithms rely on the promotion of {setting}s; "
                    f"call this under jax.numpy_{setting}_promotion({default!r})"
                )
        if envs.has_agents(env) == self.many_agents:
            return
        name = env_name(env)
        others = [a.name for a in ALGORITHMS.values() if a.many_agents != self.many_agents and a.offline == self.offline]
        if self.many_agents:
            fact = f"algorithm {self.name!r} trains several agents, but environment {name!r} has one: it has no `agents`"
        else:
            fact = f"algorithm {self.name!r} trains one agent, but environment {name!r} has {len(env.agents)}"
        remedy = f"use {', '.join(sorted(others))}, or another environment"
        if not others:
            remedy = "no algorithm that learns from data alone trains several agents"
        raise TypeError(f"{fact}; {remedy}")


def counting_environment(env: Environment, num_envs: int, *, normalize_observations: bool) -> VectorEnvironment:
    """Makes a vector environment with episode statistics.

    Args:
      env: one environment.
      num_envs: number of environments, `E`.
      normalize_observations: whether observations are standardized by running statistics.

    Returns:
      The vector environment.
    """
    vector: VectorEnvironment = envs.EpisodeStatistics(envs.vectorize(env, num_envs))
    return envs.NormalizeObservation(vector) if normalize_observations else vector


def training_environment(env: Environment, config: OnPolicyConfig) -> VectorEnvironment:
    """Makes the vector environment of an on-policy algorithm, with episode statistics and optional normalization.

    Args:
      env: one environment.
      config: the number of environments, what is normalized, and the discount factor of the normalized return.

    Returns:
      The vector environment. Its episode statistics count raw rewards.
    """
    observed = counting_environment(env, config.num_envs, normalize_observations=config.normalize_observations)
    return envs.NormalizeReward(observed, config.discount) if config.normalize_rewards else observed


StateT = TypeVar("StateT")


def logical_axes(state: type[StateT], **axes: Any) -> StateT:
    """Names the logical axes of the fields of a state.

    Args:
      state: its class, a NamedTuple.
      **axes: the axes of every field without a default: a `PartitionSpec` of logical axis names for the dimensions of its
        leaves, or a prefix tree of `PartitionSpec`s.

    Returns:
      A tree for `Agent.axes`: the state with `PartitionSpec`s in place of arrays.

    Raises:
      TypeError: if a field is missing or unknown.
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
      TypeError: if the name is no text.
      ValueError: on an unknown name; the message suggests the nearest one.
    """
    return _registry.find("algorithm", ALGORITHMS, name)
