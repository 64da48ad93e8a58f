"""Losses per example: elementwise functions of arrays of any one shape `[...]`; the caller takes the mean."""

import jax
import jax.numpy as jnp


def policy_gradient_loss(log_prob: jax.Array, advantage: jax.Array) -> jax.Array:
    """The loss whose gradient is the policy gradient, negated (Williams, 1992; Mnih et al., 2016, arXiv 1602.01783).

    Args:
      log_prob: log-probability of the action taken. `[...]`
      advantage: estimated advantage of the action; no gradient flows through it. `[...]`

    Returns:
      The loss to minimize. `[...]`
    """
    return -log_prob * jax.lax.stop_gradient(advantage)


def clipped_surrogate_loss(log_ratio: jax.Array, advantage: jax.Array, clip_ratio: float) -> jax.Array:
    """The clipped surrogate objective of PPO, negated (Schulman et al., 2017, arXiv 1707.06347, eq. 7).

    Args:
      log_ratio: log-probability of the action now, minus that when it was taken. `[...]`
      advantage: estimated advantage of the action. `[...]`
      clip_ratio: how far from 1 the probability ratio still pays off.

    Returns:
      The loss to minimize. `[...]`
    """
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - clip_ratio, 1.0 + clip_ratio)
    return -jnp.minimum(ratio * advantage, clipped * advantage)


def value_loss(value: jax.Array, target: jax.Array) -> jax.Array:
    """Half the squared error.

    Args:
      value: predictions. `[...]`
      target: what they should have been. `[...]`

    Returns:
      The loss to minimize. `[...]`
    """
    return 0.5 * jnp.square(value - target)


def clipped_value_loss(value: jax.Array, old_value: jax.Array, target: jax.Array, clip_value: float) -> jax.Array:
    """Half the squared error, without reward for moving further than `clip_value` from the old prediction.

    The value loss of OpenAI Baselines' PPO2; "Implementation Matters" (Engstrom et al., 2020, arXiv 2005.12729) studies
    it.

    Args:
      value: predictions. `[...]`
      old_value: predictions before the update. `[...]`
      target: what they should have been. `[...]`
      clip_value: how far from `old_value` a prediction may move to its profit, in units of the return.

    Returns:
      The loss to minimize. `[...]`
    """
    near = old_value + jnp.clip(value - old_value, -clip_value, clip_value)
    return jnp.maximum(value_loss(value, target), value_loss(near, target))


def approximate_kl(log_ratio: jax.Array) -> jax.Array:
    """An unbiased, non-negative estimate of the divergence of the old policy from the new (J. Schulman's k3).

    http://joschu.net/blog/kl-approx.html

    Args:
      log_ratio: log-probability, now minus then, of actions drawn from the old policy. `[...]`

    Returns:
      One estimate per action; their mean estimates KL(old, new) in nats. `[...]`
    """
    return jnp.expm1(log_ratio) - log_ratio
