"""Makes the replay buffer of a config."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax import data, replay
from msrl_jax.algorithms.configs.replay import MixingConfig, OffPolicyConfig, PriorityConfig
from msrl_jax.algorithms.loops.mixing import load_data, mix, split_batch
from msrl_jax.envs import Discrete, Environment, JointObservation, MaskedObservation, Space, TeamView
from msrl_jax.envs.host.base import is_on_host
from msrl_jax.envs.masks import observation_type
from msrl_jax.replay import Replay, Transition


def action_type(space: Space) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one action of a policy: an integer, or a vector `[D]`."""
    if isinstance(space, Discrete):
        return jax.ShapeDtypeStruct((), jnp.int32)
    return jax.ShapeDtypeStruct((math.prod(space.shape),), jnp.float32)


def n_step_buffer(env: Environment, config: OffPolicyConfig) -> Replay:
    """Makes the replay buffer of n-step transitions; it mixes in the data set of the config, if there is one.

    Args:
      env: the environment, for the shapes of its steps.
      config: the size and kind of the buffer; a `PriorityConfig` may ask for priorities.

    Returns:
      The buffer.

    Raises:
      ValueError: if the sizes are inconsistent or too large for the devices, if observations do not fit the codec, or if the
        data do not fit the environment.
    """
    windows = {"length": config.n_step, "discount": config.discount, "may_be_absent": is_on_host(env)}
    obs, action = observation_type(env), action_type(env.action_space)
    if not isinstance(config, MixingConfig) or config.data is None:
        return _buffer(obs, action, config, "n_step is", config.batch_size, config.shards, **windows)
    own_rows, data_rows, shards = split_batch(config)
    dataset = load_data(config.data, env)
    mixed_in = data.buffer(
        dataset, batch_size=data_rows, shards=shards, storage=storage_of(config.storage, obs),
        length=config.n_step, discount=config.discount,
    )  # fmt: skip
    return mix(_buffer(obs, action, config, "n_step is", own_rows, shards, **windows), *mixed_in)


def agents_buffer(view: TeamView, config: OffPolicyConfig) -> Replay:
    """Makes the replay buffer of n-step transitions of several agents, each with its own rewards and ends of episodes.

    Args:
      view: what the team sees, for the shapes of its steps.
      config: the size and kind of the buffer, as in `n_step_buffer`.

    Returns:
      The buffer.

    Raises:
      ValueError: if the sizes are inconsistent or too large for the devices, or if observations do not fit the codec.
    """
    one, agents = action_type(view.action_space), (view.num_agents,)
    action = jax.ShapeDtypeStruct((*agents, *one.shape), one.dtype)
    windows = {"length": config.n_step, "discount": config.discount}
    return _buffer(
        view.observation_type, action, config, "n_step is", config.batch_size, config.shards, agents=agents, **windows
    )


def sequence_buffer(
    obs: Any,
    action: Any,
    config: OffPolicyConfig,
    *,
    length: int,
    length_is: str,
    stride: int,
    carry: Any,
    may_be_absent: bool = False,
) -> Replay:
    """Makes the replay buffer of sequences of steps; every step has the carry of the acting network.

    Args:
      obs: shapes and dtypes of one observation.
      action: shape and dtype of one action of a policy.
      config: the size and kind of the buffer, as in `n_step_buffer`.
      length: steps of a sequence.
      length_is: subject and verb for error messages: the config fields that set the length, such as "burn_in + n_step are".
      stride: steps between the starts of two sequences.
      carry: shapes and dtypes of the carry of one environment.
      may_be_absent: whether steps say if they are `present`.

    Returns:
      The buffer.

    Raises:
      ValueError: if the sizes are inconsistent or too large for the devices, or if observations do not fit the codec.
    """
    buffer = _buffer(
        obs, action, config, length_is, config.batch_size, config.shards, carry,
        may_be_absent=may_be_absent, length=length, stride=stride,
    )  # fmt: skip
    return buffer if length > 1 else _of_one_step(buffer)


def _of_one_step(buffer: Replay) -> Replay:
    """A buffer whose sequences of one step have the dimension of time, `[1, B, ...]`, which windows of one step lack."""

    def sample(state: Any, key: jax.Array, data: Any = ()) -> replay.Sample:
        drawn = buffer.sample(state, key, data)
        return drawn._replace(experience=jax.tree.map(lambda x: x[None], drawn.experience))

    return dataclasses.replace(buffer, sample=sample)


def storage_of(codec: str | None, obs: Any) -> dict[str, str | None] | None:
    """The `storage` of a buffer whose observations have a codec; what stands beside an observation, as its mask, has none."""
    beside: dict[str, str | None] = {}
    while isinstance(obs, JointObservation | MaskedObservation):
        beside |= dict.fromkeys(obs._fields[1:])
        obs = obs.obs
    return None if codec is None else {"obs": codec, "next_obs": codec, **beside}


def _buffer(
    obs: Any,
    action: Any,
    config: OffPolicyConfig,
    length_is: str,
    batch_size: int,
    shards: int | None,
    carry: Any = (),
    agents: tuple[int, ...] = (),
    may_be_absent: bool = False,
    **windows: Any,
) -> Replay:
    number, flag = jax.ShapeDtypeStruct(agents, jnp.float32), jax.ShapeDtypeStruct(agents, jnp.bool_)
    example = Transition(obs, action, number, flag, flag, obs, carry, flag if may_be_absent else None)
    options: dict[str, Any] = {
        "capacity": config.capacity,
        "num_envs": config.num_envs,
        "unroll_length": config.unroll_length,
        "batch_size": batch_size,
        "min_size": config.learning_starts,
        "shards": shards,
        "storage": storage_of(config.storage, obs),
        **windows,
    }
    make = replay.uniform
    if isinstance(config, PriorityConfig) and config.prioritised:
        make = replay.prioritized
        options["alpha"] = config.alpha
        if config.beta is not None:
            options |= {"beta": config.beta, "beta_steps": config.total_steps}
    try:
        return make(example, **options)
    except ValueError as error:
        text = str(error).replace("min_size", "learning_starts")  # the name of the config field and of the flag
        raise ValueError(f"{type(config).__name__}, whose {length_is} the buffer's length: {text}") from None
