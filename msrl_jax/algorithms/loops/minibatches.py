"""The shuffled minibatches of PPO.

In the shape descriptions, `T` denotes the length of an unroll, `E` the number of environments, `M` the number of minibatches of
an epoch and `U` the number of updates. A minibatch holds `T / M` time steps of all environments; with a recurrent core, the
sequences of one environment from every group of `M` adjacent ones. So a shuffle moves nothing between devices that hold whole
groups.
"""

from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.algorithms.networks.layers import Carry


def check_minibatches(config: Any) -> None:
    """Raises ValueError unless `num_minibatches` divides the time steps, or the environments of networks with a core."""
    name, groups = ("num_envs", "whole sequences") if has_core(config) else ("unroll_length", "time steps")
    size = getattr(config, name)
    if size % config.num_minibatches:
        raise ValueError(
            f"{type(config).__name__}.{name}={size} cannot be split into num_minibatches={config.num_minibatches} groups of "
            f"{groups}; use {name}={size + -size % config.num_minibatches}, or a num_minibatches that divides it"
        )


def has_core(config: Any) -> bool:
    """Whether the networks of a config have a recurrent core."""
    return getattr(config, "core", "none") != "none"


def shuffle(key: jax.Array, config: Any) -> tuple[jax.Array, jax.Array]:
    """Shuffles every epoch: the next key, and the indices of each minibatch: `[U, T / M]`, or `[U, E / M]` with a core."""
    key, *epoch_keys = jax.random.split(key, config.num_epochs + 1)
    size = config.num_minibatches
    if has_core(config):
        order = jnp.broadcast_to(jnp.arange(size)[:, None], (size, config.num_envs // size))
        return key, jnp.concatenate([jax.random.permutation(k, order, axis=0, independent=True) for k in epoch_keys])
    times = jnp.stack([jax.random.permutation(k, config.unroll_length) for k in epoch_keys])
    return key, times.reshape(config.num_epochs * size, -1)


def gather_minibatch(config: Any, batch: Any, chosen: jax.Array, dims: int = 2) -> Any:
    """One minibatch `[T', B, ...]` of a pytree `[T, E, ...]`: whole sequences with a core, without one sequences of one step.

    The first `dims` dimensions become two: agents `[T, E, A, ...]` are sequences of their own if it is 3.
    """

    def steps(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x[chosen], 0, 1).reshape(1, -1, *x.shape[dims:])  # `E` first, so that it stays split over devices

    def sequences(x: jax.Array) -> jax.Array:
        groups = len(chosen)
        members = x.reshape(len(x), groups, -1, *x.shape[2:])
        index = chosen.reshape(1, groups, 1, *(1,) * (x.ndim - 2))
        taken = jnp.take_along_axis(members, index, axis=2, mode="promise_in_bounds")[:, :, 0]
        return taken.reshape(len(x), -1, *x.shape[dims:])

    return jax.tree.map(sequences if has_core(config) else steps, batch)


def gather_carry(config: Any, carry: Carry, chosen: jax.Array, dims: int = 2) -> Carry:
    """The carries `[B, ...]` before the sequences of a minibatch, of those before an unroll `[E, ...]`."""
    return jax.tree.map(lambda x: gather_minibatch(config, x[None], chosen, dims)[0], carry)
