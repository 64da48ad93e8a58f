"""Soft values, and the loss of the entropy temperature, as in soft actor-critic."""

import chex
import jax
import jax.numpy as jnp


def soft_value(q: jax.Array, log_prob: jax.Array, temperature: jax.Array) -> jax.Array:
    """Returns the soft value of sampled actions (arXiv 1812.05905, eq. 3); its negative is the actor's loss (eq. 7)."""
    chex.assert_equal_shape((q, log_prob))
    chex.assert_rank(temperature, 0)
    return q - temperature * log_prob


def temperature_loss(log_temperature: jax.Array, log_prob: jax.Array, target_entropy: float | jax.Array) -> jax.Array:
    """Returns the loss that raises the temperature while the entropy is below its target, in nats (1812.05905, eq. 18)."""
    chex.assert_rank(log_temperature, 0)
    return -jnp.exp(log_temperature) * (jax.lax.stop_gradient(log_prob) + target_entropy)
