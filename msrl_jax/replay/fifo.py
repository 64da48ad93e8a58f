"""A queue of whole batches, such as trajectories sent from actors to a learner."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from msrl_jax.fragments.runtime.memory import own_devices
from msrl_jax.fragments.support.checks import whole
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.replay.base import add_saturating, bytes_on_devices


class FifoState(NamedTuple):
    """The state of a queue. Donate it, so that insertion writes in place.

    Attributes:
      batches: one slot per batch. shape=(N, ...)
      first: the slot of the oldest batch. shape=(), dtype=int32
      length: number of batches held. shape=(), dtype=int32
      refused: number of refused batches; it saturates at the largest int32. shape=(), dtype=int32
    """

    batches: Any
    first: jax.Array
    length: jax.Array
    refused: jax.Array


@dataclasses.dataclass(frozen=True)
class Fifo:
    """A queue of batches: pure functions of its state, and its sizes.

    Attributes:
      init: `() -> state`, an empty queue.
      insert: `(state, batch) -> state`: appends a batch. A full queue refuses the batch and counts the refusal.
      pop: `state -> (state, batch)`: removes the oldest batch. Valid if `ready(state)`; an empty queue does not change and
        returns zeros or an old batch.
      sample: `(state, key) -> batch`: draws one of the held batches uniformly and keeps it. Valid if `ready(state)`.
      size: `state -> int32 scalar`: number of batches that it holds.
      ready: `state -> bool scalar`: whether it holds a batch.
      axes: a prefix tree of the state with the logical axis names of its dimensions.
      capacity: maximum number of batches, `N`.
      nbytes: bytes of the state.
    """

    init: Callable[[], FifoState]
    insert: Callable[[FifoState, Any], FifoState]
    pop: Callable[[FifoState], tuple[FifoState, Any]]
    sample: Callable[[FifoState, jax.Array], Any]
    size: Callable[[FifoState], jax.Array]
    ready: Callable[[FifoState], jax.Array]
    axes: FifoState
    capacity: int
    nbytes: int


@entry
def fifo(example: Any, *, capacity: int, axes: Any = None) -> Fifo:
    """Makes a first-in, first-out queue of whole batches.

    Args:
      example: a batch: a pytree of arrays or of `jax.ShapeDtypeStruct`; its values do not matter.
      capacity: maximum number of batches, `N`.
      axes: a prefix tree of a batch with the logical axis names of its dimensions; None for trajectories `[T, E, ...]`, which
        are split along `E`.

    Returns:
      The queue.

    Raises:
      ValueError: if the capacity is not a positive integer, or the queue exceeds the devices' memory.
    """
    capacity = whole("capacity", capacity)
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), example)

    def init() -> FifoState:
        batches = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), example)
        return FifoState(batches, jnp.int32(0), jnp.int32(0), jnp.int32(0))

    def read_slot(state: FifoState, slot: jax.Array) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, slot, keepdims=False), state.batches)

    def insert(state: FifoState, batch: Any) -> FifoState:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), batch)
        if shapes != example:
            raise ValueError(f"a batch is {shapes}, but the queue takes {example}; make the queue with this batch")
        full = state.length == capacity
        # A full queue rewrites its current batch: selecting between two whole states would copy them.
        slot = (state.first + state.length) % capacity
        new_batch = jax.tree.map(lambda old, new: jnp.where(full, old, new), read_slot(state, slot), batch)
        batches = jax.tree.map(lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, slot, 0), state.batches, new_batch)
        refused = add_saturating(state.refused, full.astype(jnp.int32))
        return FifoState(batches, state.first, jnp.minimum(state.length + 1, capacity), refused)

    def pop(state: FifoState) -> tuple[FifoState, Any]:
        has_batch = state.length > 0
        new_state = state._replace(first=(state.first + has_batch) % capacity, length=state.length - has_batch)
        return new_state, read_slot(state, state.first)

    def sample(state: FifoState, key: jax.Array) -> Any:
        offset = jax.random.randint(key, (), 0, jnp.maximum(state.length, 1), jnp.int32)
        return read_slot(state, (state.first + offset) % capacity)

    axes = P(None, "env") if axes is None else axes
    batch_axes = jax.tree.map(lambda a: P(None, *(a or ())), axes, is_leaf=lambda a: a is None or isinstance(a, P))
    return Fifo(
        init=init,
        insert=insert,
        pop=pop,
        sample=sample,
        size=lambda state: state.length,
        ready=lambda state: state.length > 0,
        axes=FifoState(batches=batch_axes, first=P(), length=P(), refused=P()),  # pyright: ignore[reportArgumentType]
        capacity=capacity,
        nbytes=bytes_on_devices(init, len(own_devices()), f"a queue of capacity={capacity} batches", capacity),
    )
