"""Dense layers and activations."""

import math
from collections.abc import Callable

import jax
from flax import linen as nn

from msrl_jax.kernels.networks import matmul

Activate = Callable[[jax.Array], jax.Array]
ACTIVATIONS: dict[str, Activate] = {"tanh": nn.tanh, "relu": nn.relu, "elu": nn.elu, "gelu": nn.gelu, "silu": nn.silu}


def dense(size: int, scale: float, name: str | None = None) -> nn.Dense:
    """Makes a dense layer of width `size`; its kernel is initialized to `scale` times an orthogonal matrix."""
    kernel_init = nn.initializers.orthogonal(scale)
    return nn.Dense(size, kernel_init=kernel_init, dot_general=lambda x, w, *_, **__: matmul(x, w), name=name)


def hidden(x: jax.Array, size: int, activation: Activate, layer_norm: bool, name: str | None = None) -> jax.Array:
    """Applies a dense layer of width `size`, optionally LayerNorm, and the activation."""
    x = dense(size, math.sqrt(2), name)(x)
    return activation(nn.LayerNorm(name=name and f"{name}_norm")(x) if layer_norm else x)
