"""The loop of the offline algorithms: draw batches from a data set, update, measure on held-out episodes.

In the shape descriptions, `B` denotes the batch size, `K` the number of updates per iteration and `G` the shards of the data.
An iteration draws `K` batches at once and learns from them one after another, then measures on one held-out batch. Training
steps no environment: the environment only gives the spaces for the networks, and evaluations play in it. An algorithm defines
its `Rule` (what it learns).
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from msrl_jax import data, envs
from msrl_jax.algorithms.agent import Agent, Metrics, Progress, logical_axes
from msrl_jax.algorithms.loops.buffers import load_data, storage_of
from msrl_jax.algorithms.loops.off_policy import Batch, Learner, Rule
from msrl_jax.algorithms.networks.layers import Carry
from msrl_jax.data import Dataset
from msrl_jax.envs import Environment
from msrl_jax.envs.actions import action_transform
from msrl_jax.envs.masks import observation_type
from msrl_jax.fragments import fragment
from msrl_jax.fragments.counters import advance
from msrl_jax.replay import Replay, ReplayState


class Data(NamedTuple):
    """A data set as the states of two buffers; both hold whole episodes."""

    training: ReplayState
    validation: ReplayState | tuple[()]  # the held-out episodes; () if there are none


class Source(NamedTuple):
    """The buffers of a data set, and their states as host arrays."""

    training: Replay
    validation: Replay | None  # of held-out episodes
    data: Data


class OfflineState(NamedTuple):
    """The state of a run."""

    params: Any
    target_params: Any
    opt_state: Any
    key: jax.Array  # the learner's
    data_key: jax.Array  # for draws
    env_state: tuple[()] = ()
    data: Data | tuple[()] = ()  # () in a state for acting only


def offline_agent(env: Environment, config: Any, rule: Rule, source: Source | None) -> Agent:
    """Builds an agent that learns from a data set, and counts its steps in updates; without a source it only acts."""
    num_updates = config.num_updates
    venv = envs.vectorize(env, _shards(config))
    transform = action_transform(venv.action_space)

    def init(key: jax.Array) -> OfflineState:
        params_key, learner_key, data_key = jax.random.split(key, 3)
        example = observation_type(env)
        learner = rule.init(params_key, jax.tree.map(lambda x: jnp.zeros((1, *x.shape), x.dtype), example))
        return OfflineState(*learner, key=learner_key, data_key=data_key)

    def iteration(state: OfflineState, progress: Progress) -> tuple[OfflineState, Metrics]:
        if source is None or not state.data:
            fact = f"{config.name} learns from data alone, but there is none"
            raise ValueError(f"{fact}; give data='experience.npz', or a Dataset")
        data_key, batches, held_out = sample_batches(state.data, state.data_key)
        learner = Learner(state.params, state.target_params, state.opt_state)
        learner, key, metrics = learn(learner, progress, state.key, batches, held_out)
        return state._replace(**learner._asdict(), key=key, data_key=data_key), metrics

    @fragment(role="buffer")
    def sample_batches(data, key):
        assert source is not None
        key, held_out_key, *keys = jax.random.split(key, num_updates + 2)
        batches = jax.vmap(source.training.sample, (None, 0))(data.training, jnp.stack(keys)).experience
        held_out = source.validation and source.validation.sample(data.validation, held_out_key).experience
        return key, batches, held_out

    @fragment(role="learner")
    def learn(learner, progress, key, batches, held_out):
        key, held_out_key, *keys = jax.random.split(key, num_updates + 2)

        def update(learner, experience, key, number):
            weight = jnp.ones(len(experience.reward), jnp.float32)
            batch = Batch(experience, weight, key, number, jnp.bool_(True))
            now = Progress(number, progress.total and progress.total * num_updates)
            learner, _, stats = rule.update(learner, batch, now)
            return learner, dict(stats)

        numbers = advance(progress.times(num_updates), jnp.arange(num_updates))
        learner, stats = jax.lax.scan(lambda x, inputs: update(x, *inputs), learner, (batches, jnp.stack(keys), numbers))
        metrics = jax.tree.map(lambda x: x.mean(), stats)
        if held_out is not None:
            # An update for its statistics only: XLA removes the rest, because nothing uses the new learner.
            after = advance(progress.times(num_updates), num_updates)
            _, measured = update(learner, held_out, held_out_key, after)
            metrics |= {f"validation_{name}": x for name, x in measured.items()}
        return learner, key, metrics

    def act(state: OfflineState, obs: jax.Array, key: jax.Array | None, carry: Carry) -> tuple[jax.Array, Carry]:
        action, carry = rule.choose_action(state.params, obs, key, carry)
        return transform(action), carry

    data_axes: Any = P()
    if source is not None:
        data_axes = Data(source.training.axes, () if source.validation is None else source.validation.axes)
    whole = dict.fromkeys((*Learner._fields, "key", "data_key", "env_state"), P())
    axes = logical_axes(OfflineState, **whole, data=data_axes)
    return Agent(
        init=init,
        iteration=iteration,
        act=act,
        axes=axes,
        steps_per_iteration=num_updates,
        updates_per_iteration=num_updates,
        env=venv,
        data={} if source is None else {"data": source.data},
        unit="updates",
    )


def read_data(env: Environment, config: Any, *, discount: float = 1.0, normalize_rewards: bool = False) -> Source | None:
    """Reads the data set of a config, and splits off the held-out episodes; None without one, ValueError if it does not fit."""
    if config.data is None:
        return None
    dataset = load_data(config.data, env)
    if normalize_rewards:
        dataset = dataclasses.replace(dataset, reward=dataset.reward / reward_scale(dataset))
    shards, storage = _shards(config), storage_of(config.storage, observation_type(env))

    def make(dataset: Dataset, batch_size: int) -> tuple[Replay, ReplayState]:
        return data.buffer(dataset, batch_size=batch_size, discount=discount, shards=shards, storage=storage)

    if not config.validation_fraction:
        training, held = make(dataset, config.batch_size)
        return Source(training, None, Data(held, ()))
    learned, held_out = dataset.split(config.validation_fraction)
    training, held = make(learned, config.batch_size)
    if len(held_out) < shards:
        raise ValueError(
            f"validation_fraction={config.validation_fraction:g} holds {len(held_out)} of {len(dataset)} rows out, fewer than "
            f"one in each of shards={shards}; use a larger fraction, 0, or fewer shards"
        )
    validation, held_back = make(held_out, min(config.batch_size, len(held_out) // shards * shards))
    return Source(training, validation, Data(held, held_back))


def reward_scale(dataset: Dataset) -> float:
    """The range of the episodes' returns over the length of the longest; 1 if all returns are equal (arXiv 2110.06169, 5.2)."""
    episodes = dataset.episodes
    return float(np.ptp(episodes.returns) / episodes.length.max()) or 1.0


def _shards(config: Any) -> int:
    return math.gcd(config.batch_size, 8) if config.shards is None else config.shards
