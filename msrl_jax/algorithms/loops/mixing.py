"""Batches from two sources: the run's own experience and a data set.

Ball et al. (2023, arXiv 2302.02948) take half of every batch from each source. In the shape descriptions, `B` is the batch size
and `G` the number of shards of the buffers. Each shard holds `B / G` rows of a batch: first rows of the run, then rows of the
data.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax import data
from msrl_jax.algorithms.configs.replay import MixingConfig
from msrl_jax.algorithms.networks.actions import policy_actions
from msrl_jax.data import Dataset
from msrl_jax.envs import Environment
from msrl_jax.replay import Indices, Replay, ReplayState, Sample


def mix(own: Replay, data: Replay, held: ReplayState) -> Replay:
    """Makes a buffer that draws every batch from two buffers.

    Args:
      own: the buffer of the run's experience.
      data: the buffer of a data set, with the same number of shards and the same items.
      held: the state of `data`, as host arrays.

    Returns:
      The buffer: `own` with mixed batches. Rows of the data have weight 1 and no valid index, and `update` ignores their
      errors. `Replay.data` is `held`.
    """

    def join(own_rows: jax.Array, data_rows: jax.Array) -> jax.Array:
        parts = (x.reshape(own.shards, -1, *x.shape[1:]) for x in (own_rows, data_rows))
        joined = jnp.concatenate([*parts], 1)
        return joined.reshape(-1, *joined.shape[2:])

    def take_own(x: jax.Array) -> jax.Array:
        """Selects the rows of the run: `[..., B]` becomes `[..., own.batch_size]`."""
        by_shard = x.reshape(*x.shape[:-1], own.shards, -1)
        return by_shard[..., : own.batch_size // own.shards].reshape(*x.shape[:-1], -1)

    def sample(state: ReplayState, key: jax.Array, data_state: Any = ()) -> Sample:
        from_run = own.sample(state, key)
        from_data = data.sample(data_state, jax.random.fold_in(key, 1))
        nowhere = jax.tree.map(jnp.zeros_like, from_data.indices)
        return jax.tree.map(join, from_run, from_data._replace(indices=nowhere))

    def update(state: ReplayState, indices: Indices, td_error: jax.Array) -> ReplayState:
        return own.update(state, Indices(*map(take_own, indices)), take_own(td_error))

    return dataclasses.replace(
        own, sample=sample, update=update, batch_size=own.batch_size + data.batch_size, data=held, data_axes=data.axes
    )


def split_batch(config: MixingConfig) -> tuple[int, int, int]:
    """Splits a batch between the run and its data set.

    Args:
      config: the sizes, and `data_fraction`.

    Returns:
      The number of rows of the run, of rows of the data, and of shards. In every shard, the data have the share
      `data_fraction` of the rows, rounded.

    Raises:
      ValueError: if a shard has no row of the run or no row of the data.
    """
    shards = math.gcd(config.num_envs, config.batch_size, 8) if config.shards is None else config.shards
    rows = config.batch_size // shards
    given = round(config.data_fraction * rows)
    if not 0 < given < rows:
        raise ValueError(
            f"{type(config).__name__}.data_fraction={config.data_fraction:g} of the {rows} rows that each of {shards} shards "
            f"gives to batch_size={config.batch_size} leaves none to {'the data' if not given else 'the run'}; use another "
            "fraction, larger batches or fewer shards"
        )
    return config.batch_size - shards * given, shards * given, shards


def load_data(source: str | Dataset, env: Environment) -> Dataset:
    """Reads a data set for an environment.

    Args:
      source: path of the data set, or the data set.
      env: the environment.

    Returns:
      The data set, with its actions converted to a policy's actions.

    Raises:
      ValueError: if the file cannot be read, or the data do not fit the environment's spaces.
    """
    dataset = data.check_spaces(data.load(source), env)
    return dataclasses.replace(dataset, action=policy_actions(env.action_space, dataset.action))
