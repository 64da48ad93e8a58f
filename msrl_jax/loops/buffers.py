"""Makes the replay buffer of a config, which may mix the run's own experience with a data set."""

import dataclasses
import math
import os
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax import data, replay
from msrl_jax.configs.checking import check_unused
from msrl_jax.data import Dataset
from msrl_jax.data.check_spaces import load_for
from msrl_jax.envs import Environment, TeamView
from msrl_jax.envs.actions import action_type
from msrl_jax.envs.base import is_on_host
from msrl_jax.envs.goals import goals_of
from msrl_jax.envs.masks import observation_type
from msrl_jax.fragments.support.checks import shown
from msrl_jax.replay import Relabelling, Replay, Sample, Transition
from msrl_jax.replay.buffers import storage_of
from msrl_jax.replay.mixed import mix


def check_data(config: Any) -> None:
    """Raises ValueError unless `data` is a path or a data set; without data, `data_fraction` must have its default."""
    name, source = type(config).__name__, config.data
    if not isinstance(source, str | os.PathLike | Dataset | None):
        raise ValueError(f"{name}.data={shown(source)}: use the path of a data set, or a msrl_jax.data.Dataset")
    if source is None:
        check_unused(config, ("data_fraction",), "without a data set; give data='experience.npz'")


def n_step_buffer(env: Environment, config: Any) -> Replay:
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


def replay_buffer(env: Environment, config: Any, carry: Any) -> Replay:
    """Makes an `n_step_buffer`, or with a core a `sequence_buffer`, which also stores `carry`, given for one environment."""
    if config.core == "none":
        return n_step_buffer(env, config)
    return sequence_buffer(observation_type(env), action_type(env.action_space), config, carry, may_be_absent=is_on_host(env))


def agents_buffer(view: TeamView, config: Any) -> Replay:
    """Makes an `n_step_buffer` of several agents, each with its own rewards and episode ends."""
    one, agents = action_type(view.action_space), (view.num_agents,)
    action = jax.ShapeDtypeStruct((*agents, *one.shape), one.dtype)
    windows = {"length": config.replay.n_step, "discount": config.discount}
    return window_buffer(
        view.observation_type, action, config, config.batch_size, config.replay.shards, agents=agents, **windows
    )


def sequence_buffer(obs: Any, action: Any, config: Any, carry: Any, *, may_be_absent: bool = False) -> Replay:
    """Makes the buffer of windows of steps, each with the carry of the acting network; shapes are those of one environment."""
    length = config.burn_in + config.trace_length + config.replay.n_step - 1
    buffer = window_buffer(
        obs, action, config, config.batch_size, config.replay.shards, carry,
        may_be_absent=may_be_absent, length=length, stride=max(config.trace_length // 2, 1),
        length_is="burn_in + trace_length + n_step - 1 are",
    )  # fmt: skip
    if length > 1:
        return buffer

    # Windows of one step lack the dimension of time.
    def sample(*args: Any) -> Sample:
        drawn = buffer.sample(*args)
        return drawn._replace(experience=jax.tree.map(lambda x: x[None], drawn.experience))

    return dataclasses.replace(buffer, sample=sample)


def window_buffer(
    obs: Any,
    action: Any,
    config: Any,
    batch_size: int,
    shards: int | None,
    carry: Any = (),
    agents: tuple[int, ...] = (),
    may_be_absent: bool = False,
    length_is: str = "n_step is",
    **windows: Any,
) -> Replay:
    """Makes the buffer of windows of steps of a config; `length_is` names the fields that set the length in messages."""
    number, flag = jax.ShapeDtypeStruct(agents, jnp.float32), jax.ShapeDtypeStruct(agents, jnp.bool_)
    example = Transition(obs, action, number, flag, flag, obs, carry, flag if may_be_absent else None)
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
        raise ValueError(f"{type(config).__name__}, whose {length_is} the buffer's length: {text}") from None


def split_batch(config: Any) -> tuple[int, int, int]:
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
