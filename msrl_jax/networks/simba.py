"""SimBa: residual blocks instead of dense layers (Lee et al., 2024, arXiv 2410.09754)."""

import math

import jax
from flax import linen as nn

from msrl_jax.networks.layers import Activate, dense
from msrl_jax.networks.torso import BLOCKS


def residual_blocks(x: jax.Array, activation: Activate, sizes: tuple[int, ...]) -> jax.Array:
    """Applies a residual block for each of the equal sizes, and a final LayerNorm. `[..., N]`."""
    if sizes:
        x = dense(sizes[0], 1.0)(x)
    for size in sizes:
        x += dense(size, math.sqrt(2))(activation(dense(4 * size, math.sqrt(2))(nn.LayerNorm()(x))))
    return nn.LayerNorm()(x)


BLOCKS["simba"] = residual_blocks
