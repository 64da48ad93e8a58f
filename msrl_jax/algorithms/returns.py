"""Returns and advantages: what a trajectory says about the value of its actions."""

import jax
import jax.numpy as jnp


def gae(
    reward: jax.Array,
    value: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    *,
    discount: float,
    gae_lambda: float,
) -> jax.Array:
    """Generalised advantage estimation (Schulman et al., 2016, arXiv 1506.02438, eq. 16) over whole and cut episodes.

    A terminated step has no future: its successor is worth 0. A truncated step has one that was not seen: its
    successor is worth `next_value`. Neither lets advantages of the next episode flow back into its own.

    Args:
      reward: rewards. `[T, ...]`
      value: values of the observations acted on. `[T, ...]`
      next_value: values of the true successors, which where an episode ends are its last observations and not the
        first ones of the next; anything finite where `terminated`. `[T, ...]`
      terminated: whether the episode ended in a terminal state; it wins where `truncated` also holds. `[T, ...]` bool
      truncated: whether the episode was cut short, as by a time limit. `[T, ...]` bool
      discount: the factor per step.
      gae_lambda: 0 gives one-step advantages, 1 gives discounted returns minus values.

    Returns:
      The advantages; plus `value` they are the targets of the value function. `[T, ...]`
    """
    delta = reward + discount * jnp.where(terminated, 0.0, next_value) - value
    decay = jnp.where(terminated | truncated, 0.0, discount * gae_lambda)

    def backwards(advantage, step):
        delta, decay = step
        advantage = delta + decay * advantage
        return advantage, advantage

    return jax.lax.scan(backwards, jnp.zeros_like(delta[0]), (delta, decay), reverse=True)[1]
