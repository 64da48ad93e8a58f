"""Batches from two sources: a part from a data set, the rest from what the run experiences itself.

With halves of both this is how Ball et al. (2023, arXiv 2302.02948) learn online from offline data. In the shape descriptions,
`K` is the number of batches, `B` that of the transitions in one and `G` the shards of the buffers: of every batch, each shard
holds `B / G` rows, first its own and then those of the data.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax import data
from msrl_jax.algorithms.networks.actor_critic import policy_actions
from msrl_jax.data import Dataset
from msrl_jax.envs import Environment
from msrl_jax.replay import Indices, Replay, ReplayState, Sample


@dataclasses.dataclass(frozen=True)
class Mixture:
    """What a data set adds to batches.

    Attributes:
      buffer: the data set's.
      state: of that buffer, as host arrays.
      rows: rows of every batch that it gives.
    """

    buffer: Replay
    state: ReplayState
    rows: int

    def add(self, sample: Sample, state: ReplayState, keys: jax.Array) -> Sample:
        """Draws the rows of the data set, and puts them into batches.

        Args:
          sample: the run's own rows. `[K, B - rows, ...]`
          state: of the data set's buffer.
          keys: those that drew the run's own rows. `[K]`

        Returns:
          The batches. A row of the data has the least probability among the others, so its importance weight is 1, and its
          indices mean nothing. `[K, B, ...]`
        """
        keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
        drawn = jax.vmap(self.buffer.sample, (None, 0))(state, keys)
        nowhere = jax.tree.map(jnp.zeros_like, drawn.indices)
        least = jnp.broadcast_to(sample.probability.min(-1, keepdims=True), drawn.probability.shape)
        return jax.tree.map(self._join, sample, Sample(drawn.experience, nowhere, least))

    def own(self, indices: Indices, td_error: jax.Array) -> tuple[Indices, jax.Array]:
        """The entries of `[K, B]` that are of the run's own rows. `[K, B - rows]`"""
        return Indices(*map(self._own, indices)), self._own(td_error)

    def _join(self, own: jax.Array, other: jax.Array) -> jax.Array:
        own, other = (x.reshape(len(x), self.buffer.shards, -1, *x.shape[2:]) for x in (own, other))
        joined = jnp.concatenate([own, other], 2)
        return joined.reshape(len(joined), -1, *joined.shape[3:])

    def _own(self, x: jax.Array) -> jax.Array:
        groups = x.reshape(len(x), self.buffer.shards, -1)
        return groups[..., : groups.shape[-1] - self.rows // self.buffer.shards].reshape(len(x), -1)


def split_batch(config: Any) -> tuple[Any, int]:
    """Splits the batches of a config.

    Args:
      config: with the fields `data`, `data_fraction`, `batch_size`, `num_envs` and `shards`.

    Returns:
      The config of the run's own buffer, whose batches lack the rows of the data, and how many these are: the share
      `data_fraction` of a shard's rows, rounded. The same config and 0 if there are no data.

    Raises:
      ValueError: if there are fewer than one row of either source in a shard.
    """
    if config.data is None:
        return config, 0
    shards = math.gcd(config.num_envs, config.batch_size, 8) if config.shards is None else config.shards
    rows = config.batch_size // shards
    given = round(config.data_fraction * rows)
    if not 0 < given < rows:
        raise ValueError(
            f"{type(config).__name__}.data_fraction={config.data_fraction:g} of the {rows} rows that each of {shards} shards "
            f"gives to batch_size={config.batch_size} leaves none to {'the data' if not given else 'the run'}; use another "
            "fraction, larger batches or fewer shards"
        )
    return dataclasses.replace(config, batch_size=config.batch_size - shards * given, shards=shards), shards * given


def load_data(source: str | Dataset, env: Environment) -> Dataset:
    """Reads a data set for an environment.

    Args:
      source: its path, or the data set.
      env: the environment.

    Returns:
      The data set, with actions as policies make them.

    Raises:
      ValueError: if the file is not what it should be, or the data do not fit the environment's spaces.
    """
    dataset = data.check_spaces(data.load(source), env)
    return dataclasses.replace(dataset, action=policy_actions(env.action_space, dataset.action))


def make_mixture(env: Environment, config: Any) -> Mixture | None:
    """Reads the data set of a config.

    Args:
      env: the environment, whose spaces the data have to fit.
      config: with the fields of `split_batch`, and `n_step`, `discount` and `storage`.

    Returns:
      What it adds to batches; None if the config has no data.

    Raises:
      ValueError: if the file or the data set is not what it should be.
    """
    own, rows = split_batch(config)
    if not rows:
        return None
    dataset = load_data(config.data, env)
    storage = None if config.storage is None else {"obs": config.storage, "next_obs": config.storage}
    made = data.buffer(
        dataset, batch_size=rows, length=config.n_step, discount=config.discount, shards=own.shards, storage=storage
    )
    return Mixture(*made, rows)
