"""Buffers that draw a part of every batch from a run's own experience, and the rest from a data set.

Ball et al. (2023, arXiv 2302.02948) take half of every batch from each source. In the shape descriptions, `B` is the batch
size. Each of `G` shards holds `B / G` rows of a batch: first rows of the run, then rows of the data.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.replay.base import Indices, ReplayBuffer, ReplayState, Sample


def mix(own: ReplayBuffer, data: ReplayBuffer, held: ReplayState) -> ReplayBuffer:
    """Makes a buffer that draws every batch from `own` and from `data`, `held`, whose rows have weight 1 and no valid index."""

    def join(own_rows: jax.Array, data_rows: jax.Array) -> jax.Array:
        parts = (x.reshape(own.shards, -1, *x.shape[1:]) for x in (own_rows, data_rows))
        joined = jnp.concatenate([*parts], 1)
        return joined.reshape(-1, *joined.shape[2:])

    def take_own(x: jax.Array) -> jax.Array:
        """Selects the rows of the run: `[..., B]` becomes `[..., own.batch_size]`."""
        by_shard = x.reshape(*x.shape[:-1], own.shards, -1)
        return by_shard[..., : own.batch_size // own.shards].reshape(*x.shape[:-1], -1)

    def sample(state: ReplayState, key: jax.Array, data_state: Any = (), fraction: jax.Array | float = 0.0) -> Sample:
        own_key, data_key = jax.random.split(key)
        from_run = own.sample(state, own_key, (), fraction)
        from_data = data.sample(data_state, data_key)
        nowhere = jax.tree.map(jnp.zeros_like, from_data.indices)
        return jax.tree.map(join, from_run, from_data._replace(indices=nowhere))

    def update(state: ReplayState, indices: Indices, td_error: jax.Array) -> ReplayState:
        return own.update(state, Indices(*map(take_own, indices)), take_own(td_error))

    return dataclasses.replace(
        own, sample=sample, update=update, batch_size=own.batch_size + data.batch_size, data=held, data_axes=data.axes
    )
