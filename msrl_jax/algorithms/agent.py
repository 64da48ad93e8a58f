"""An agent: an algorithm for one environment, as pure functions, and the count of iterations that the engine keeps for it.

In the shape descriptions of this package, `T` denotes the length of an unroll and `E` the number of environments.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from msrl_jax import counters, envs
from msrl_jax.algorithms.config import ALGORITHMS
from msrl_jax.counters import Counter
from msrl_jax.envs import Environment, VectorEnvironment
from msrl_jax.envs.base import check_made, env_name
from msrl_jax.fragments import fragment
from msrl_jax.metrics import Mean

Metrics = Mapping[str, jax.Array | Mean]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run is. The engine counts; it counts exactly, and no count wraps.

    Attributes:
      iteration: iterations done before this one. shape=()
      total: iterations of the whole run; None if that is not known.
      version: the version of the parameters, for `parameter_version`: iterations done by learners, modulo 2**32. uint32
    """

    iteration: Counter
    total: int | None = dataclasses.field(default=None, metadata={"static": True})
    version: Any = ()

    @property
    def fraction(self) -> jax.Array:
        """The fraction of the run that is done, from 0 to 1; 0 if the length of the run is not known. `[]` float32."""
        return self.fraction_of(self.total) if self.total else jnp.float32(0.0)

    def fraction_of(self, iterations: int, scale: int = 1) -> jax.Array:
        """The iterations done, times `scale`, as a fraction of a number, at most 1. `[]` float32."""
        return counters.fraction(self.iteration, scale, iterations)

    def times(self, number: int) -> Counter:
        """The iterations done, times a number below 2**32, exactly: steps or updates done. shape=()."""
        return counters.times(self.iteration, number)

    def remainder(self, period: int) -> jax.Array:
        """The remainder of the iterations done after division by a period of at most 2**24. `[]` int32."""
        return counters.remainder(self.iteration, period)


@dataclasses.dataclass(frozen=True)
class Agent:
    """An algorithm for one environment and one config, as pure functions.

    Attributes:
      init: makes the state of a run from a typed PRNG key. The state is a NamedTuple of arrays with a field `params`.
      iteration: one training iteration, `(state, progress) -> (state, metrics)`; it calls fragments and knows no placement.
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
    iteration: Callable[..., tuple[Any, Metrics]]
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
        return with_innermost(state, innermost(state)._replace(**self.data)) if self.data else state

    def without_data(self, state: Any) -> Any:
        """A state without its data."""
        empty = dict.fromkeys(self.data, ())
        return with_innermost(state, innermost(state)._replace(**empty)) if self.data else state


# What widens a run is a function from agent to agent. It has one state type, a NamedTuple with the state that it wraps in its
# field `inner`.


def innermost(state: Any) -> Any:
    """The algorithm's own state, within those of the transformations around it."""
    while "inner" in getattr(state, "_fields", ()):
        state = state.inner
    return state


def with_innermost(state: Any, own: Any) -> Any:
    """The state with another innermost one."""
    return state._replace(inner=with_innermost(state.inner, own)) if "inner" in getattr(state, "_fields", ()) else own


def wrapped(agent: Agent, *, init: Callable[..., Any], iteration: Callable[..., Any], axes: Any) -> Agent:
    """An agent whose state holds that of another one in its field `inner`, and which acts like it.

    Args:
      agent: the other one.
      init: `key -> state`.
      iteration: the new iteration.
      axes: the logical axes of the state.

    Returns:
      The agent.
    """
    within = lambda f: None if f is None else lambda state, *args: f(state.inner, *args)  # noqa: E731
    new = {"act": within(agent.act), "probabilities": within(agent.probabilities)}
    return dataclasses.replace(agent, init=init, iteration=iteration, axes=axes, **new)


