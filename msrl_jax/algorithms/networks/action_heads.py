"""From the outputs of a network to distributions over actions, for every space that a policy can act in.

In the shape descriptions, `K` denotes the number of integers of an action, and `N` the most values that one of them has.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.algorithms.networks.distributions import Categorical, Distribution, MultiCategorical, Normal
from msrl_jax.envs import Box, Discrete, Space
from msrl_jax.envs.masks import only_legal
from msrl_jax.envs.spaces import is_integers, num_values

MAX_VALUES = 1024
"""The most values of one integer, each of which has a logit."""


def check_policy_space(space: Space) -> Discrete | Box:
    """Checks that a policy can act in a space.

    Args:
      space: the space of one action.

    Returns:
      The same space.

    Raises:
      TypeError: if it is neither `Discrete` nor a `Box` of floats or integers.
      ValueError: if an integer has more than `MAX_VALUES` values, or if its bounds exceed int32.
    """
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
    """The number of outputs that `discrete_policy` or a mean takes."""
    if isinstance(space, Discrete):
        return space.n
    return sum(num_values(space)) if is_integers(space) else math.prod(space.shape)


def discrete_policy(space: Discrete | Box, outputs: jax.Array, obs: Any) -> Categorical | MultiCategorical:
    """Makes the distribution over actions in a `Discrete` space or a `Box` of integers.

    Args:
      space: the space.
      outputs: logits of all actions, or of all values of the first integer, then of the second, and so on. `[..., D]`
      obs: the observations; if they have masks, illegal actions of a `Discrete` space have probability 0.

    Returns:
      The distribution.
    """
    if isinstance(space, Discrete):
        return Categorical(only_legal(outputs, obs))
    sizes = num_values(space)
    if len(set(sizes)) == 1:
        return MultiCategorical(outputs.reshape(*outputs.shape[:-1], len(sizes), sizes[0]))
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    padding = [(0, 0)] * (outputs.ndim - 1)
    logits = [
        jnp.pad(outputs[..., end - size : end], [*padding, (0, max(sizes) - size)], constant_values=-jnp.inf)
        for size, end in zip(sizes, ends, strict=True)
    ]
    return MultiCategorical(jnp.stack(logits, axis=-2))


def policy_of(space: Discrete | Box, outputs: jax.Array, obs: Any, log_scale: jax.Array | None) -> Distribution:
    """Makes the distribution over actions: as `discrete_policy`, or for a `Box` of floats a `Normal` around `outputs`.

    Args:
      space: the space.
      outputs: logits, or means. `[..., D]`
      obs: the observations.
      log_scale: logarithms of the standard deviations of floats. `[D]`

    Returns:
      The distribution.
    """
    if log_scale is None:
        return discrete_policy(space, outputs, obs)
    return Normal(outputs, jnp.broadcast_to(log_scale, outputs.shape))


def has_scale(space: Discrete | Box) -> bool:
    """Whether the distribution has a scale: whether actions are floats."""
    return isinstance(space, Box) and not is_integers(space)
