"""The experience of an unroll, for the actor-critic algorithms.

In the shape descriptions, `T` denotes the length of an unroll and `E` the number of environments.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from msrl_jax.algorithms.networks.layers import first_steps
from msrl_jax.algorithms.returns.advantages import gae, standardize
from msrl_jax.algorithms.returns.value_size import TargetScale

AddBonus = Callable[["Trajectory", Any], "Trajectory"]
"""`(trajectory, last_obs [E, ...]) -> trajectory`, with a `bonus`; `last_obs` are the observations after it."""

NO_BONUS: AddBonus = lambda trajectory, last_obs: trajectory  # noqa: E731


class Trajectory(NamedTuple):
    """The experience of an unroll; every leaf is `[T, E, ...]`."""

    obs: jax.Array  # before every action
    action: jax.Array  # before `action_transform`
    log_prob: jax.Array  # of the action under the policy that acted
    reward: jax.Array
    terminated: jax.Array  # whether the episode ended in a terminal state
    truncated: jax.Array  # whether the episode was cut short
    present: jax.Array | None = None  # which steps count; all if None
    bonus: jax.Array | None = None  # added to the advantages, such as for what is new; nothing if None

    @property
    def is_first(self) -> jax.Array:
        """Where a carry is cleared within the unroll: at the first step of an episode; before the unroll it was. bool"""
        return first_steps(self.terminated | self.truncated)


def next_values(value: jax.Array, last_value: jax.Array, bootstrap_value: jax.Array, truncated: jax.Array) -> jax.Array:
    """The values `[T, E]` of the true successors: one step later, or the bootstrap value where an episode was truncated."""
    chex.assert_equal_shape([value, bootstrap_value, truncated])
    chex.assert_equal_shape([value[0], last_value])
    return jnp.where(truncated, bootstrap_value, jnp.concatenate([value[1:], last_value[None]]))


def estimate(
    config: Any,
    t: Trajectory,
    value: jax.Array,
    bootstrap_value: jax.Array,
    size: TargetScale | tuple[()] = (),
) -> tuple[jax.Array, jax.Array, jax.Array, TargetScale | tuple[()]]:
    """Advantages, standardized unless that is for minibatches or not wanted; and what the critic learns.

    Args:
      config: of the algorithm.
      t: the experience.
      value: the critic's outputs. `[T, E]`
      bootstrap_value: those for the last observations of episodes, see `next_values`, and of the unroll. `[T, E]`
      size: a `TargetScale`, by which values are divided for the critic; `()` if they are not.

    Returns:
      Advantages; values and their targets, as the critic's outputs should be; `[T, E]` each; and the size with these targets.
    """
    if size:
        value, bootstrap_value = value * size.size, bootstrap_value * size.size
    next_value = next_values(value, bootstrap_value[-1], bootstrap_value, t.truncated)
    advantage = gae(
        t.reward, value, next_value, t.terminated, t.truncated, t.present,
        discount=config.discount, gae_lambda=config.gae_lambda,
    )  # fmt: skip
    target = value + advantage
    if t.bonus is not None:
        advantage += t.bonus
    if config.normalize_advantage in ("batch", "worker"):
        advantage = standardize(advantage, t.present)
    if size:
        size = size.updated(target, t.present)
        # Not centered: while the mean of the targets moves, the critic would have to move every value with it.
        value, target = value / size.size, target / size.size
    return advantage, value, target, size