class Counted(NamedTuple):
    """The state of a run with its count.

    Attributes:
      inner: the state of the agent.
      count: iterations done. shape=()
      version: iterations done by learners, modulo 2**32; `()` if nothing acts. shape=(), dtype=uint32
    """

    inner: Any
    count: Counter  # pyright: ignore[reportIncompatibleMethodOverride]
    version: Any


parameter_version = fragment(role="actor", name="parameter_version")(lambda version: version)
"""Reads a version of parameters where actors are, so that a policy with staleness delays it like them. `[]` uint32."""


def parameter_age(iteration: Counter, version: jax.Array) -> jax.Array:
    """The age in iterations of parameters whose `parameter_version` is known. `[]` float32."""
    return (iteration.low - version).astype(jnp.int32).astype(jnp.float32)


@fragment(role="learner", name="count")
def _next_version(count: Counter, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The next version of the parameters, and the age of those that acted."""
    return count.low + 1, parameter_age(count, seen)


def counted(agent: Agent, iterations: int | None = None) -> Agent:
    """Counts the iterations of an agent, and tells them to it: `iteration(state) -> (state, metrics)`, ready to compile.

    The count depends on no fragment, so every placement counts for itself, and nobody waits for it.

    Args:
      agent: the agent.
      iterations: iterations of the whole run, over which schedules fall or rise; None if that is not known.

    Returns:
      The agent, with the state `Counted`. Its metrics have the age of the acting parameters, `parameter_age`.
    """
    acts = agent.unit == "environment steps"

    def init(key: jax.Array) -> Counted:
        return Counted(agent.init(key), counters.counter(), jnp.uint32(0) if acts else ())

    def iteration(state: Counted) -> tuple[Counted, Metrics]:
        inner, metrics = agent.iteration(state.inner, Progress(state.count, iterations, state.version))
        version, age = state.version, {}
        if acts:
            version, age["parameter_age"] = _next_version(state.count, parameter_version(state.version))
        return Counted(inner, counters.advance(state.count), version), {**age, **metrics}

    return wrapped(agent, init=init, iteration=iteration, axes=Counted(agent.axes, P(), P()))  # type: ignore[arg-type]


def counting_environment(env: Environment, num_envs: int, *, normalize_observations: bool) -> VectorEnvironment:
    """A vector environment of `num_envs` copies with episode statistics, which standardizes observations if wanted."""
    vector: VectorEnvironment = envs.EpisodeStatistics(envs.vectorize(env, num_envs))
    return envs.NormalizeObservation(vector) if normalize_observations else vector


def training_environment(env: Environment, config: Any) -> VectorEnvironment:
    """The vector environment of an on-policy algorithm, with episode statistics (of raw rewards) and what it normalizes."""
    observed = counting_environment(env, config.num_envs, normalize_observations=config.normalize_observations)
    return envs.NormalizeReward(observed, config.discount) if config.normalize_rewards else observed


StateT = TypeVar("StateT")


def logical_axes(state: type[StateT], **axes: Any) -> StateT:
    """Names the logical axes of a state: an instance with `PartitionSpec`s, or prefix trees of them, in place of arrays."""
    return state(**axes)


def check_env(config: Any, env: Any) -> None:
    """Checks that an algorithm can train in an environment.

    Args:
      config: the algorithm.
      env: the environment.

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
    if envs.has_agents(env) == config.many_agents:
        return
    name = env_name(env)
    others = [n for n, c in ALGORITHMS.items() if c.many_agents != config.many_agents and c.offline == config.offline]  # type: ignore[attr-defined]
    if config.many_agents:
        fact = f"algorithm {config.name!r} trains several agents, but environment {name!r} has one: it has no `agents`"
    else:
        fact = f"algorithm {config.name!r} trains one agent, but environment {name!r} has {len(env.agents)}"
    remedy = f"use {', '.join(sorted(others))}, or another environment"
    if not others:
        remedy = "no algorithm that learns from data alone trains several agents"
    raise TypeError(f"{fact}; {remedy}")
