"""Arrays of unrolls `[T, E, ...]`: recurrent states, first steps of episodes, and both dimensions as one."""

from typing import TypeVar

import jax
import jax.numpy as jnp

ArraysT = TypeVar("ArraysT")
Carry = tuple[jax.Array, ...]
"""A recurrent state: arrays `[..., H]`; empty for networks without one. An episode starts with zeros."""


def reset_carry(is_first: jax.Array, carry: ArraysT) -> ArraysT:
    """Clears carries `[..., H]` where an episode starts: where `is_first`, bool of their first dimensions, is True."""
    return jax.tree.map(lambda x: jnp.where(is_first.reshape(is_first.shape + (1,) * (x.ndim - is_first.ndim)), 0.0, x), carry)


def first_steps(ended: jax.Array) -> jax.Array:
    """Marks the steps after episode ends, `[T, ...]`, but never step 0, whose carry is already cleared."""
    return jnp.concatenate([jnp.zeros_like(ended[:1]), ended[:-1]])


def flatten(tree: ArraysT) -> ArraysT:
    """Merges `[T, E, ...]` into `[E * T, ...]`; `E` comes first, so that arrays stay split over devices along `E`."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), tree)


def unflatten(x: jax.Array, unroll_length: int) -> jax.Array:
    """Splits `[E * T, ...]` into `[T, E, ...]`: the inverse of `flatten`."""
    return jnp.swapaxes(x.reshape(-1, unroll_length, *x.shape[1:]), 0, 1)
