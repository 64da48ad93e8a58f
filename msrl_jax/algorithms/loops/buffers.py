"""The replay buffer of a config, which may draw its batches from the run's own experience and from a data set; its actions.

Ball et al. (2023, arXiv 2302.02948) take half of every batch from each source. In the shape descriptions, `B` is the batch size
and `G` the number of shards of the buffers. Each shard holds `B / G` rows of a batch: first rows of the run, then rows of the
data.
"""

import dataclasses
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax import data, replay
from msrl_jax.algorithms.fields import check_unused
from msrl_jax.data import Dataset
from msrl_jax.envs import Box, Discrete, Environment, JointObservation, MaskedObservation, Space, TeamView
from msrl_jax.envs.actions import policy_actions
from msrl_jax.envs.base import is_on_host
from msrl_jax.envs.goals import goals_of
from msrl_jax.envs.masks import observation_type
from msrl_jax.envs.privileged import PrivilegedObservation
from msrl_jax.envs.spaces import is_integers
from msrl_jax.fragments.support.checks import shown
from msrl_jax.replay import Indices, Relabelling, Replay, ReplayState, Sample, Transition


def check_data(config: Any) -> None:
    """Raises ValueError unless `data` are a path or a data set, and `data_fraction` of no data has its default."""
    name, source = type(config).__name__, config.data
    if not isinstance(source, str | os.PathLike | Dataset | None):
        raise ValueError(f"{name}.data={shown(source)}: use the path of a data set, or a msrl_jax.data.Dataset")
    if source is None:
        check_unused(config, ("data_fraction",), "without a data set; give data='experience.npz'")


def action_type(space: Space) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one action of a policy: an integer, or a vector `[D]`."""
    if isinstance(space, Discrete):
        return jax.ShapeDtypeStruct((), jnp.int32)
    return jax.ShapeDtypeStruct((math.prod(space.shape),), jnp.float32)


def n_step_buffer(env: Environment, config: Any) -> Replay:
    """Makes the replay buffer of n-step transitions, which mixes in the data set of the config, if there is one.

    Goals of the run's own transitions are relabelled if the config has it so; raises TypeError if there are no goals.
    """
    windows: dict[str, Any] = {"length": config.replay.n_step, "discount": config.discount, "may_be_absent": is_on_host(env)}
    if hindsight := getattr(config, "hindsight", None):
        windows |= {"relabelling": Relabelling(goals_of(env), hindsight.share, hindsight.by)}
    obs, action = observation_type(env), action_type(env.action_space)
    if getattr(config, "data", None) is None:
        return window_buffer(obs, action, config, config.batch_size, config.replay.shards, **windows)
    own_rows, data_rows, shards = split_batch(config)
    dataset = load_data(config.data, env)
    mixed_in = data.buffer(
        dataset, batch_size=data_rows, shards=shards, storage=storage_of(config.replay.storage, obs),
        length=config.replay.n_step, discount=config.discount,
    )  # fmt: skip
    return mix(window_buffer(obs, action, config, own_rows, shards, **windows), *mixed_in)


def agents_buffer(view: TeamView, config: Any) -> Replay:
    """Makes an `n_step_buffer` of several agents, each with its own rewards and ends of episodes."""
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


def storage_of(codec: str | None, obs: Any) -> dict[str, str | None] | None:
    """The `storage` of a buffer whose observations have a codec; what accompanies an observation, as its mask, has none."""
    others: dict[str, str | None] = {}
    while isinstance(obs, JointObservation | MaskedObservation | PrivilegedObservation):
        others |= dict.fromkeys(obs._fields[1:])
        obs = obs.obs
    return None if codec is None else {"obs": codec, "next_obs": codec, **others}


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
    """Makes the buffer of windows of steps of a config; `length_is` says in messages which fields make the length."""
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
        text = str(error).replace("min_size", "replay.learning_starts")  # the name of the config field and of the flag
        raise ValueError(f"{type(config).__name__}, whose {length_is} the buffer's length: {text}") from None


def mix(own: Replay, data: Replay, held: ReplayState) -> Replay:
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


def split_batch(config: Any) -> tuple[int, int, int]:
    """The numbers of rows of the run, of rows of the data, and of shards; raises ValueError if a shard has none of one kind."""
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


def load_data(source: str | os.PathLike[str] | Dataset, env: Environment) -> Dataset:
    """Reads a data set for an environment, with a policy's actions; raises ValueError if it cannot be read, or does not fit."""
    dataset = data.check_spaces(data.load(source), env)
    return dataclasses.replace(dataset, action=policy_actions(env.action_space, dataset.action))


_FOR_INTEGERS = (
    "for integers use a2c, a3c, bc, es, impala, ppo or recurrent_ppo (of several agents, ippo or mappo), or wrap "
    "the environment to take a Discrete space of their combinations"
)


def check_discrete(name: str, space: Space) -> Discrete:
    """The space if its actions are discrete; raises TypeError, with the name of the algorithm, if it is not `Discrete`."""
    if isinstance(space, Discrete):
        return space
    if is_integers(space):
        raise TypeError(f"{name} values each of a finite number of actions, got {space}; {_FOR_INTEGERS}")
    raise TypeError(
        f"{name} values each of a finite number of actions, got {space}; wrap the environment to take a Discrete "
        "space, or for a Box of floats use sac or td3 or ddpg or ppo"
    )


def check_bounded(name: str, space: Space) -> Box:
    """The space if actions are vectors of floats; raises TypeError if they are not, ValueError if a bound is infinite."""
    if isinstance(space, Discrete):
        raise TypeError(f"{name} acts in a bounded Box, not in {space}; use sac, ppo or a DQN for discrete actions")
    if is_integers(space):
        raise TypeError(f"{name} acts in a bounded Box of floats, not in {space}; {_FOR_INTEGERS}")
    if not isinstance(space, Box) or not jnp.issubdtype(space.dtype, jnp.floating):
        raise TypeError(f"{name} acts in a bounded Box of floats, not in {space}; wrap the environment to take one")
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise ValueError(
            f"{name} needs finite bounds of every component of an action, but the space is {space} (the largest float counts "
            "as no bound); give its action_space finite low and high, or use ppo (of several agents, ippo)"
        )
    return space


def check_discrete_or_bounded(name: str, space: Space) -> Discrete | Box:
    """The space if its actions are discrete, or bounded vectors of floats: `check_discrete` or `check_bounded`."""
    return space if isinstance(space, Discrete) else check_bounded(name, space)
