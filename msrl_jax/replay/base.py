"""The interface of replay buffers: a state, and pure functions of it.

In the shape descriptions of this package, `E` is the number of environments, `T` the steps per environment of one insertion,
`B` the batch size and `S` the length of a sampled window. A buffer consists of `G` independent shards: each holds `E / G`
adjacent environments, and draws `B / G` windows of every batch. On up to `G` devices, insertion moves nothing between devices,
and samples do not depend on the number of devices.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

SHARD_AXIS = "shard"
"""The logical axis of the shards `G`."""


class ReplayState(NamedTuple):
    """The state of a buffer. Donate it: insertion then writes in place.

    Attributes:
      items: the stored leaves of the items, packed by their codecs. shape=(G, L, E/G, ...), a ring of `L` steps
      added: steps inserted per environment, modulo a large multiple of `L`. shape=(), dtype=int32
      filled: steps held per environment, at most `L`. shape=(), dtype=int32
      lost: number of inserted items that a codec could not hold; it stops at the largest int32. shape=(G,), dtype=int32
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
      step: the first step, counted like `ReplayState.added`; it distinguishes a window from a later one in the same place.
        shape=(B,), dtype=int32
      env: the environment. shape=(B,), dtype=int32
    """

    step: jax.Array
    env: jax.Array


class Sample(NamedTuple):
    """A batch.

    Attributes:
      experience: the items. shape=(B, ...), or (S, B, ...) of windows with `S > 1`; the fields of `NStep` for n-step
        transitions.
      indices: the positions of the items.
      probability: the probability of drawing each of them. shape=(B,)
      weight: weights of the losses that correct for these probabilities; 1 if all windows are equally probable. shape=(B,)
    """

    experience: Any
    indices: Indices
    probability: jax.Array
    weight: jax.Array


class SampleFunction(Protocol):
    """Draws a batch."""

    def __call__(self, state: ReplayState, key: jax.Array, data: Any = (), fraction: jax.Array | float = 0.0) -> Sample:
        """Draws a batch from a state, with a typed PRNG key; `data` as in `Replay.data`, `fraction` of the run that is done."""
        ...


@dataclasses.dataclass(frozen=True)
class Replay:
    """A replay buffer: pure functions of its state, and its sizes.

    Attributes:
      init: `() -> state`, an empty buffer.
      insert: `(state, items [T, E, ...]) -> state`: overwrites the oldest steps.
      sample: `(state, key, data=(), fraction=0.0) -> Sample`, with replacement; the fraction of the run that is done is for
        schedules. Valid once `ready(state)`. An empty buffer raises ValueError;
        under `jit`, where its state is not known, it returns zeros.
      update: `(state, indices, td_error [..., B]) -> state`: sets priorities from TD errors of either sign, of one sampled
        batch or of several (the last one counts). Ignores windows that have been overwritten, and errors that are not finite.
        Buffers without priorities return the state. Do not call it inside `lax.cond`, which would copy the priorities; pass
        errors of nan instead, which change nothing.
      size: `state -> int32 scalar`: number of windows that can be sampled.
      ready: `state -> bool scalar`: whether `min_size` steps are held.
      report: `state -> metrics`, float32 scalars: `replay_size`, and `replay_lost` if a codec can lose items.
      axes: a prefix tree of the state with the logical axis names of its dimensions.
      capacity: steps of all environments that it holds.
      min_size: steps of all environments that it must hold to be ready.
      batch_size: windows in a batch, `B`.
      nbytes: bytes of the state.
      shards: `G`.
      data: host arrays that `sample` also reads and no function changes, such as a dataset; `()` for most buffers. They are
        an argument of `sample`, so that programs do not hold them as constants.
      data_axes: a prefix tree of the data, as `axes` is of the state.
      may_be_absent: whether steps may not be `present`; windows with such steps have the weight 0.
    """

    init: Callable[[], ReplayState]
    insert: Callable[[ReplayState, Any], ReplayState]
    sample: SampleFunction
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
    may_be_absent: bool = False


def add_saturating(count: jax.Array, new: jax.Array) -> jax.Array:
    """Adds to a count that stops at the largest int32 instead of wrapping.

    Args:
      count: a count, not negative. `[...]` int32
      new: what to add, not negative. `[...]` int32

    Returns:
      The sum, or the largest int32 if the sum is larger. `[...]` int32
    """
    return count + jnp.minimum(new, jnp.iinfo(jnp.int32).max - count)
