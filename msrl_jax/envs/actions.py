"""Maps between actions of policies, which are near [-1, 1] or count from 0, and actions of an environment."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs.spaces import Box, Discrete, Space, is_integers


def action_transform(space: Space) -> Callable[[jax.Array], jax.Array]:
    """Makes the map from actions of a policy `[..., D]` or `[...]` to those of an environment `[..., *space.shape]`.

    Integers are shifted by the start of a `Discrete` space or the lower bounds of a `Box`. A component of a float vector with
    two finite bounds is clipped to [-1, 1] and scaled to the bounds; other components are clipped to their bounds.
    """
    if not isinstance(space, Discrete | Box):
        return lambda action: action
    dtype = jax.dtypes.canonicalize_dtype(space.dtype)
    if isinstance(space, Discrete):
        return lambda action: jnp.asarray(action + space.start if space.start else action, dtype)
    if is_integers(space):
        lowest = space.low.reshape(-1).astype(np.int32)
        return lambda action: (lowest + action).reshape(*action.shape[:-1], *space.shape).astype(dtype)
    low, high = space.low.reshape(-1), space.high.reshape(-1)
    bounded = np.isfinite(low) & np.isfinite(high)
    lowest, highest = np.where(bounded, low, -1).astype(np.float32), np.where(bounded, high, 1).astype(np.float32)
    center, half_width = lowest / 2 + highest / 2, highest / 2 - lowest / 2

    def transform(action: jax.Array) -> jax.Array:
        fitted = jnp.clip(center + half_width * action, low, high)
        return fitted.reshape(*action.shape[:-1], *space.shape).astype(dtype)

    return transform


def policy_actions(space: Space, action: np.ndarray) -> np.ndarray:
    """The inverse of `action_transform`: from an environment's actions `[N, *space.shape]` to a policy's actions.

    They are vectors `[N, D]` float32, in [-1, 1] where the space has two finite bounds; or integers that count from 0, int32,
    `[N]` for a `Discrete` space and `[N, K]` for a `Box` of integers.
    """
    if isinstance(space, Discrete):
        return (action.astype(np.int64) - space.start).astype(np.int32)
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
