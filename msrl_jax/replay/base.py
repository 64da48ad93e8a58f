"""The interface of replay buffers: a state, and pure functions of it.

In the shape descriptions of this package, `E` is the number of environments, `T` the number of steps per environment of one
insertion, `B` the batch size and `S` the length of a sampled window. A buffer consists of `G` independent shards: each holds
`E / G` adjacent environments and draws `B / G` windows of every batch. On up to `G` devices, insertion moves no data between
devices, and samples do not depend on the number of devices.

A step of `A` agents has a joint observation, a joint action, and `[A]` rewards and episode ends. An agent that has left its
episode stays terminated until the episode ends.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import PartitionSpec as P

from msrl_jax.fragments.runtime.memory import device_memory, own_devices, tree_bytes
from msrl_jax.fragments.support.checks import shown

SHARD_AXIS = "shard"  # the logical axis of the shards `G`


class ReplayState(NamedTuple):
    """The state of a buffer. Donate it, so that insertion writes in place.

    Attributes:
      items: the stored leaves of the items, packed by their codecs. shape=(G, L, E/G, ...), a ring of `L` steps
      added: number of steps inserted per environment, modulo a large multiple of `L`. shape=(), dtype=int32
      filled: number of steps held per environment, at most `L`. shape=(), dtype=int32
      lost: number of inserted items that a codec could not store exactly; it saturates at the largest int32. shape=(G,),
        dtype=int32
      priorities: the state of prioritized sampling, `()` for other buffers.
    """

    items: Any
    added: jax.Array
    filled: jax.Array
    lost: jax.Array
    priorities: Any = ()


class Indices(NamedTuple):
    """The positions of the windows of a batch.

    Attributes:
      step: the first step, counted like `ReplayState.added`; it distinguishes a window from a later one in the same slot.
        shape=(B,), dtype=int32
      env: the environment. shape=(B,), dtype=int32
    """

    step: jax.Array
    env: jax.Array


class Sample(NamedTuple):
    """A batch.

    Attributes:
      experience: the items. shape=(B, ...), or (S, B, ...) for windows with `S > 1`; the fields of `NStep` for n-step
        transitions.
      indices: the positions of the items.
      probability: the probability of drawing each item. shape=(B,)
      weight: loss weights that correct for these probabilities; 1 if all windows are equally probable. shape=(B,)
    """

    experience: Any
    indices: Indices
    probability: jax.Array
    weight: jax.Array


class Transition(NamedTuple):
    """One step in a buffer of n-step transitions; its items may have more fields.

    Attributes:
      obs: the observation before the action.
      action: the action.
      reward: the reward, or the rewards of several agents. shape=() or (A,)
      terminated: whether the episode ended in a terminal state. shape=() or (A,), bool
      truncated: whether the episode was cut short. shape=() or (A,), bool
      next_obs: the true successor, `TimeStep.final_obs`. At the end of an episode it differs from the next `obs`.
      carry: the actor's recurrent carry before `obs`, zeros at the first step of an episode; `()` if it has none.
      valid: whether the step is valid; None if all are. A window with an invalid step has weight 0. shape=(), bool
      episode: twice the number of the episode in its environment, plus 1 at its last step; set by a buffer that relabels goals,
        `()` otherwise. shape=(), int32
    """

    obs: Any
    action: Any
    reward: Any
    terminated: Any
    truncated: Any
    next_obs: Any
    carry: Any = ()
    valid: Any = None
    episode: Any = ()


class NStep(NamedTuple):
    """A step with the rewards of up to n steps: its value target is `reward + discount * value(next_obs)`.

    Attributes:
      obs: the observation before the action. shape=(B, ...)
      action: the action. shape=(B, ...)
      reward: the discounted sum of the rewards, up to the end of the episode. shape=(B,) or (B, A)
      discount: the weight of the successor's value: a power of the discount factor, or 0 after a terminal state. shape=(B,) or
        (B, A)
      next_obs: the true successor of the last step whose reward is in the sum, or in any agent's sum. shape=(B, ...)
    """

    obs: Any
    action: Any
    reward: jax.Array
    discount: jax.Array
    next_obs: Any


@dataclasses.dataclass(frozen=True)
class ReplayBuffer:
    """A replay buffer: pure functions of its state, and its sizes.

    Attributes:
      init: `() -> state`, an empty buffer.
      insert: `(state, items [T, E, ...]) -> state`: overwrites the oldest steps.
      sample: `(state, key, data=(), fraction=0.0) -> Sample`, with replacement; `fraction` is the completed fraction of the
        run, for schedules. Valid once `ready(state)`. An empty buffer raises ValueError; under `jit`, where its state is not
        known, it returns zeros.
      update: `(state, indices, td_error [..., B]) -> state`: sets priorities from TD errors of either sign, for one sampled
        batch or several (the last one wins). Ignores windows that have been overwritten, and errors that are not finite.
        Buffers without priorities return the state. Do not call it inside `lax.cond`, which would copy the priorities; pass
        nan errors instead, which change nothing.
      size: `state -> int32 scalar`: number of windows that can be sampled.
      ready: `state -> bool scalar`: whether `min_size` steps are held.
      report: `state -> metrics`, float32 scalars: `replay_size`, and `replay_lost` if a codec can lose items.
      axes: a prefix tree of the state with the logical axis names of its dimensions.
      capacity: number of steps of all environments that it holds.
      min_size: number of steps of all environments that it must hold to be ready.
      batch_size: number of windows per batch, `B`.
      nbytes: number of bytes of the state.
      shards: `G`.
      data: host arrays that `sample` also reads and no function changes, such as a dataset; `()` for most buffers. They are
        an argument of `sample`, so that programs do not contain them as constants.
      data_axes: a prefix tree of `data` with logical axis names, like `axes`.
      may_be_invalid: whether steps may be invalid (not `valid`); windows with such steps have weight 0.
    """

    init: Callable[[], ReplayState]
    insert: Callable[[ReplayState, Any], ReplayState]
    sample: Callable[..., Sample]
    update: Callable[[ReplayState, Indices, jax.Array], ReplayState]
    size: Callable[[ReplayState], jax.Array]
    ready: Callable[[ReplayState], jax.Array]
    report: Callable[[ReplayState], Mapping[str, jax.Array]]
    axes: ReplayState
    capacity: int
    min_size: int
    batch_size: int
    nbytes: int
    shards: int
    data: Any = ()
    data_axes: Any = dataclasses.field(default_factory=P)
    may_be_invalid: bool = False


def add_saturating(count: jax.Array, new: jax.Array) -> jax.Array:
    """Adds to a nonnegative count, saturating at the largest int32 instead of wrapping. `[...]` int32"""
    return count + jnp.minimum(new, jnp.iinfo(jnp.int32).max - count)


def check_numbers(**arguments: float) -> None:
    """Raises ValueError unless every argument is traced, or a finite, nonnegative number."""
    for name, value in arguments.items():
        is_number = isinstance(value, numbers.Real) and math.isfinite(value) and value >= 0
        if not isinstance(value, Tracer) and not is_number:
            raise ValueError(f"{name}={shown(value)}: use a finite number of at least 0")


def bytes_on_devices(init: Callable[[], Any], parts: int, name: str, capacity: int) -> int:
    """Returns the bytes of a state; raises ValueError if they exceed the memory of the `parts` devices that it can be split
    over.
    """
    nbytes = tree_bytes(jax.eval_shape(init))
    local = own_devices()
    devices = local[: math.gcd(parts, len(local))]
    limit = device_memory(devices)
    if limit is not None and nbytes > limit:
        raise ValueError(
            f"{name} takes {nbytes:,} bytes, but the {len(devices)} {devices[0].platform} devices that it can be split over "
            f"have {limit:,} bytes; use capacity={limit * capacity // nbytes} or less, smaller dtypes (storage={{...}}), or "
            f"more devices (and shards)"
        )
    return nbytes
