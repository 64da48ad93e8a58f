"""n-step returns and lambda returns."""

import chex
import jax
import jax.numpy as jnp

from msrl_jax.kernels.time import backward_sums


def n_step_return(
    reward: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    *,
    discount: float,
    num_steps: int | None = None,
) -> jax.Array:
    """Computes n-step returns (Sutton & Barto, 2018, eq. 7.1; Mnih et al., 2016, arXiv 1602.01783).

    The sum of rewards stops early at the end of the unroll or of the episode, and bootstraps there unless the episode
    terminated.

    Args:
      reward: rewards. `[T, ...]`
      next_value: values of the true successors, as in `gae`. `[T, ...]`
      terminated: whether the episode ended in a terminal state; it takes precedence over `truncated`. `[T, ...]` bool
      truncated: whether the episode was cut short. `[T, ...]` bool
      discount: discount factor per step.
      num_steps: maximum number of rewards to sum, `n`; None sums to the end of the unroll, as in A3C.

    Returns:
      The returns. `[T, ...]`

    Raises:
      ValueError: if `num_steps` is below 1.
    """
    chex.assert_equal_shape([reward, next_value, terminated, truncated])
    if num_steps is None or num_steps >= len(reward):
        return lambda_return(reward, next_value, terminated, truncated, discount=discount, lambda_=1.0)
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps} must be at least 1, or None for all steps of the unroll")
    one_step = reward + discount * jnp.where(terminated, 0.0, next_value)
    is_last = last_steps(terminated, truncated)

    def extend(returns, _):
        next_returns = jnp.concatenate([returns[1:], returns[-1:]])
        return jnp.where(is_last, one_step, reward + discount * next_returns), None

    return jax.lax.scan(extend, one_step, None, length=num_steps - 1)[0]


def lambda_return(
    reward: jax.Array, next_value: jax.Array, terminated: jax.Array, truncated: jax.Array, *, discount: float, lambda_: float
) -> jax.Array:
    """Computes the mean of all n-step returns with weights that decay by `lambda_` (Sutton & Barto, 2018, eq. 12.2 and 12.3).

    It equals `gae` plus `value`.

    Args:
      reward: rewards. `[T, ...]`
      next_value: values of the true successors, as in `gae`. `[T, ...]`
      terminated: whether the episode ended in a terminal state; it takes precedence over `truncated`. `[T, ...]` bool
      truncated: whether the episode was cut short. `[T, ...]` bool
      discount: discount factor per step.
      lambda_: 0 gives one-step returns, 1 gives returns up to the end of the episode or unroll.

    Returns:
      The returns. `[T, ...]`
    """
    chex.assert_equal_shape([reward, next_value, terminated, truncated])
    next_value = jnp.where(terminated, 0.0, next_value)
    decay = jnp.where(last_steps(terminated, truncated), 0.0, lambda_)
    return backward_sums(reward + discount * (1 - decay) * next_value, discount * decay)


def last_steps(terminated: jax.Array, truncated: jax.Array) -> jax.Array:
    """Whether a step is the last one of its episode or of the unroll."""
    ends = jnp.asarray(terminated | truncated)
    return ends.at[-1].set(True) if len(ends) else ends
