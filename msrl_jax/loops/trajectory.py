"""The experience of an unroll, for the actor-critic algorithms.

In the shape descriptions, `T` denotes the length of an unroll and `E` the number of environments.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from msrl_jax.networks.unrolls import first_steps
from msrl_jax.returns.advantages import gae
from msrl_jax.returns.value_scale import ValueScale

AddBonus = Callable[["Trajectory", Any], "Trajectory"]
"""`(trajectory, last_obs [E, ...]) -> trajectory`, with a `bonus`; `last_obs` are the observations after it."""

NO_BONUS: AddBonus = lambda trajectory, last_obs: trajectory


class Trajectory(NamedTuple):
    """The experience of an unroll; every leaf is `[T, E, ...]`."""

    obs: jax.Array  # before every action
    action: jax.Array  # before `action_transform`
    log_prob: jax.Array  # of the action under the policy that acted
    reward: jax.Array
    terminated: jax.Array  # whether the episode ended in a terminal state
    truncated: jax.Array  # whether the episode was cut short
    valid: jax.Array | None = None  # which steps count; all if None
    bonus: jax.Array | None = None  # added to the advantages, such as for intrinsic rewards; nothing if None

    @property
    def is_first(self) -> jax.Array:
        """Where to clear the carry: at first steps of episodes, except at the start of the unroll (already cleared). bool"""
        return first_steps(self.terminated | self.truncated)


def next_values(value: jax.Array, last_value: jax.Array, bootstrap_value: jax.Array, truncated: jax.Array) -> jax.Array:
    """Returns the values `[T, E]` of the true successors: the next value, or the bootstrap value at a truncation."""
    chex.assert_equal_shape([value, bootstrap_value, truncated])
    chex.assert_equal_shape([value[0], last_value])
    return jnp.where(truncated, bootstrap_value, jnp.concatenate([value[1:], last_value[None]]))


def advantages_and_targets(
    config: Any, t: Trajectory, value: jax.Array, bootstrap_value: jax.Array, scale: ValueScale | tuple[()] = ()
) -> tuple[jax.Array, jax.Array, jax.Array, ValueScale | tuple[()]]:
    """Estimates advantages and the targets of the critic.

    Args:
      config: the config of the algorithm.
      t: the trajectory.
      value: the critic's outputs. `[T, E]`
      bootstrap_value: values of the last observations of episodes (see `next_values`) and of the unroll. `[T, E]`
      scale: a `ValueScale`, which divides values for the critic; `()` if values are not scaled.

    Returns:
      The advantages, the values and their targets in the scale of the critic's outputs, `[T, E]` each; and the updated scale.
    """
    if scale:
        value, bootstrap_value = value * scale.divisor, bootstrap_value * scale.divisor
    next_value = next_values(value, bootstrap_value[-1], bootstrap_value, t.truncated)
    advantage = gae(
        t.reward, value, next_value, t.terminated, t.truncated, t.valid, discount=config.discount, gae_lambda=config.gae_lambda
    )
    target = value + advantage
    if t.bonus is not None:
        advantage += t.bonus
    if scale:
        scale = scale.updated(target, t.valid)
        # Do not center: while the mean of the targets moves, the critic would have to shift every value with it.
        value, target = value / scale.divisor, target / scale.divisor
    return advantage, value, target, scale
