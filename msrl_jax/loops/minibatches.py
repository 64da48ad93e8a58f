"""The shuffled minibatches of PPO.

In the shape descriptions, `T` denotes the length of an unroll, `E` the number of environments, `M` the number of minibatches of
an epoch and `U` the number of updates. A minibatch holds `T / M` time steps of all environments; with a recurrent core, it
holds the sequences of one environment from every group of `M` adjacent ones. A shuffle therefore moves no data between devices
that hold whole groups.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from msrl_jax.agents.agent import RolloutFields
from msrl_jax.networks.unrolls import Carry


class MinibatchFields(RolloutFields, Protocol):
    """How an unroll is split into minibatches; `core` is read if there is one."""

    @property
    def num_epochs(self) -> int:
        """The passes over the batch per iteration."""
        ...

    @property
    def num_minibatches(self) -> int:
        """The updates per pass."""
        ...


def check_minibatches(config: MinibatchFields) -> None:
    """Raises ValueError unless `num_minibatches` divides the number of time steps, or of environments with a core."""
    name, groups = ("num_envs", "whole sequences") if has_core(config) else ("unroll_length", "time steps")
    size = getattr(config, name)
    if size % config.num_minibatches:
        raise ValueError(
            f"{type(config).__name__}.{name}={size} cannot be split into num_minibatches={config.num_minibatches} groups of "
            f"{groups}; use {name}={size + -size % config.num_minibatches}, or a num_minibatches that divides it"
        )


def has_core(config: object) -> bool:
    """Whether the networks of a config have a recurrent core."""
    return getattr(config, "core", None) is not None


def shuffle(key: jax.Array, config: MinibatchFields) -> tuple[jax.Array, jax.Array]:
    """Shuffles every epoch; returns the next key and the indices of minibatches: `[U, T / M]`, or `[U, E / M]` with a core."""
    key, *epoch_keys = jax.random.split(key, config.num_epochs + 1)
    size = config.num_minibatches
    if has_core(config):
        order = jnp.broadcast_to(jnp.arange(size)[:, None], (size, config.num_envs // size))
        return key, jnp.concatenate([jax.random.permutation(k, order, axis=0, independent=True) for k in epoch_keys])
    times = jnp.stack([jax.random.permutation(k, config.unroll_length) for k in epoch_keys])
    return key, times.reshape(config.num_epochs * size, -1)


def gather_minibatch(config: MinibatchFields, batch: Any, index: jax.Array, dims: int = 2) -> Any:
    """Gathers a minibatch `[T', B, ...]` from a pytree `[T, E, ...]`: whole sequences with a core, else single steps.

    Merges the first `dims` dimensions into two: with 3, each agent of `[T, E, A, ...]` becomes a separate sequence.
    """

    def steps(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x[index], 0, 1).reshape(1, -1, *x.shape[dims:])  # `E` first, so that it stays split over devices

    def sequences(x: jax.Array) -> jax.Array:
        groups = len(index)
        members = x.reshape(len(x), groups, -1, *x.shape[2:])
        element_index = index.reshape(1, groups, 1, *(1,) * (x.ndim - 2))
        minibatch = jnp.take_along_axis(members, element_index, axis=2, mode="promise_in_bounds")[:, :, 0]
        return minibatch.reshape(len(x), -1, *x.shape[dims:])

    return jax.tree.map(sequences if has_core(config) else steps, batch)


def gather_carry(config: MinibatchFields, carry: Carry, index: jax.Array, dims: int = 2) -> Carry:
    """Gathers the carries `[B, ...]` before the sequences of a minibatch from those before an unroll `[E, ...]`."""
    return jax.tree.map(lambda x: gather_minibatch(config, x[None], index, dims)[0], carry)
