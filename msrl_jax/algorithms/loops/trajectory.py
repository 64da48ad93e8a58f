"""The experience of an unroll, and the shuffled minibatches of PPO, for the actor-critic algorithms.

In the shape descriptions, `T` denotes the length of an unroll, `E` the number of environments, `M` the number of minibatches of
an epoch and `U` the number of updates. A minibatch holds `T / M` time steps of all environments, so a shuffle moves nothing
between devices.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from msrl_jax.algorithms.returns.advantages import gae, standardize
from msrl_jax.algorithms.returns.value_size import ValueSize


class Trajectory(NamedTuple):
    """The experience of an unroll; every leaf is `[T, E, ...]`."""

    obs: jax.Array  # before every action
    action: jax.Array  # before `action_transform`
    log_prob: jax.Array  # of the action under the policy that acted
    reward: jax.Array
    terminated: jax.Array  # whether the episode ended in a terminal state
    truncated: jax.Array  # whether the episode was cut short
    present: jax.Array | None = None  # which steps count; all if None
    bonus: jax.Array | None = None  # added to the advantages, those of `rnd.py`; nothing if None


def next_values(value: jax.Array, last_value: jax.Array, bootstrap_value: jax.Array, truncated: jax.Array) -> jax.Array:
    """The values `[T, E]` of the true successors: one step later, or the bootstrap value where an episode was truncated."""
    chex.assert_equal_shape([value, bootstrap_value, truncated])
    chex.assert_equal_shape([value[0], last_value])
    return jnp.where(truncated, bootstrap_value, jnp.concatenate([value[1:], last_value[None]]))


def estimate(
    config: Any,
    t: Trajectory,
    value: jax.Array,
    last_value: jax.Array,
    bootstrap_value: jax.Array,
    size: ValueSize | tuple[()] = (),
) -> tuple[jax.Array, jax.Array, jax.Array, ValueSize | tuple[()]]:
    """Advantages, standardized unless that is for minibatches or not wanted; and what the critic learns.

    Args:
      config: of the algorithm.
      t: the experience.
      value: the critic's outputs. `[T, E]`
      last_value: those for the observations after the unroll. `[E]`
      bootstrap_value: those for the last observations of episodes, see `next_values`. `[T, E]`
      size: a `ValueSize`, by which values are divided for the critic; `()` if they are not.

    Returns:
      Advantages; values and their targets, as the critic's outputs should be; `[T, E]` each; and the size with these targets.
    """
    if size:
        value, last_value, bootstrap_value = (x * size.size for x in (value, last_value, bootstrap_value))
    next_value = next_values(value, last_value, bootstrap_value, t.truncated)
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


def check_minibatches(config: Any, *, recurrent: bool) -> None:
    """Raises ValueError unless `num_minibatches` divides the time steps, or the environments of recurrent networks."""
    name, groups = ("num_envs", "whole sequences") if recurrent else ("unroll_length", "time steps")
    size = getattr(config, name)
    if size % config.num_minibatches:
        raise ValueError(
            f"{type(config).__name__}.{name}={size} cannot be split into num_minibatches={config.num_minibatches} groups of "
            f"{groups}; use {name}={size + -size % config.num_minibatches}, or a num_minibatches that divides it"
        )


def shuffle_times(key: jax.Array, config: Any) -> tuple[jax.Array, jax.Array]:
    """Shuffles the time steps of every epoch: the next key, and the time steps of every minibatch. `[U, T / M]` int32."""
    key, *epoch_keys = jax.random.split(key, config.num_epochs + 1)
    times = jnp.stack([jax.random.permutation(k, config.unroll_length) for k in epoch_keys])
    return key, times.reshape(config.num_epochs * config.num_minibatches, -1)
