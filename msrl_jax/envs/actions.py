"""Maps between actions of policies, which are near [-1, 1] or count from 0, and actions of an environment."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs.base import PyTree
from msrl_jax.envs.masks import mask_of, sample_legal
from msrl_jax.envs.spaces import Box, Discrete, Space, is_integers, num_values


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
    """Returns the inverse of `action_transform`: from an environment's actions `[N, *space.shape]` to a policy's actions.

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


def action_type(space: Space) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one action of a policy: an integer, or a vector `[D]`."""
    if isinstance(space, Discrete):
        return jax.ShapeDtypeStruct((), jnp.int32)
    return jax.ShapeDtypeStruct((math.prod(space.shape),), jnp.float32)


def uniform_actions(keys: jax.Array, space: Space, obs: PyTree = None) -> jax.Array:
    """Draws uniform (legal) actions before `action_transform`, one key each `[E]`: floats in [-1, 1], integers from 0."""
    if (mask := mask_of(obs)) is not None:
        return jax.vmap(sample_legal)(keys, mask)
    if isinstance(space, Discrete):
        return jax.vmap(lambda key: jax.random.randint(key, (), 0, space.n, jnp.int32))(keys)
    assert isinstance(space, Box)
    if is_integers(space):
        sizes = jnp.array(num_values(space))
        return jax.vmap(lambda key: jax.random.randint(key, sizes.shape, 0, sizes, jnp.int32))(keys)
    size = math.prod(space.shape)
    return jax.vmap(lambda key: jax.random.uniform(key, (size,), minval=-1.0, maxval=1.0, dtype=jnp.float32))(keys)
