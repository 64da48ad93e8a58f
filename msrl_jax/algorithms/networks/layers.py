"""Layers with weight gradients that XLA computes quickly on CPUs; on other platforms they are the usual layers."""

import functools
import math
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn


def _weight_gradient(x: jax.Array, g: jax.Array) -> jax.Array:
    """The sum of `x.T @ g` over rows, `[..., M]` and `[..., N]` to `[M, N]`; rows keep their dimensions and their devices."""
    rows = tuple(range(x.ndim - 1))
    return jax.lax.dot_general(x, g, ((rows, rows), ((), ())))


def _product_gradient(x: jax.Array, g: jax.Array) -> jax.Array:
    """`_weight_gradient` on a CPU."""
    rows = tuple(range(x.ndim - 1))
    if g.shape[-1] == 1:  # values; a product this narrow is slower than a sum
        return (x * g).sum(rows)[:, None]
    # XLA's fast CPU kernels contract the last dimension of the left operand. Without the barrier, XLA folds the
    # transpose into a product that contracts the first dimension, and a PPO update on two cores takes 20 % longer.
    transposed = jax.lax.optimization_barrier(jnp.moveaxis(x, -1, 0))
    return jax.lax.dot_general(transposed, g, ((tuple(i + 1 for i in rows), rows), ((), ())))


def _matmul_forward(x, w):
    return x @ w, (x, w)


def _matmul_backward(residuals, g):
    x, w = residuals
    return g @ w.T, jax.lax.platform_dependent(x, g, cpu=_product_gradient, default=_weight_gradient)


matmul = jax.custom_vjp(jnp.matmul)
"""`x @ w` for `x` `[..., M]` and `w` `[M, N]`."""
matmul.defvjp(_matmul_forward, _matmul_backward)


def _convolve(x, w, stride):
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _convolve_forward(x, w, stride):
    return _convolve(x, w, stride), (x, w)


def _convolve_backward(stride, residuals, g):
    x, w = residuals
    (x_gradient,) = jax.vjp(lambda x: _convolve(x, w, stride), x)[1](g)
    # Inside a loop, XLA's CPU convolution is slow for filters as large as in this gradient: a PPO update on MinAtar took
    # ten times as long.
    w_gradient = jax.lax.platform_dependent(
        x, w, g, cpu=functools.partial(_patch_gradient, stride),
        default=lambda x, w, g: jax.vjp(lambda w: _convolve(x, w, stride), w)[1](g)[0],
    )  # fmt: skip
    return x_gradient, w_gradient


def _patch_gradient(stride: int, x: jax.Array, w: jax.Array, g: jax.Array) -> jax.Array:
    height, width = (stride * (size - 1) + 1 for size in g.shape[1:3])
    shifted = [
        x[:, i : i + height : stride, j : j + width : stride] for i in range(w.shape[0]) for j in range(w.shape[1])
    ]
    patches = jnp.concatenate(shifted, axis=-1)
    return _product_gradient(patches, g).reshape(w.shape)


convolve = jax.custom_vjp(_convolve, nondiff_argnums=(2,))
"""Convolves images `x` `[B, H, W, C]` with filters `w` `[h, w, C, D]`, without padding, with a stride."""
convolve.defvjp(_convolve_forward, _convolve_backward)


def dense(size: int, scale: float, name: str | None = None) -> nn.Dense:
    """A dense layer of width `size`; its kernel starts as `scale` times an orthogonal matrix."""
    kernel_init = nn.initializers.orthogonal(scale)
    return nn.Dense(size, kernel_init=kernel_init, dot_general=lambda x, w, *_, **__: matmul(x, w), name=name)


def convolution(size: int, window: int, stride: int = 1) -> nn.Conv:
    """A convolution with `size` square filters, without padding; the kernel starts orthogonal, scaled for ReLUs."""
    kernel_init = nn.initializers.orthogonal(math.sqrt(2))
    return nn.Conv(
        size,
        (window, window),
        strides=stride,
        padding="VALID",
        kernel_init=kernel_init,
        conv_general_dilated=lambda x, w, *_, **__: convolve(x, w, stride),
    )


ArraysT = TypeVar("ArraysT")


def flatten(tree: ArraysT) -> ArraysT:
    """Merges `[T, E, ...]` into `[E * T, ...]`; `E` comes first, so that arrays stay split over devices along `E`."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), tree)


def unflatten(x: jax.Array, unroll_length: int) -> jax.Array:
    """Splits `[E * T, ...]` into `[T, E, ...]`: the inverse of `flatten`."""
    return jnp.swapaxes(x.reshape(-1, unroll_length, *x.shape[1:]), 0, 1)
