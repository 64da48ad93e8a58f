"""Losses of the offline algorithms: functions of arrays; the caller takes the mean.

In the shape descriptions, `N` denotes the number of discrete actions, or of drawn actions.
"""

import math

import chex
import jax
import jax.numpy as jnp


def log_partition(q: jax.Array, log_prob: jax.Array) -> jax.Array:
    """Estimates the logarithm of the integral of `exp(q)` over all actions (Kumar et al., 2020, arXiv 2006.04779, appendix F).

    The mean of `exp(q) / density` over drawn actions estimates the integral without bias (importance sampling). The logarithm
    of the mean is biased: it is too low by about half the relative variance of the mean.

    Args:
      q: values of the drawn actions. `[..., N]`
      log_prob: log-densities of the drawn actions under their distributions; no gradient flows through them. `[..., N]`

    Returns:
      The estimate. `[...]`
    """
    chex.assert_is_broadcastable(log_prob.shape, q.shape)
    return jax.nn.logsumexp(q - jax.lax.stop_gradient(log_prob), axis=-1) - math.log(q.shape[-1])


def conservative_gap(q: jax.Array, action: jax.Array) -> jax.Array:
    """The soft maximum of the values minus the value of the action in the data (arXiv 2006.04779, eq. 4).

    Args:
      q: values of all discrete actions. `[..., N]`
      action: the actions in the data. `[...]` integer

    Returns:
      The gap. It is positive, since it is the negative log-likelihood of the action under a softmax of the values. `[...]`
    """
    chex.assert_type(action, int)
    chex.assert_shape(action, q.shape[:-1])
    return jax.nn.logsumexp(q, axis=-1) - jnp.take_along_axis(q, action[..., None], axis=-1)[..., 0]


def expectile_loss(error: jax.Array, expectile: float) -> jax.Array:
    """The asymmetric squared error, which an expectile minimizes (Kostrikov et al., 2021, arXiv 2110.06169, eq. 4).

    Args:
      error: the target minus the prediction. `[...]`
      expectile: the weight of errors above 0; errors below 0 have the weight `1 - expectile`. 0.5 gives the mean; the limit 1
        gives the maximum.

    Returns:
      The loss to minimize. `[...]`
    """
    chex.assert_type(error, float)
    return jnp.where(error > 0, expectile, 1 - expectile) * jnp.square(error)


def advantage_weight(advantage: jax.Array, inverse_temperature: float, max_weight: float) -> jax.Array:
    """The weight of an action in imitation; it grows with the advantage (arXiv 2110.06169, eq. 7; 1910.00177).

    Args:
      advantage: advantage of the action; no gradient flows through it. `[...]`
      inverse_temperature: weight of the advantage; 0 gives all actions weight 1.
      max_weight: largest weight.

    Returns:
      The weights of the log-likelihood. `[...]`
    """
    chex.assert_type(advantage, float)
    return jnp.minimum(jnp.exp(inverse_temperature * jax.lax.stop_gradient(advantage)), max_weight)
