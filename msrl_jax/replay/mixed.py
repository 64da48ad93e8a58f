"""Buffers that draw a part of every batch from a run's own experience, and the rest from a data set.

Ball et al. (2023, arXiv 2302.02948) take half of every batch from each source. In the shape descriptions, `B` is the batch
size. Each of `G` shards holds `B / G` rows of a batch: first rows of the run, then rows of the data.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.replay.base import Indices, ReplayBuffer, ReplayState, Sample


def mix(run_buffer: ReplayBuffer, data_buffer: ReplayBuffer, data_state: ReplayState) -> ReplayBuffer:
    """Makes a buffer that draws every batch from both buffers; the rows of the data have weight 1 and no valid index."""

    def join(own_rows: jax.Array, data_rows: jax.Array) -> jax.Array:
        parts = (x.reshape(run_buffer.shards, -1, *x.shape[1:]) for x in (own_rows, data_rows))
        rows = jnp.concatenate([*parts], 1)
        return rows.reshape(-1, *rows.shape[2:])

    def take_run_rows(x: jax.Array) -> jax.Array:
        """Selects the rows of the run: `[..., B]` becomes `[..., own.batch_size]`."""
        by_shard = x.reshape(*x.shape[:-1], run_buffer.shards, -1)
        return by_shard[..., : run_buffer.batch_size // run_buffer.shards].reshape(*x.shape[:-1], -1)

    def sample(state: ReplayState, key: jax.Array, data_state: Any = (), fraction: jax.Array | float = 0.0) -> Sample:
        own_key, data_key = jax.random.split(key)
        from_run = run_buffer.sample(state, own_key, (), fraction)
        from_data = data_buffer.sample(data_state, data_key)
        no_indices = jax.tree.map(jnp.zeros_like, from_data.indices)
        return jax.tree.map(join, from_run, from_data._replace(indices=no_indices))

    def update(state: ReplayState, indices: Indices, td_error: jax.Array) -> ReplayState:
        return run_buffer.update(state, Indices(*map(take_run_rows, indices)), take_run_rows(td_error))

    return dataclasses.replace(
        run_buffer,
        sample=sample,
        update=update,
        batch_size=run_buffer.batch_size + data_buffer.batch_size,
        data=data_state,
        data_axes=data_buffer.axes,
    )
