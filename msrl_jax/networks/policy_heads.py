"""The distribution of a policy for each action space, from the outputs of a network."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.envs import Box, Discrete, Space
from msrl_jax.envs.masks import only_legal
from msrl_jax.envs.spaces import is_integers, num_values
from msrl_jax.networks.distributions import Categorical, Distribution, Normal

MAX_VALUES = 1024
"""The most values of one integer, each of which has a logit."""


def check_policy_space(space: Space) -> Discrete | Box:
    """Returns the space; raises TypeError or ValueError if policies do not support it."""
    if isinstance(space, Discrete):
        return space
    if not isinstance(space, Box) or not (is_integers(space) or jnp.issubdtype(space.dtype, jnp.floating)):
        raise TypeError(
            f"no policy for actions in {space}; wrap the environment to take a Discrete space or a Box of floats or of integers"
        )
    if is_integers(space):
        limits = jnp.iinfo(jnp.int32)
        if (most := max(num_values(space), default=1)) > MAX_VALUES:
            raise ValueError(
                f"actions in {space} have an integer of {most:,} values, and a policy has a logit for each, of at most "
                f"{MAX_VALUES:,}; give its action_space nearer low and high, or wrap the environment to take a Box of floats"
            )
        if int(space.low.min()) < limits.min or int(space.high.max()) > limits.max:
            raise ValueError(f"actions in {space} exceed int32; wrap the environment to take smaller integers")
    return space


def num_outputs(space: Discrete | Box) -> int:
    """Returns the number of network outputs for `discrete_policy` or for the mean."""
    if isinstance(space, Discrete):
        return space.n
    return sum(num_values(space)) if is_integers(space) else math.prod(space.shape)


def discrete_policy(space: Discrete | Box, outputs: jax.Array, obs: Any) -> Categorical:
    """Makes the distribution from logits `[..., D]` of all actions (illegal ones are masked), or of each integer in turn."""
    if isinstance(space, Discrete):
        return Categorical(only_legal(outputs, obs))
    sizes = num_values(space)
    if len(set(sizes)) == 1:
        return Categorical(outputs.reshape(*outputs.shape[:-1], len(sizes), sizes[0]), several=True)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    padding = [(0, 0)] * (outputs.ndim - 1)
    logits = [
        jnp.pad(outputs[..., end - size : end], [*padding, (0, max(sizes) - size)], constant_values=-jnp.inf)
        for size, end in zip(sizes, ends, strict=True)
    ]
    return Categorical(jnp.stack(logits, axis=-2), several=True)


def policy_of(space: Discrete | Box, outputs: jax.Array, obs: Any, log_scale: jax.Array | None) -> Distribution:
    """As `discrete_policy`; for a `Box` of floats, a `Normal` with the mean `outputs` and the `log_scale` `[D]`."""
    if log_scale is None:
        return discrete_policy(space, outputs, obs)
    return Normal(outputs, jnp.broadcast_to(log_scale, outputs.shape))
