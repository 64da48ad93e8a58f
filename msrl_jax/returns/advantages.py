"""Generalized advantage estimation, and means over valid steps."""

import chex
import jax
import jax.numpy as jnp

from msrl_jax.kernels.time import backward_sums


def gae(
    reward: jax.Array,
    value: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    valid: jax.Array | None = None,
    *,
    discount: float,
    gae_lambda: float,
) -> jax.Array:
    """Estimates generalized advantages (Schulman et al., 2016, arXiv 1506.02438, eq. 16).

    The successor of a terminated step has the value 0; the successor of a truncated step has the value `next_value`. The
    advantages of an episode do not depend on the next episode.

    Args:
      reward: rewards. `[T, ...]`
      value: values of the observations at every step. `[T, ...]`
      next_value: values of the true successors. Where an episode ends, the true successor is its last observation, not the
        first one of the next episode; any finite number where `terminated`. `[T, ...]`
      terminated: whether the episode ended in a terminal state; it takes precedence over `truncated`. `[T, ...]` bool
      truncated: whether the episode was cut short, as by a time limit. `[T, ...]` bool
      valid: mask of valid steps; all if None. The advantage of an invalid step is 0, and the step before it bootstraps from
        `next_value`. `[T, ...]` bool
      discount: discount factor per step.
      gae_lambda: 0 gives one-step advantages, 1 gives discounted returns minus values.

    Returns:
      The advantages; `value` plus the advantages is the target of the value function. `[T, ...]`
    """
    chex.assert_equal_shape([reward, value, next_value, terminated, truncated])
    delta, ends = errors(reward, value, next_value, terminated, discount), terminated | truncated
    if valid is not None:
        delta, ends = jnp.where(valid, delta, 0.0), ends | ~valid
    return backward_sums(delta, jnp.where(ends, 0.0, discount * gae_lambda))


def standardize(advantage: jax.Array, counts: jax.Array | None = None) -> jax.Array:
    """Shifts and scales advantages to mean 0 and standard deviation 1 over the whole array.

    Args:
      advantage: advantages. `[...]`
      counts: mask of the values that determine mean and deviation; all if None. `[...]` bool

    Returns:
      The standardized advantages; zeros if all are equal. A single valid advantage has no deviation and is unchanged. `[...]`
    """
    if advantage.size == 1:
        return advantage
    centered = advantage - mean(advantage, counts)
    standardized = centered / (jnp.sqrt(mean(jnp.square(centered), counts)) + 1e-8)
    return standardized if counts is None else jnp.where(counts.sum() > 1, standardized, advantage)


def mean(x: jax.Array, counts: jax.Array | None = None) -> jax.Array:
    """Returns the mean of the values in the mask `counts` `[...]`, of all if it is None, and 0 if the mask is empty. `[]`."""
    if counts is None:
        return x.mean()
    return jnp.where(counts, x, 0.0).sum() / jnp.maximum(counts.sum(dtype=x.dtype), 1)


def errors(reward: jax.Array, value: jax.Array, next_value: jax.Array, terminated: jax.Array, discount: float) -> jax.Array:
    """Returns the temporal-difference errors; a terminal state has the value 0."""
    return reward + discount * jnp.where(terminated, 0.0, next_value) - value
