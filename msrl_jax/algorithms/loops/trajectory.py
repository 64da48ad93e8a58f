"""The experience of an unroll, and the shuffled minibatches of PPO, for the actor-critic algorithms.

In the shape descriptions, `T` denotes the length of an unroll, `E` the number of environments, `M` the number of minibatches of
an epoch and `U` the number of updates. A minibatch holds `T / M` time steps of all environments, so a shuffle moves nothing
between devices.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from msrl_jax.algorithms.agent import descend
from msrl_jax.fragments import fragment


class Trajectory(NamedTuple):
    """The experience of an unroll; every leaf is `[T, E, ...]`.

    Attributes:
      obs: the observations at every step.
      action: the policy's actions, before `action_transform`.
      log_prob: log-probabilities of the actions under the policy that acted.
      reward: rewards.
      terminated: whether the episode ended in a terminal state.
      truncated: whether the episode was cut short.
      present: which steps count; all if None.
    """

    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    present: jax.Array | None = None


def split_keys(keys: jax.Array, unroll_length: int) -> tuple[jax.Array, jax.Array]:
    """Splits the keys of environments `[E]`: those of the next unroll `[E]`, and of the steps of this one `[T, E]`."""
    keys = jax.vmap(lambda key: jax.random.split(key, unroll_length + 1), out_axes=1)(keys)
    return keys[0], keys[1:]


def next_values(value: jax.Array, last_value: jax.Array, bootstrap_value: jax.Array, truncated: jax.Array) -> jax.Array:
    """The values `[T, E]` of the true successors of all steps; those of terminated steps have no meaning.

    They are the values `[T, E]` one step later and `last_value` `[E]`; where an episode was truncated `[T, E]`, the values of
    the last observations before a reset, `bootstrap_value` `[T, E]`.
    """
    chex.assert_equal_shape([value, bootstrap_value, truncated])
    chex.assert_equal_shape([value[0], last_value])
    return jnp.where(truncated, bootstrap_value, jnp.concatenate([value[1:], last_value[None]]))


def check_minibatches(config: Any, *, recurrent: bool) -> None:
    """Raises ValueError unless `num_minibatches` divides the time steps, or the environments of recurrent networks."""
    name, groups = ("num_envs", "whole sequences") if recurrent else ("unroll_length", "time steps")
    size = getattr(config, name)
    if size % config.num_minibatches:
        raise ValueError(
            f"{type(config).__name__}.{name}={size} cannot be split into num_minibatches={config.num_minibatches} groups of "
            f"{groups}; use {name}={size + -size % config.num_minibatches}, or a num_minibatches that divides it"
        )


def shuffled_times(
    key: jax.Array, *, unroll_length: int, num_epochs: int, num_minibatches: int
) -> tuple[jax.Array, jax.Array]:
    """Shuffles the time steps of every epoch: the next key, and the time steps of every minibatch. `[U, T / M]` int32."""
    key, *epoch_keys = jax.random.split(key, num_epochs + 1)
    times = jnp.stack([jax.random.permutation(k, unroll_length) for k in epoch_keys])
    return key, times.reshape(num_epochs * num_minibatches, -1)


def proximal_updates(
    optimizer: optax.GradientTransformation, gradients: Callable[..., tuple[Any, dict[str, jax.Array]]], target_kl: float | None
) -> Callable[..., tuple[Any, Any, dict[str, jax.Array]]]:
    """Makes the updates: `(params, opt_state, minibatches [U, ...], learning_rate, *data) -> (params, opt_state, statistics)`.

    `gradients` is `(params, *data, chosen) -> (gradients, statistics)`. Updates are skipped once the statistic `approx_kl`
    exceeds `target_kl`; the result has the means of the statistics over the updates.
    """

    @fragment(role="server")
    def apply_update(params, opt_state, grads, learning_rate, diverged):
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        old, new = (params, opt_state), (descend(params, updates, learning_rate), new_opt_state)
        if diverged is not None:
            new = jax.tree.map(lambda old, new: jnp.where(diverged, old, new), old, new)
        return *new, optax.tree.norm(grads)

    def run(params: Any, opt_state: Any, minibatches: jax.Array, learning_rate: jax.Array, *data: Any) -> Any:
        def update(updated, chosen):
            params, opt_state, diverged = updated
            grads, stats = gradients(params, *data, chosen)
            if target_kl is not None:
                diverged |= stats["approx_kl"] > target_kl
            params, opt_state, grad_norm = apply_update(params, opt_state, grads, learning_rate, diverged)
            return (params, opt_state, diverged), stats | {"grad_norm": grad_norm}

        diverged = None if target_kl is None else jnp.bool(False)
        (params, opt_state, _), stats = jax.lax.scan(update, (params, opt_state, diverged), minibatches)
        return params, opt_state, jax.tree.map(jnp.mean, stats)

    return run
