"""`Agent`, an algorithm for one environment as pure functions; and helpers for keys, steps and learning rates.

In the shape descriptions of this package, `T` denotes the length of an unroll and `E` the number of environments.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax

from msrl_jax.agents.optimizers import has_own_rate
from msrl_jax.envs import VectorEnvironment
from msrl_jax.fragments.counters import Counter, advance
from msrl_jax.fragments.metrics import Mean
from msrl_jax.fragments.progress import Progress as Progress

Metrics = Mapping[str, jax.Array | Mean]


@dataclasses.dataclass(frozen=True)
class Agent:
    """An algorithm for one environment and one config, as pure functions.

    Attributes:
      init: makes the state of a run from a typed PRNG key. The state is a NamedTuple of arrays with
        the fields `params` and `env_state`.
      iteration: one training iteration, `(state, progress) -> (state, metrics)`; it calls fragments, and ignores placement.
        That of an actor-critic also takes `add_bonus` (`loops/trajectory.py`), for intrinsic rewards.
      act: `(state, obs [E, ...], key, carry) -> (action [E, ...], carry)`. Observations and actions have the spaces of
        `env`; the action is the most probable one if `key` is None. Agents of action values ignore `key`.
      axes: a prefix tree of the state; its leaves are PartitionSpecs with the logical axis names of the dimensions.
      steps_per_iteration: environment steps per iteration, over all environments.
      updates_per_iteration: largest number of gradient steps per iteration.
      learning_starts: environment steps that a replay buffer must hold before the first update; 0 without a buffer.
      env: the vector environment that `iteration` steps.
      initial_carry: `num_envs -> carry [E, ...]`, the carry at the start of an episode: a pytree, which has no leaves if the
        agent has no recurrent core.
      env_group: size of a group of adjacent environments; all environments of a group must be on one device.
      probabilities: `(state, obs [E, ...]) -> [E, ..., N]`, or `[E, ..., K, N]` for `K` integers: the probabilities from which
        `act` samples if it gets a key; None if the policy is not categorical, or if it is recurrent.
      data: fields of the state that hold data from outside the run, such as a data set, and their values as host arrays.
        `init` sets such a field to `()`, `with_data` fills it in, and `iteration` does not change it. The data are therefore
        arguments of a program, not constants; all population members share one copy; and checkpoints omit them.
      unit: the unit in which the run counts its steps.
      ranked: whether a higher return means a better run; False if teams compete.
    """

    init: Callable[[jax.Array], Any]
    iteration: Callable[..., tuple[Any, Metrics]]
    act: Callable[..., Any]
    axes: Any
    steps_per_iteration: int
    updates_per_iteration: int
    env: VectorEnvironment
    initial_carry: Callable[[int], Any] = lambda num_envs: ()
    env_group: int = 1
    probabilities: Callable[[Any, Any], jax.Array] | None = None
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unit: Literal["environment steps", "updates"] = "environment steps"
    ranked: bool = True
    learning_starts: int = 0

    @property
    def is_recurrent(self) -> bool:
        """Whether the agent has a recurrent core."""
        return bool(jax.tree.leaves(jax.eval_shape(lambda: self.initial_carry(1))))

    def with_data(self, state: Any) -> Any:
        """Returns the state with its data filled in."""
        return with_innermost(state, innermost(state)._replace(**self.data)) if self.data else state

    def without_data(self, state: Any) -> Any:
        """Returns the state without its data."""
        empty = dict.fromkeys(self.data, ())
        return with_innermost(state, innermost(state)._replace(**empty)) if self.data else state


def innermost(state: Any) -> Any:
    """Returns the state of the algorithm itself. Transformations of an agent keep the wrapped state in a field `inner`."""
    while "inner" in getattr(state, "_fields", ()):
        state = state.inner
    return state


def with_innermost(state: Any, new: Any) -> Any:
    """Returns the state with its innermost state replaced."""
    return state._replace(inner=with_innermost(state.inner, new)) if "inner" in getattr(state, "_fields", ()) else new


def split_keys(keys: jax.Array, unroll_length: int) -> tuple[jax.Array, jax.Array]:
    """Splits the keys of environments `[E]` into keys for the next unroll `[E]` and for the steps of this one `[T, E]`."""
    keys = jax.vmap(lambda key: jax.random.split(key, unroll_length + 1), out_axes=1)(keys)
    return keys[0], keys[1:]


class RolloutFields(Protocol):
    """How many steps of how many environments an iteration takes."""

    @property
    def num_envs(self) -> int:
        """The environments stepped in parallel, `E`."""
        ...

    @property
    def unroll_length(self) -> int:
        """The steps of every environment per iteration, `T`."""
        ...


def steps_before(config: RolloutFields, progress: Progress) -> Counter:
    """Returns the number of environment steps done before each step of an unroll. `[T]`"""
    done = progress.times(config.num_envs * config.unroll_length)
    return advance(done, jnp.arange(config.unroll_length) * config.num_envs)


def annealed(rate: float, progress: Progress, falls: bool) -> jax.Array:
    """Returns the learning rate, which falls linearly to 0 over the run if `falls`. `[]` float32."""
    if not falls or progress.total is None:
        return jnp.float32(rate)
    return jnp.asarray(optax.linear_schedule(rate, 0.0, transition_steps=1)(progress.fraction))


def learning_rate_at(config: Any, progress: Progress) -> jax.Array | None:
    """Returns the current learning rate, `[]` float32; None if the optimizer has its own or adapts it."""
    if has_own_rate(config):
        return None
    return annealed(config.learning_rate, progress, config.anneal_learning_rate)


def learning_rate_metric(learning_rate: jax.Array | None) -> dict[str, jax.Array]:
    """Returns the metric `learning_rate`; an empty dict if the optimizer has its own learning rate."""
    return {} if learning_rate is None else {"learning_rate": learning_rate}


StateT = TypeVar("StateT")


def logical_axes(state: type[StateT], **axes: Any) -> StateT:
    """Names the logical axes of a state: an instance with `PartitionSpec`s, or prefix trees of them, instead of arrays."""
    return state(**axes)
