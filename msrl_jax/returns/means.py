"""Means over valid steps."""

import jax
import jax.numpy as jnp


def standardize(advantage: jax.Array, valid: jax.Array | None = None) -> jax.Array:
    """Shifts and scales advantages to mean 0 and standard deviation 1 over the whole array.

    Args:
      advantage: advantages. `[...]`
      valid: mask of the values that determine mean and deviation; all if None. `[...]` bool

    Returns:
      The standardized advantages; zeros if all are equal. A single valid advantage has no deviation and is unchanged. `[...]`
    """
    if advantage.size == 1:
        return advantage
    centered = advantage - mean(advantage, valid)
    standardized = centered / (jnp.sqrt(mean(jnp.square(centered), valid)) + 1e-8)
    return standardized if valid is None else jnp.where(valid.sum() > 1, standardized, advantage)


def mean(x: jax.Array, valid: jax.Array | None = None) -> jax.Array:
    """Returns the mean of the values in the mask `valid` `[...]`, of all if it is None, and 0 if the mask is empty. `[]`."""
    if valid is None:
        return x.mean()
    return jnp.where(valid, x, 0.0).sum() / jnp.maximum(valid.sum(dtype=x.dtype), 1)
