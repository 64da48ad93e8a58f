"""Makes the replay buffers of configs: windows of steps, and n-step transitions that may be mixed with a data set."""

import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from msrl_jax import data, replay
from msrl_jax.agents.agent import RolloutFields
from msrl_jax.configs.replay_options import Replay
from msrl_jax.data.check_spaces import load_for
from msrl_jax.envs import Environment
from msrl_jax.envs.actions import action_type
from msrl_jax.envs.base import is_on_host
from msrl_jax.envs.goals import goals_of
from msrl_jax.envs.masks import observation_type
from msrl_jax.loops.data_field import DataFields
from msrl_jax.replay import Relabelling, ReplayBuffer, Transition
from msrl_jax.replay.buffers import storage_of
from msrl_jax.replay.mixed import mix


class ReplayFields(RolloutFields, Protocol):
    """What makes a replay buffer."""

    @property
    def batch_size(self) -> int:
        """The transitions, or windows, per update, `B`."""
        ...

    @property
    def replay(self) -> Replay:
        """The buffer."""
        ...


def window_buffer(
    obs: Any,
    action: Any,
    config: ReplayFields,
    batch_size: int,
    shards: int | None,
    carry: Any = (),
    agents: tuple[int, ...] = (),
    may_be_invalid: bool = False,
    length_is: str = "n_step is",
    **windows: Any,
) -> ReplayBuffer:
    """Makes the buffer of windows of steps of a config; `length_is` names the fields that set the length in messages."""
    number, flag = jax.ShapeDtypeStruct(agents, jnp.float32), jax.ShapeDtypeStruct(agents, jnp.bool_)
    example = Transition(obs, action, number, flag, flag, obs, carry, flag if may_be_invalid else None)
    options: dict[str, Any] = {
        "capacity": config.replay.capacity,
        "num_envs": config.num_envs,
        "unroll_length": config.unroll_length,
        "batch_size": batch_size,
        "min_size": config.replay.learning_starts,
        "shards": shards,
        "storage": storage_of(config.replay.storage, obs),
        **windows,
    }
    make = replay.uniform
    if priorities := config.replay.priorities:
        make, options = replay.prioritized, options | {"alpha": priorities.alpha, "beta": priorities.beta}
    try:
        return make(example, **options)
    except ValueError as error:
        text = str(error).replace("min_size", "replay.learning_starts")  # the name of the config field and the flag
        raise ValueError(f"{type(config).__name__}: {text} ({length_is} the length of a window)") from None


class MixedFields(ReplayFields, DataFields, Protocol):
    """What mixes a data set into batches."""

    @property
    def data_fraction(self) -> float:
        """The share of the data in a batch."""
        ...


def n_step_buffer(env: Environment, config: Any) -> ReplayBuffer:
    """Makes the replay buffer of n-step transitions, which mixes in the data set of the config, if it has one.

    With HER, goals of the run's own transitions are relabelled; raises TypeError if the environment has no goals.
    """
    windows: dict[str, Any] = {"length": config.replay.n_step, "discount": config.discount, "may_be_invalid": is_on_host(env)}
    if hindsight := getattr(config, "hindsight", None):
        windows |= {"relabelling": Relabelling(goals_of(env), hindsight.share, hindsight.by)}
    obs, action = observation_type(env), action_type(env.action_space)
    if getattr(config, "data", None) is None:
        return window_buffer(obs, action, config, config.batch_size, config.replay.shards, **windows)
    own_rows, data_rows, shards = split_batch(config)
    dataset = load_for(env, config.data)
    data_buffer = data.buffer(
        dataset,
        batch_size=data_rows,
        shards=shards,
        storage=storage_of(config.replay.storage, obs),
        length=config.replay.n_step,
        discount=config.discount,
    )
    return mix(window_buffer(obs, action, config, own_rows, shards, **windows), *data_buffer)


def split_batch(config: MixedFields) -> tuple[int, int, int]:
    """Returns the numbers of rows from the run, rows from the data, and shards; raises ValueError if a shard lacks either."""
    shards = math.gcd(config.num_envs, config.batch_size, 8) if config.replay.shards is None else config.replay.shards
    rows = config.batch_size // shards
    data_rows = round(config.data_fraction * rows)
    if not 0 < data_rows < rows:
        raise ValueError(
            f"{type(config).__name__}.data_fraction={config.data_fraction:g} of the {rows} rows that each of {shards} shards "
            f"gives to batch_size={config.batch_size} leaves none to {'the data' if not data_rows else 'the run'}; use another "
            "fraction, larger batches or fewer shards"
        )
    return config.batch_size - shards * data_rows, shards * data_rows, shards
