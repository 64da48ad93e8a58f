"""Losses of values per example; the caller takes the mean."""

import chex
import jax
import jax.numpy as jnp
import optax


def value_loss(value: jax.Array, target: jax.Array) -> jax.Array:
    """Returns half the squared error.

    Args:
      value: predictions. `[...]`
      target: targets of the predictions. `[...]`

    Returns:
      The loss to minimize. `[...]`
    """
    chex.assert_equal(jnp.shape(value), jnp.shape(target))
    return 0.5 * jnp.square(value - target)


def clipped_value_loss(value: jax.Array, old_value: jax.Array, target: jax.Array, clip_value: float) -> jax.Array:
    """Returns half the squared error; a change of more than `clip_value` from the old prediction does not lower it.

    This is the value loss of PPO2 in OpenAI Baselines, which Engstrom et al. (2020, arXiv 2005.12729) study.

    Args:
      value: predictions. `[...]`
      old_value: predictions before the update. `[...]`
      target: targets of the predictions. `[...]`
      clip_value: the difference from `old_value` is clipped to this size, in the units of `value`.

    Returns:
      The loss to minimize. `[...]`
    """
    chex.assert_equal(jnp.shape(value), jnp.shape(old_value))
    near = old_value + jnp.clip(value - old_value, -clip_value, clip_value)
    return jnp.maximum(value_loss(value, target), value_loss(near, target))


def value_error(value: jax.Array, target: jax.Array, huber_delta: float | None) -> jax.Array:
    """Returns half the squared error; linear above `huber_delta`, unless it is None."""
    return optax.l2_loss(value, target) if huber_delta is None else optax.huber_loss(value, target, delta=huber_delta)
