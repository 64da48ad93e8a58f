"""Convolutional networks, which `Torso` applies to images."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from msrl_jax.envs import Space
from msrl_jax.kernels.convolution import convolve
from msrl_jax.networks.layers import Activate
from msrl_jax.networks.torso import IMAGE_ENCODERS, Encoder
from msrl_jax.networks.unrolls import flatten, unflatten

_LARGE = 36
"""Images of this height and width have something left after the three convolutions."""
_FILTERS = {False: ((16, 3, 1),), True: ((32, 8, 4), (64, 4, 2), (64, 3, 1))}
"""Number, size and stride of filters, by whether images are large."""


def convolution(size: int, window: int, stride: int = 1) -> nn.Conv:
    """Makes a convolution with `size` square filters, without padding; its kernel starts orthogonal, scaled for ReLUs."""
    kernel_init = nn.initializers.orthogonal(math.sqrt(2))
    general = lambda x, w, *_, **__: convolve(x, w, stride)
    return nn.Conv(
        size, (window, window), strides=stride, padding="VALID", kernel_init=kernel_init, conv_general_dilated=general
    )


def _cnn(x: jax.Array, activation: Activate, large: bool) -> jax.Array:
    """Three convolutions (Mnih et al., 2015, doi:10.1038/nature14236); for small images, MinAtar's 16 filters (1903.03176)."""
    for size, window, stride in _FILTERS[large]:
        x = activation(convolution(size, window, stride)(x))
    return x


def _impala_cnn(x: jax.Array, activation: Activate, large: bool) -> jax.Array:
    """Returns the 15 layers of IMPALA (Espeholt et al., 2018, arXiv 1802.01561, figure 3), which halve the image size three
    times.
    """
    convolve_padded = lambda x, size: convolution(size, 3)(jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))))
    for size in (16, 32, 32):
        x = nn.max_pool(convolve_padded(x, size), (3, 3), (2, 2), "SAME")
        for _ in range(2):
            x += convolve_padded(activation(convolve_padded(activation(x), size)), size)
    return activation(x)


def _encoder(convolutions: Callable[[jax.Array, Activate, bool], jax.Array]) -> Encoder:
    """Makes the encoder of images `[..., H, W, C]` with up to two leading dimensions."""

    def encode(space: Space, obs: jax.Array, activation: Activate) -> jax.Array:
        large = min(obs.shape[-3:-1]) >= _LARGE
        x = obs.astype(jnp.float32)
        if large and obs.dtype == jnp.uint8:  # small images may hold tile indices
            x /= 255
        if is_unroll := obs.ndim == 5:  # [T, E, H, W, C]; a convolution takes one batch dimension
            x = flatten(x)
        x = convolutions(x, activation, large)
        x = x.reshape(*x.shape[: x.ndim - len(space.shape)], -1)
        return unflatten(x, obs.shape[0]) if is_unroll else x

    return encode


IMAGE_ENCODERS["cnn"] = _encoder(_cnn)
IMAGE_ENCODERS["impala_cnn"] = _encoder(_impala_cnn)
