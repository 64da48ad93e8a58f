"""Metrics that reduce correctly: the value types an iteration may report."""

import jax
from flax import struct


@struct.dataclass
class Mean:
    """A mean kept as two sums, so that it stays exact when iterations and devices are added up.

    Attributes:
      total: sum of the values. shape=(), dtype=float32
      count: how many there were; the mean is undefined (nan) while it is 0. shape=(), dtype=float32
    """

    total: jax.Array
    count: jax.Array
