"""Makes the replay buffer of n-step transitions of a config, which may mix the run's own experience with a data set."""

import math
from typing import TYPE_CHECKING, Any

from msrl_jax import data
from msrl_jax.data.check_spaces import load_for
from msrl_jax.envs import Environment
from msrl_jax.envs.actions import action_type
from msrl_jax.envs.base import is_on_host
from msrl_jax.envs.goals import goals_of
from msrl_jax.envs.masks import observation_type
from msrl_jax.loops.window_buffer import window_buffer
from msrl_jax.replay import Relabelling, ReplayBuffer
from msrl_jax.replay.buffers import storage_of
from msrl_jax.replay.mixed import mix

if TYPE_CHECKING:
    from msrl_jax.configs.protocols import MixedFields


def n_step_buffer(env: Environment, config: Any) -> ReplayBuffer:
    """Makes the replay buffer of n-step transitions, which mixes in the data set of the config, if it has one.

    With HER, goals of the run's own transitions are relabelled; raises TypeError if the environment has no goals.
    """
    windows: dict[str, Any] = {"length": config.replay.n_step, "discount": config.discount, "may_be_absent": is_on_host(env)}
    if hindsight := getattr(config, "hindsight", None):
        windows |= {"relabelling": Relabelling(goals_of(env), hindsight.share, hindsight.by)}
    obs, action = observation_type(env), action_type(env.action_space)
    if getattr(config, "data", None) is None:
        return window_buffer(obs, action, config, config.batch_size, config.replay.shards, **windows)
    own_rows, data_rows, shards = split_batch(config)
    dataset = load_for(env, config.data)
    mixed_in = data.buffer(
        dataset, batch_size=data_rows, shards=shards, storage=storage_of(config.replay.storage, obs),
        length=config.replay.n_step, discount=config.discount,
    )  # fmt: skip
    return mix(window_buffer(obs, action, config, own_rows, shards, **windows), *mixed_in)


def split_batch(config: "MixedFields") -> tuple[int, int, int]:
    """Returns the numbers of rows from the run, rows from the data, and shards; raises ValueError if a shard lacks either."""
    shards = math.gcd(config.num_envs, config.batch_size, 8) if config.replay.shards is None else config.replay.shards
    rows = config.batch_size // shards
    given = round(config.data_fraction * rows)
    if not 0 < given < rows:
        raise ValueError(
            f"{type(config).__name__}.data_fraction={config.data_fraction:g} of the {rows} rows that each of {shards} shards "
            f"gives to batch_size={config.batch_size} leaves none to {'the data' if not given else 'the run'}; use another "
            "fraction, larger batches or fewer shards"
        )
    return config.batch_size - shards * given, shards * given, shards
