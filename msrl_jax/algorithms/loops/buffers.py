"""Makes the replay buffer of a config."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax import data, replay
from msrl_jax.algorithms.configs.replay import MixingConfig, OffPolicyConfig, PriorityConfig
from msrl_jax.algorithms.loops.mixing import load_data, mix, split_batch
from msrl_jax.envs import Discrete, Environment, Space
from msrl_jax.envs.masks import has_masks, with_masks
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
    windows = {"length": config.n_step, "discount": config.discount}
    if not isinstance(config, MixingConfig) or config.data is None:
        return _buffer(env, config, "n_step is", config.batch_size, config.shards, **windows)
    own_rows, data_rows, shards = split_batch(config)
    dataset = load_data(config.data, env)
    mixed_in = data.buffer(dataset, batch_size=data_rows, shards=shards, storage=storage_of(config.storage, env), **windows)
    return mix(_buffer(env, config, "n_step is", own_rows, shards, **windows), *mixed_in)


def sequence_buffer(
    env: Environment, config: OffPolicyConfig, *, length: int, length_is: str, stride: int, carry: Any
) -> Replay:
    """Makes the replay buffer of sequences of steps; every step has the carry of the acting network.

    Args:
      env: the environment, for the shapes of its steps.
      config: the size and kind of the buffer, as in `n_step_buffer`.
      length: steps of a sequence.
      length_is: subject and verb for error messages: the config fields that set the length, such as "burn_in + n_step are".
      stride: steps between the starts of two sequences.
      carry: shapes and dtypes of the carry of one environment.

    Returns:
      The buffer.

    Raises:
      ValueError: if the sizes are inconsistent or too large for the devices, or if observations do not fit the codec.
    """
    return _buffer(env, config, length_is, config.batch_size, config.shards, carry, length=length, stride=stride)


def storage_of(codec: str | None, env: Environment) -> dict[str, str | None] | None:
    """The `storage` of a buffer whose observations have a codec; masks have none."""
    masks = {"action_mask": None} if has_masks(env) else {}
    return None if codec is None else {"obs": codec, "next_obs": codec, **masks}


def _buffer(
    env: Environment,
    config: OffPolicyConfig,
    length_is: str,
    batch_size: int,
    shards: int | None,
    carry: Any = (),
    **windows: Any,
) -> Replay:
    obs = jax.eval_shape(with_masks(env).reset, jax.random.key(0))[1]
    number, flag = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.bool_)
    example = Transition(obs, action_type(env.action_space), number, flag, flag, obs, carry)
    options: dict[str, Any] = {
        "capacity": config.capacity,
        "num_envs": config.num_envs,
        "unroll_length": config.unroll_length,
        "batch_size": batch_size,
        "min_size": config.learning_starts,
        "shards": shards,
        "storage": storage_of(config.storage, env),
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
