"""n-step transitions: folds a window of steps into one transition of its first action.

A step of several agents has the joint observation and the joint action of `A` agents, and `[A]` rewards and ends of episodes.
An agent that has left its episode stays terminated until the episode ends.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp


class Transition(NamedTuple):
    """One step in a buffer of n-step transitions; its items may have more fields.

    Attributes:
      obs: the observation acted on.
      action: the action.
      reward: the reward, or those of several agents. shape=() or (A,)
      terminated: whether the episode ended in a terminal state. shape=() or (A,), bool
      truncated: whether the episode was cut short. shape=() or (A,), bool
      next_obs: the true successor, `TimeStep.final_obs`. At the end of an episode it is not the next observation acted on.
      carry: the actor's recurrent carry before `obs`, zeros at the first step of an episode; `()` if it has none.
      present: whether the step counts; None if all do. A window with another step has the weight 0. shape=(), bool
    """

    obs: Any
    action: Any
    reward: Any
    terminated: Any
    truncated: Any
    next_obs: Any
    carry: Any = ()
    present: Any = None


class NStep(NamedTuple):
    """A step with the rewards of up to n steps: the target of its value is `reward + discount * value(next_obs)`.

    Attributes:
      obs: the observation acted on. shape=(B, ...)
      action: the action. shape=(B, ...)
      reward: the discounted sum of the rewards, up to the end of the episode. shape=(B,) or (B, A)
      discount: the weight of the successor's value: a power of the discount factor, or 0 after a terminal state. shape=(B,) or
        (B, A)
      next_obs: the true successor of the last step whose reward is in the sum, of any agent's sum. shape=(B, ...)
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

    The value of the successor counts after a truncated step, not after a terminated one.

    Args:
      reward: rewards. `[S, ...]`
      terminated: whether the episode ended in a terminal state; takes precedence over `truncated`. `[S, ...]` bool
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
