"""Actions: which spaces an algorithm takes, and the maps between actions of policies and of environments.

In the shape descriptions, `K` denotes the number of integers of an action.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import Box, Discrete, Space
from msrl_jax.envs.spaces import is_integers, num_values

MAX_VALUES = 1024
"""The most values of one integer, each of which has a logit."""


_FOR_INTEGERS = (
    "for integers use a2c, a3c, bc, es, impala, ppo or recurrent_ppo (of several agents, ippo, mappo or self_play), or wrap "
    "the environment to take a Discrete space of their combinations"
)


def check_policy_space(space: Space) -> Discrete | Box:
    """Checks that a policy can act in a space, and returns it.

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


def has_scale(space: Discrete | Box) -> bool:
    """Whether the distribution has a scale: whether actions are floats."""
    return isinstance(space, Box) and not is_integers(space)


def action_transform(space: Space) -> Callable[[jax.Array], jax.Array]:
    """Makes the map from actions of a policy `[..., D]` to an environment's `[..., *space.shape]`, or `[...]` to `[...]`.

    Discrete actions pass unchanged. Integers of a `Box`, which a policy counts from 0, are shifted to its lower bounds. A
    component of a vector of floats with two finite bounds is clipped to [-1, 1] and scaled to the bounds; other components are
    only clipped to their bounds.
    """
    if isinstance(space, Discrete):
        return lambda action: jnp.asarray(action, space.dtype)
    if not isinstance(space, Box):
        return lambda action: action
    if is_integers(space):
        lowest = space.low.reshape(-1).astype(np.int32)
        return lambda action: (lowest + action).reshape(*action.shape[:-1], *space.shape).astype(space.dtype)
    low, high = space.low.reshape(-1), space.high.reshape(-1)
    bounded = np.isfinite(low) & np.isfinite(high)
    lowest, highest = np.where(bounded, low, -1).astype(np.float32), np.where(bounded, high, 1).astype(np.float32)
    center, half_width = lowest / 2 + highest / 2, highest / 2 - lowest / 2

    def transform(action: jax.Array) -> jax.Array:
        fitted = jnp.clip(center + half_width * action, low, high)
        return fitted.reshape(*action.shape[:-1], *space.shape).astype(space.dtype)

    return transform


def policy_actions(space: Space, action: np.ndarray) -> np.ndarray:
    """The inverse of `action_transform`: from an environment's actions `[N, *space.shape]` to a policy's actions.

    These are vectors `[N, D]` float32, in [-1, 1] where the space has two finite bounds; integers `[N]` int32 if it is
    `Discrete`, and `[N, K]` int32 counted from 0 if it is a `Box` of integers.
    """
    if not isinstance(space, Box):
        return action.astype(np.int32)
    if is_integers(space):
        return (action.reshape(len(action), -1).astype(np.int64) - space.low.reshape(-1)).astype(np.int32)
    low, high = space.low.reshape(-1).astype(np.float64), space.high.reshape(-1).astype(np.float64)
    bounded = np.isfinite(low) & np.isfinite(high)
    lowest, highest = np.where(bounded, low, -1), np.where(bounded, high, 1)
    center, half_width = (lowest + highest) / 2, (highest - lowest) / 2
    scaled = (action.reshape(len(action), -1) - center) / np.where(half_width > 0, half_width, 1)
    return np.where(bounded, np.clip(scaled, -1, 1), scaled).astype(np.float32)


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
    """Checks that actions are bounded vectors of floats, and returns the space; messages have the name of the algorithm.

    Raises:
      TypeError: if it is not a `Box` of floats.
      ValueError: if a bound is infinite.
    """
    if isinstance(space, Discrete):
        raise TypeError(f"{name} acts in a bounded Box, not in {space}; use sac, ppo or a DQN for discrete actions")
    if is_integers(space):
        raise TypeError(f"{name} acts in a bounded Box of floats, not in {space}; {_FOR_INTEGERS}")
    if not isinstance(space, Box) or not jnp.issubdtype(space.dtype, jnp.floating):
        raise TypeError(f"{name} acts in a bounded Box of floats, not in {space}; wrap the environment to take one")
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise ValueError(
            f"{name} needs finite bounds of every component of an action, but the space is {space}; give its action_space "
            f"finite low and high, or use ppo (of several agents, ippo)"
        )
    return space


def check_discrete_or_bounded(name: str, space: Space) -> Discrete | Box:
    """The space if its actions are discrete, or bounded vectors of floats: `check_discrete` or `check_bounded`."""
    return space if isinstance(space, Discrete) else check_bounded(name, space)
