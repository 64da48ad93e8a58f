"""What a replay buffer is: a state, and pure functions of it.

In the shape descriptions of this package, `E` is the number of environments, `T` the steps of each that are inserted at
once, `B` the batch size and `S` the length of a sampled window. A buffer is split into `G` shards: buffers of `E / G`
adjacent environments that share nothing, each of which serves `B / G` of every batch. Split over up to `G` devices, a buffer
moves nothing between them on insertion, and samples do not depend on how many devices there are.
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
    """What a buffer holds. Donate it: insertion then writes in place.

    Attributes:
      items: the stored leaves of the items, packed by their codecs. shape=(G, L, E/G, ...), a ring of `L` steps
      added: steps inserted of each environment, modulo a large multiple of `L`. shape=(), dtype=int32
      filled: steps held of each environment, at most `L`. shape=(), dtype=int32
      lost: items inserted that a codec could not hold; it stops at the largest int32. shape=(G,), dtype=int32
      priorities: what prioritized sampling needs, `()` otherwise.
    """

    items: Any
    added: jax.Array
    filled: jax.Array
    lost: jax.Array
    priorities: Any = ()


class Indices(NamedTuple):
    """Which windows a batch is made of.

    Attributes:
      step: the first step, counted as `ReplayState.added` is, so that it tells a window from a later one in the same
        place. shape=(B,), dtype=int32
      env: the environment. shape=(B,), dtype=int32
    """

    step: jax.Array
    env: jax.Array


class Sample(NamedTuple):
    """A batch.

    Attributes:
      experience: the items. shape=(B, ...), or (S, B, ...) of windows with `S > 1`; the fields of `NStep` for n-step
        transitions.
      indices: where they were.
      probability: with what probability a draw yields each of them. shape=(B,)
      weight: what corrects a loss for these probabilities; 1 if all windows are equally probable. shape=(B,)
    """

    experience: Any
    indices: Indices
    probability: jax.Array
    weight: jax.Array


class SampleFunction(Protocol):
    """Draws a batch."""

    def __call__(self, state: ReplayState, key: jax.Array, data: Any = ()) -> Sample:
        """Draws a batch from a state, with a typed PRNG key; `data` as in `Replay.data`."""
        ...


@dataclasses.dataclass(frozen=True)
class Replay:
    """A replay buffer: pure functions, and nothing else.

    Attributes:
      init: `() -> state`, an empty buffer.
      insert: `(state, items [T, E, ...]) -> state`; the oldest steps give way.
      sample: `(state, key, data=()) -> Sample`, with replacement. It means something once `ready(state)`: an empty buffer
        raises ValueError, but under `jit`, where its state is not known, it gives zeros.
      update: `(state, indices, td_error [..., B]) -> state`: new priorities from TD errors of either sign, of one sampled batch
        or of several, the last of which counts. Windows that have been overwritten since, and errors that are not finite, are
        left out. Buffers without priorities return the state. Call it outside of `lax.cond`, which would copy the
        priorities: errors of nan change nothing.
      size: `state -> int32 scalar`: how many windows there are to sample.
      ready: `state -> bool scalar`: whether `min_size` steps are held.
      report: `state -> metrics`, float32 scalars: `replay_size`, and `replay_lost` if a codec can lose items.
      axes: a prefix tree of the state with the logical axis names of its dimensions.
      capacity: steps of all environments that it holds.
      min_size: steps of all environments from which on it serves.
      batch_size: windows in a batch, `B`.
      nbytes: bytes of the state.
      shards: `G`.
      data: host arrays that `sample` reads as well and no function changes, such as a data set; `()` for most buffers. They
        are an argument of `sample`, so that they are no constants of a program.
      data_axes: a prefix tree of the data, as `axes` is of the state.
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


def add_saturating(count: jax.Array, new: jax.Array) -> jax.Array:
    """Adds to a count that stops at the largest number of its type, rather than wrap.

    Args:
      count: a count that is not negative. `[...]` int32
      new: what to add, not negative. `[...]` int32

    Returns:
      The sum, or the largest int32 if the sum is larger. `[...]` int32
    """
    return count + jnp.minimum(new, jnp.iinfo(jnp.int32).max - count)
