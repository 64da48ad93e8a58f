"""What a replay buffer is: a state, and pure functions of it.

In the shape descriptions of this package, `E` is the number of environments, `T` the steps of each that are inserted at
once, `B` the batch size and `S` the length of a sampled window. A buffer is split into `G` shards: buffers of `E / G`
adjacent environments that share nothing, each of which serves `B / G` of every batch. Split over up to `G` devices, a buffer
moves nothing between them on insertion, and samples do not depend on how many devices there are.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class ReplayState(NamedTuple):
    """What a buffer holds. Donate it: insertion then writes in place.

    Attributes:
      items: the stored leaves of the items, packed by their codecs. shape=(G, L, E/G, ...), a ring of `L` steps
      added: steps inserted of each environment, modulo a large multiple of `L`. shape=(), dtype=int32
      filled: steps held of each environment, at most `L`. shape=(), dtype=int32
      lost: items inserted that a codec could not hold. shape=(G,), dtype=int32
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
    """

    experience: Any
    indices: Indices
    probability: jax.Array


@dataclasses.dataclass(frozen=True)
class Replay:
    """A replay buffer: pure functions, and nothing else.

    Attributes:
      init: `() -> state`, an empty buffer.
      insert: `(state, items [T, E, ...]) -> state`; the oldest steps give way.
      sample: `(state, key) -> Sample`, with replacement. It means something once `ready(state)`: an empty buffer raises
        ValueError, but under `jit`, where its state is not known, it gives zeros.
      update: `(state, indices, td_error [..., B]) -> state`: new priorities from TD errors of either sign, of one sampled batch
        or of several, the last of which counts. Windows that have been overwritten since, and errors that are not finite, are
        left out. Buffers without priorities return the state. Call it outside of `lax.cond`, which would copy the
        priorities: errors of nan change nothing.
      size: `state -> int32 scalar`: how many windows there are to sample.
      ready: `state -> bool scalar`: whether `min_size` steps are held.
      axes: a prefix tree of the state with the logical axis names of its dimensions.
      capacity: steps of all environments that it holds.
      min_size: steps of all environments from which on it serves.
      nbytes: bytes of the state.
      shards: `G`.
    """

    init: Callable[[], ReplayState]
    insert: Callable[[ReplayState, Any], ReplayState]
    sample: Callable[[ReplayState, jax.Array], Sample]
    update: Callable[[ReplayState, Indices, jax.Array], ReplayState]
    size: Callable[[ReplayState], jax.Array]
    ready: Callable[[ReplayState], jax.Array]
    axes: ReplayState
    capacity: int
    min_size: int
    nbytes: int
    shards: int
