"""n-step transitions: what a window of an environment says about its first action."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp


class Transition(NamedTuple):
    """One step, as buffers of n-step transitions hold it; items with more fields will do.

    Attributes:
      obs: the observation acted on.
      action: the action.
      reward: the reward. shape=()
      terminated: whether the episode ended in a terminal state. shape=(), bool
      truncated: whether the episode was cut short. shape=(), bool
      next_obs: the true successor: `TimeStep.final_obs`, which is not what is acted on next where an episode ends.
      carry: the recurrent state with which the actor saw `obs`, zeros at the first step of an episode; `()` if it has none.
    """

    obs: Any
    action: Any
    reward: Any
    terminated: Any
    truncated: Any
    next_obs: Any
    carry: Any = ()


class NStep(NamedTuple):
    """A step with the rewards of up to n steps: the target of its value is `reward + discount * value(next_obs)`.

    Attributes:
      obs: the observation acted on. shape=(B, ...)
      action: the action. shape=(B, ...)
      reward: the discounted sum of the rewards, up to the end of the episode. shape=(B,)
      discount: the weight of what follows: a power of the discount factor, or 0 after a terminal state. shape=(B,)
      next_obs: the true successor of the last step whose reward is in the sum. shape=(B, ...)
    """

    obs: Any
    action: Any
    reward: jax.Array
    discount: jax.Array
    next_obs: Any


def fold(
    reward: jax.Array, terminated: jax.Array, truncated: jax.Array, discount: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums the rewards of windows up to the first end of an episode (Sutton & Barto, 2018, eq. 7.1).

    A terminated step has no future; a truncated one has a future that was not seen, so its successor counts.

    Args:
      reward: rewards. `[S, ...]`
      terminated: whether the episode ended in a terminal state; it wins where `truncated` also holds. `[S, ...]` bool
      truncated: whether the episode was cut short. `[S, ...]` bool
      discount: the factor per step.

    Returns:
      The discounted sum, the position of the last step in it (int32), and the weight of its successor's value. `[...]`
    """
    chex.assert_equal_shape((reward, terminated, truncated))
    chex.assert_type((terminated, truncated), bool)
    ends = terminated | truncated
    lives = jnp.concatenate([jnp.ones_like(ends[:1]), jnp.cumsum(ends[:-1], 0) == 0])
    steps = jnp.arange(len(reward)).reshape(-1, *[1] * (reward.ndim - 1))
    total = jnp.where(lives, discount**steps * reward, 0.0).sum(0)
    last = lives.sum(0, dtype=jnp.int32) - 1
    return total, last, jnp.where((terminated & lives).any(0), 0.0, jnp.float32(discount) ** (last + 1))
