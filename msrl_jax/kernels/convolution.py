"""Convolutions."""

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.kernels.networks import weight_gradient_on_cpu


def _convolve(x, w, stride):
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _patches(x, window, stride):
    """Extracts the input patch of each filter position, `[B, H, W, C]` to `[B, H', W', h * w * C]`."""
    height, width = (size - side + 1 for size, side in zip(x.shape[1:3], window, strict=True))
    return jnp.concatenate([x[:, i : i + height : stride, j : j + width : stride] for i, j in np.ndindex(*window)], axis=-1)


def _product(x, w):
    return _patches(x, w.shape[:2], 1) @ w.reshape(-1, w.shape[-1])


@cache
def _forward(stride: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    usual = partial(_convolve, stride=stride)

    # XLA's CPU convolutions are slow if each population member has its own filters: PPO on MinAtar took twice as long with
    # five seeds.
    def batched(size, in_batched, x, w):
        axes = [0 if is_batched else None for is_batched in in_batched]
        vmapped = jax.vmap(usual, axes)
        if stride > 1 or not in_batched[1]:
            return vmapped(x, w), True
        return jax.lax.platform_dependent(x, w, cpu=jax.vmap(_product, axes), default=vmapped), True

    convolve = jax.custom_batching.custom_vmap(usual)
    convolve.def_vmap(batched)
    return convolve


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolve(x: jax.Array, w: jax.Array, stride: int) -> jax.Array:
    """Convolves images `x` `[B, H, W, C]` with filters `w` `[h, w, C, D]`, without padding, with a stride."""
    return _forward(stride)(x, w)


def _convolve_backward(stride, residuals, g):
    def usual(x, w, g):
        return jax.vjp(partial(_convolve, stride=stride), x, w)[1](g)

    # Inside a loop, XLA's CPU convolution is slow for the large filters in the gradient of the filters: a PPO update on
    # MinAtar took ten times as long. For the gradient of the input, the convolution is slow without a stride (up to 27 times);
    # with a stride, the product is slow.
    def product(x, w, g):
        patches, to_input = jax.vjp(lambda x: _patches(x, w.shape[:2], stride), x)
        dw = weight_gradient_on_cpu(patches, g).reshape(w.shape)
        return to_input(g @ w.reshape(-1, w.shape[-1]).T)[0] if stride == 1 else usual(x, w, g)[0], dw

    return jax.lax.platform_dependent(*residuals, g, cpu=product, default=usual)


convolve.defvjp(lambda x, w, stride: (convolve(x, w, stride), (x, w)), _convolve_backward)
