"""Updates: optimizers, schedules, the minibatches of PPO, and target networks.

In the shape descriptions, `T` denotes the length of an unroll, `E` the number of environments, `M` the number of minibatches of
an epoch and `U` the number of updates. A shuffle moves nothing between devices: a minibatch of feed-forward networks holds
`T / M` time steps of all environments; one of recurrent networks holds one environment from every group of `M` adjacent ones.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from msrl_jax.algorithms.agent import Progress
from msrl_jax.fragments import fragment


def make_optimizer(
    name: Literal["adam", "rmsprop"], *, max_grad_norm: float | None, epsilon: float, rms_decay: float = 0.99
) -> optax.GradientTransformation:
    """Makes an optimizer that clips gradients by their global norm first.

    Args:
      name: "adam", or "rmsprop" as in A3C (Mnih et al., 2016, arXiv 1602.01783, supplement): not centered, and with
        `epsilon` under the root.
      max_grad_norm: the largest global norm; None does not clip.
      epsilon: small number added to the denominator.
      rms_decay: decay per update of RMSProp's running mean of squared gradients.

    Returns:
      The optimizer; `descend` multiplies its updates by the learning rate.
    """
    rmsprop = optax.scale_by_rms(rms_decay, epsilon, eps_in_sqrt=True)
    scale = rmsprop if name == "rmsprop" else optax.scale_by_adam(eps=epsilon)
    clip = optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)
    return optax.chain(clip, scale)


def descend(params: Any, updates: Any, learning_rate: jax.Array) -> Any:
    """Subtracts `learning_rate` times `updates` from `params`.

    This replaces `optax.scale_by_learning_rate`: the rate is a traced number, so that its schedule can use a `Counter`.
    """
    return jax.tree.map(lambda p, u: p - learning_rate * u, params, updates)


def annealed(rate: Any, progress: Progress, falls: bool) -> jax.Array:
    """A learning rate, which falls linearly to 0 over the run if it `falls`. `[]` float32."""
    if not falls or progress.total is None:
        return jnp.float32(rate)
    return jnp.asarray(optax.linear_schedule(rate, 0.0, transition_steps=1)(progress.fraction))


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


def make_apply_update(optimizer: optax.GradientTransformation) -> Callable[..., tuple[Any, Any]]:
    """Makes the fragment that applies a gradient if the buffer is ready.

    Args:
      optimizer: the optimizer, without a learning rate.

    Returns:
      `(params, opt_state, grads, learning_rate, ready) -> (params, opt_state)`.
    """

    @fragment(role="server")
    def apply_update(params, opt_state, grads, learning_rate, ready):
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        return select(ready, (descend(params, updates, learning_rate), new_opt_state), (params, opt_state))

    return apply_update


@fragment(role="server")
def polyak_update(target_params: Any, params: Any, share: jax.Array) -> Any:
    """Moves target parameters towards parameters by a share in [0, 1]: Polyak averaging, or a copy if it is 1."""
    return optax.incremental_update(params, target_params, share)


def select(condition: jax.Array, new: Any, old: Any) -> Any:
    """The leaves of `new` if the scalar `condition` holds, else those of `old`."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
