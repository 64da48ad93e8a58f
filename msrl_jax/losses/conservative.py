"""The penalty of conservative Q-learning (Kumar et al., 2020, arXiv 2006.04779)."""

import math

import chex
import jax
import jax.numpy as jnp


def conservative_gap(q: jax.Array, action: jax.Array) -> jax.Array:
    """Returns the soft maximum of the values `[..., N]` minus the value of the action in the data (arXiv 2006.04779, eq. 4)."""
    chex.assert_type(action, int)
    chex.assert_shape(action, q.shape[:-1])
    return jax.nn.logsumexp(q, axis=-1) - jnp.take_along_axis(q, action[..., None], axis=-1)[..., 0]


def log_partition(q: jax.Array, log_prob: jax.Array) -> jax.Array:
    """Estimates the log of the integral of `exp(q)` over all actions from sampled actions `[..., N]` (2006.04779, app. F)."""
    chex.assert_is_broadcastable(log_prob.shape, q.shape)
    return jax.nn.logsumexp(q - jax.lax.stop_gradient(log_prob), axis=-1) - math.log(q.shape[-1])
