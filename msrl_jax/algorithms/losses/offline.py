"""Losses of the offline algorithms: functions of arrays; the caller takes the mean.

In the shape descriptions, `N` denotes the number of discrete actions, or of drawn actions.
"""

import math

import chex
import jax
import jax.numpy as jnp


def log_partition(q: jax.Array, log_prob: jax.Array) -> jax.Array:
    """Estimates the logarithm of the integral of `exp(q)` over all actions (Kumar et al., 2020, arXiv 2006.04779, appendix F).

    From values and log-densities `[..., N]` of drawn actions, through which no gradient flows. The mean of `exp(q) / density`
    estimates the integral without bias (importance sampling). The logarithm of the mean is biased: it is too low by about half
    the relative variance of the mean.
    """
    chex.assert_is_broadcastable(log_prob.shape, q.shape)
    return jax.nn.logsumexp(q - jax.lax.stop_gradient(log_prob), axis=-1) - math.log(q.shape[-1])


def conservative_gap(q: jax.Array, action: jax.Array) -> jax.Array:
    """The soft maximum of the values `[..., N]` minus the value of the action in the data (arXiv 2006.04779, eq. 4).

    It is positive, since it is the negative log-likelihood of the action under a softmax of the values.
    """
    chex.assert_type(action, int)
    chex.assert_shape(action, q.shape[:-1])
    return jax.nn.logsumexp(q, axis=-1) - jnp.take_along_axis(q, action[..., None], axis=-1)[..., 0]


def expectile_loss(error: jax.Array, expectile: float) -> jax.Array:
    """The asymmetric squared error, which an expectile minimizes (Kostrikov et al., 2021, arXiv 2110.06169, eq. 4).

    Errors above 0 (of predictions that are too low) have the weight `expectile`, others `1 - expectile`: 0.5 gives the mean,
    and the limit 1 the maximum.
    """
    chex.assert_type(error, float)
    return jnp.where(error > 0, expectile, 1 - expectile) * jnp.square(error)


def advantage_weight(advantage: jax.Array, inverse_temperature: float, max_weight: float) -> jax.Array:
    """The weight of an action in imitation: `exp(inverse_temperature * advantage)`, at most `max_weight`.

    See arXiv 2110.06169, eq. 7, and 1910.00177. No gradient flows through the advantage.
    """
    chex.assert_type(advantage, float)
    return jnp.minimum(jnp.exp(inverse_temperature * jax.lax.stop_gradient(advantage)), max_weight)
