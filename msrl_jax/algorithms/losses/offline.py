"""Losses of learning from data alone: functions of arrays; the caller takes the mean.

In the shape descriptions, `N` denotes the number of discrete actions, or of actions that were drawn.
"""

import math

import chex
import jax
import jax.numpy as jnp


def log_partition(q: jax.Array, log_prob: jax.Array) -> jax.Array:
    """Estimates the logarithm of the integral of `exp(q)` over all actions (Kumar et al., 2020, arXiv 2006.04779, appendix F).

    The mean of `exp(q) / density` over actions drawn from any densities, importance sampling, estimates the integral without
    bias; the logarithm of a mean is too low by half its relative variance, about.

    Args:
      q: values of actions that were drawn. `[..., N]`
      log_prob: the logarithms of the densities that they were drawn with; no gradient flows through them. `[..., N]`

    Returns:
      The estimate. `[...]`
    """
    chex.assert_is_broadcastable(log_prob.shape, q.shape)
    return jax.nn.logsumexp(q - jax.lax.stop_gradient(log_prob), axis=-1) - math.log(q.shape[-1])


def conservative_gap(q: jax.Array, action: jax.Array) -> jax.Array:
    """How far the soft maximum of the values lies above that of the action in the data (arXiv 2006.04779, eq. 4).

    Args:
      q: values of all discrete actions. `[..., N]`
      action: the actions in the data. `[...]` integer

    Returns:
      The gap, which is positive: minus the log-likelihood of the action under the softmax of the values. `[...]`
    """
    chex.assert_type(action, int)
    chex.assert_shape(action, q.shape[:-1])
    return jax.nn.logsumexp(q, axis=-1) - jnp.take_along_axis(q, action[..., None], axis=-1)[..., 0]


def expectile_loss(error: jax.Array, expectile: float) -> jax.Array:
    """The asymmetric square whose minimizer is an expectile (Kostrikov et al., 2021, arXiv 2110.06169, eq. 4).

    Args:
      error: what should have been predicted, minus the prediction. `[...]`
      expectile: the weight of errors above 0; those below have one minus it. 0.5 gives the mean, 1 the maximum in the limit.

    Returns:
      The loss to minimize. `[...]`
    """
    chex.assert_type(error, float)
    return jnp.where(error > 0, expectile, 1 - expectile) * jnp.square(error)


def advantage_weight(advantage: jax.Array, inverse_temperature: float, max_weight: float) -> jax.Array:
    """The weight of an action in imitation, which grows with its advantage (arXiv 2110.06169, eq. 7; 1910.00177).

    Args:
      advantage: how much better than usual the action was; no gradient flows through it. `[...]`
      inverse_temperature: 0 imitates all alike.
      max_weight: no weight is above it.

    Returns:
      The weights of the log-likelihood. `[...]`
    """
    chex.assert_type(advantage, float)
    return jnp.minimum(jnp.exp(inverse_temperature * jax.lax.stop_gradient(advantage)), max_weight)
