"""The loop of the offline RL algorithms, as functions: draw batches from a data set, update, validate on held-out episodes.

In the shape descriptions, `B` denotes the batch size, `K` the number of updates per iteration and `G` the shards of the data.
An iteration draws `K` batches at once and learns from them one after another, then measures on one held-out batch. Training
takes no environment steps: the environment only provides the spaces for the networks, and evaluations run in it. The fragments
are in the files of the algorithms.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from msrl_jax import data, envs
from msrl_jax.agents.agent import Progress, logical_axes
from msrl_jax.data import Dataset
from msrl_jax.data.check_spaces import load_for
from msrl_jax.envs import Environment, VectorEnvironment
from msrl_jax.envs.masks import observation_type
from msrl_jax.fragments.counters import advance
from msrl_jax.replay import NStep, ReplayBuffer, ReplayState
from msrl_jax.replay.buffers import storage_of


class Data(NamedTuple):
    """A data set as the states of two buffers; both hold whole episodes."""

    training: ReplayState
    validation: ReplayState | tuple[()]  # the held-out episodes; () if there are none


class Source(NamedTuple):
    """The buffers of a data set, and their states as host arrays."""

    training: ReplayBuffer
    validation: ReplayBuffer | None  # of held-out episodes
    data: Data


class OfflineState(NamedTuple):
    """The state of a run."""

    params: Any
    target_params: Any
    opt_state: Any
    key: jax.Array  # of the learner
    data_key: jax.Array  # for draws
    env_state: tuple[()] = ()
    data: Data | tuple[()] = ()  # () in a state for acting only


def playing_env(env: Environment, batch_size: int, shards: int | None) -> VectorEnvironment:
    """Makes the environments of a run, one per shard of the data; they provide spaces, and training never steps them."""
    return envs.vectorize(env, _num_shards(batch_size, shards))


def state_axes(source: Source | None) -> OfflineState:
    """Returns the logical axes of a state."""
    shared = dict.fromkeys(("params", "target_params", "opt_state", "key", "data_key", "env_state"), P())
    if source is None:
        return logical_axes(OfflineState, **shared, data=P())
    held_out = source.validation.axes if source.validation else ()
    return logical_axes(OfflineState, **shared, data=Data(source.training.axes, held_out))


def draw(source: Source, data: Data, key: jax.Array, num_updates: int) -> tuple[jax.Array, NStep, NStep | None]:
    """Draws `K` batches at once; returns the next key, the batches `[K, B, ...]`, and one of held-out episodes, or None."""
    key, held_out_key, *keys = jax.random.split(key, num_updates + 2)
    batches = jax.vmap(source.training.sample, (None, 0))(data.training, jnp.stack(keys)).experience
    return key, batches, source.validation and source.validation.sample(data.validation, held_out_key).experience


def check_has_data(config: Any, state: OfflineState) -> None:
    """Raises ValueError if a state has no data for training."""
    if not state.data:
        raise ValueError(f"{config.name} learns from data alone, but there is none; give data='experience.npz', or a Dataset")


def learn_from(
    batches: NStep,
    held_out: NStep | None,
    update: Callable[[Any, NStep, jax.Array, Progress], tuple[Any, Mapping[str, jax.Array]]],
    learner: Any,
    key: jax.Array,
    progress: Progress,
) -> tuple[Any, jax.Array, dict[str, jax.Array]]:
    """Learns from batches one after another, and validates the result on held-out episodes.

    Args:
      batches: the batches. `[K, B, ...]`
      held_out: a batch of held-out episodes; None if there are none. `[B, ...]`
      update: `(learner, batch, key, progress) -> (learner, statistics)`; the progress counts updates.
      learner: the state that updates change.
      key: the key for the randomness of updates.
      progress: the progress of the run, in iterations.

    Returns:
      The new `learner`, the next key, and the statistics averaged over the updates; the statistics of the held-out batch have
      the prefix `validation_`.
    """
    num_updates = len(batches.reward)
    key, held_out_key, *keys = jax.random.split(key, num_updates + 2)

    def progress_at(number: Any) -> Progress:
        return Progress(advance(progress.times(num_updates), number), progress.total and progress.total * num_updates)

    def step(learner: Any, inputs: tuple[NStep, jax.Array, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
        batch, key, number = inputs
        learner, stats = update(learner, batch, key, progress_at(number))
        return learner, dict(stats)

    learner, stats = jax.lax.scan(step, learner, (batches, jnp.stack(keys), jnp.arange(num_updates)))
    metrics = jax.tree.map(lambda x: x.mean(), stats)
    if held_out is not None:
        # Run an update only for its statistics; XLA removes the rest, because the new parameters are unused.
        _, held_out_stats = update(learner, held_out, held_out_key, progress_at(num_updates))
        metrics |= {f"validation_{name}": x for name, x in held_out_stats.items()}
    return learner, key, metrics


def read_data(env: Environment, config: Any, *, discount: float = 1.0, normalize_rewards: bool = False) -> Source | None:
    """Reads the data set of a config, and splits off held-out episodes; None without data; raises ValueError if invalid."""
    if config.data is None:
        return None
    dataset = load_for(env, config.data)
    if normalize_rewards:
        dataset = dataclasses.replace(dataset, reward=dataset.reward / reward_scale(dataset))
    shards, storage = _num_shards(config.batch_size, config.shards), storage_of(config.storage, observation_type(env))

    def make(dataset: Dataset, batch_size: int) -> tuple[ReplayBuffer, ReplayState]:
        return data.buffer(dataset, batch_size=batch_size, discount=discount, shards=shards, storage=storage)

    if not config.validation_fraction:
        training, training_state = make(dataset, config.batch_size)
        return Source(training, None, Data(training_state, ()))
    if len(dataset.episodes[0]) < 2:
        fact = f"validation_fraction={config.validation_fraction:g} holds episodes out, but the data set has a single one"
        raise ValueError(f"{fact}; use validation_fraction=0, or collect more episodes")
    training_set, validation_set = dataset.split(config.validation_fraction)
    training, training_state = make(training_set, config.batch_size)
    if len(validation_set) < shards:
        raise ValueError(
            f"validation_fraction={config.validation_fraction:g} holds {len(validation_set)} of {len(dataset)} rows out, fewer "
            f"than one in each of shards={shards}; use a larger fraction, 0, or fewer shards"
        )
    validation, validation_state = make(validation_set, min(config.batch_size, len(validation_set) // shards * shards))
    return Source(training, validation, Data(training_state, validation_state))


def reward_scale(dataset: Dataset) -> float:
    """Returns the range of episode returns divided by the longest length; 1 if all returns are equal (2110.06169, 5.2)."""
    episodes = dataset.episodes
    return float(np.ptp(episodes.returns) / episodes.length.max()) or 1.0


def _num_shards(batch_size: int, shards: int | None) -> int:
    return math.gcd(batch_size, 8) if shards is None else shards
