"""The updates of PPO: shuffled minibatches, one gradient step each, until the policy has moved too far.

In the shape descriptions, `T` denotes the length of an unroll, `E` the number of environments, `M` the number of minibatches of
an epoch and `U` the number of updates. A shuffle moves nothing between devices: a minibatch of feed-forward networks holds
`T / M` time steps of all environments; one of recurrent networks holds one environment from every group of `M` adjacent ones.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from msrl_jax.algorithms.loops.optimizer import descend
from msrl_jax.fragments import fragment


def shuffled_times(
    key: jax.Array, *, unroll_length: int, num_epochs: int, num_minibatches: int
) -> tuple[jax.Array, jax.Array]:
    """Shuffles the time steps of every epoch.

    Args:
      key: key of the shuffles.
      unroll_length: the length of an unroll, `T`.
      num_epochs: number of epochs.
      num_minibatches: minibatches of an epoch, `M`.

    Returns:
      The next key, and the time steps of every minibatch. `[U, T / M]` int32
    """
    key, *epoch_keys = jax.random.split(key, num_epochs + 1)
    times = jnp.stack([jax.random.permutation(k, unroll_length) for k in epoch_keys])
    return key, times.reshape(num_epochs * num_minibatches, -1)


def shuffled_members(key: jax.Array, *, num_envs: int, num_epochs: int, num_minibatches: int) -> tuple[jax.Array, jax.Array]:
    """Shuffles the environments within groups of `M`, for every epoch.

    Args:
      key: key of the shuffles.
      num_envs: number of environments, `E`.
      num_epochs: number of epochs.
      num_minibatches: minibatches of an epoch, `M`.

    Returns:
      The next key, and the member of every group for every minibatch, for `pick`. `[U, E / M]` int32
    """
    key, *epoch_keys = jax.random.split(key, num_epochs + 1)
    order = jnp.broadcast_to(jnp.arange(num_minibatches)[:, None], (num_minibatches, num_envs // num_minibatches))
    return key, jnp.concatenate([jax.random.permutation(k, order, axis=0, independent=True) for k in epoch_keys])


def pick(x: jax.Array, chosen: jax.Array) -> jax.Array:
    """One environment of every group: `[T, E, ...] -> [T, E / M, ...]`, for `chosen` `[E / M]`."""
    groups = len(chosen)
    x = x.reshape(len(x), groups, -1, *x.shape[2:])
    index = chosen.reshape(1, groups, 1, *(1,) * (x.ndim - 3))
    return jnp.take_along_axis(x, index, axis=2, mode="promise_in_bounds")[:, :, 0]


def proximal_updates(
    optimizer: optax.GradientTransformation, gradients: Callable[..., tuple[Any, dict[str, jax.Array]]], target_kl: float | None
) -> Callable[..., tuple[Any, Any, dict[str, jax.Array]]]:
    """Makes the updates of an iteration.

    Args:
      optimizer: the optimizer, without a learning rate.
      gradients: `(params, *data, chosen) -> (gradients, statistics)`; the statistics have `approx_kl`.
      target_kl: updates are skipped once `approx_kl` exceeds it; None skips none.

    Returns:
      `(params, opt_state, minibatches [U, ...], learning_rate, *data) -> (params, opt_state, statistics)`, with the means of
      the statistics over the updates.
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
