"""Losses of policy gradients: elementwise functions of arrays of equal shapes `[...]`."""

import chex
import jax
import jax.numpy as jnp


def policy_gradient_loss(log_prob: jax.Array, advantage: jax.Array) -> jax.Array:
    """Returns the policy gradient loss; its gradient is the negative policy gradient (Williams, 1992; arXiv 1602.01783).

    Args:
      log_prob: log-probability of the action taken. `[...]`
      advantage: estimated advantage of the action; no gradient flows through it. `[...]`

    Returns:
      The loss to minimize. `[...]`
    """
    chex.assert_equal(jnp.shape(log_prob), jnp.shape(advantage))
    return -log_prob * jax.lax.stop_gradient(advantage)


def clipped_surrogate_loss(log_ratio: jax.Array, advantage: jax.Array, clip_ratio: float) -> jax.Array:
    """Returns the negative clipped surrogate objective of PPO (Schulman et al., 2017, arXiv 1707.06347, eq. 7).

    Args:
      log_ratio: log-probability of the action now, minus its log-probability when it was taken. `[...]`
      advantage: estimated advantage of the action. `[...]`
      clip_ratio: the probability ratio is clipped to [1 - clip_ratio, 1 + clip_ratio].

    Returns:
      The loss to minimize. `[...]`
    """
    chex.assert_equal(jnp.shape(log_ratio), jnp.shape(advantage))
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - clip_ratio, 1.0 + clip_ratio)
    return -jnp.minimum(ratio * advantage, clipped * advantage)


def approximate_kl(log_ratio: jax.Array) -> jax.Array:
    """Estimates the divergence of the old policy from the new one, unbiased and non-negative (J. Schulman's k3).

    http://joschu.net/blog/kl-approx.html

    Args:
      log_ratio: log-probability under the new policy minus that under the old, of actions drawn from the old policy. `[...]`

    Returns:
      One estimate per action; their mean estimates KL(old, new) in nats. `[...]`
    """
    return jnp.expm1(log_ratio) - log_ratio
