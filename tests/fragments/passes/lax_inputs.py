"""What cases of operations of `jax.lax` share: their operands, and operations that both tables have."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Inputs(NamedTuple):
    """Two arrays of floats and two of integers of one shape `[A, B]`, of which one dimension is split, and small ones."""

    x: jax.Array  # `[A, B]` with nan, infinities, zeros of both signs and subnormal numbers
    y: jax.Array  # `[A, B]` normal numbers; gradients are by this one
    i: jax.Array  # `[A, B]` int32
    k: jax.Array  # `[A, B]` int32, indices, some beyond either end
    n: jax.Array  # `[6]` int32, indices: beyond the start, -1, 0, the last, one beyond the end, far beyond the end
    w: jax.Array  # `[4, 4]` normal numbers: kernels and matrices


LAST, BEYOND = 3, 5


def dims(d, along, other):
    return tuple(along if a == d else other for a in range(2))


def moved(f, of="x"):
    return lambda s, d: f(jnp.moveaxis(getattr(s, of), d, -1))


ROWS = lax.ScatterDimensionNumbers((1,), (0,), (0,))


def scatter_rows(op, **options):
    def f(s, d):
        y, rows = jnp.moveaxis(s.y, d, 0), jnp.moveaxis(s.k, d, 0)[:, :1]
        return getattr(lax, op)(y, rows, y * 2 + 1, ROWS, **options)

    return f


def window(op, start, size, stride=1, padding="SAME", base=1, dilation=1, of="x"):
    def f(s, d):
        sizes = [dims(d, v, 1) for v in (size, stride)]
        more = {"base_dilation": dims(d, base, 1), "window_dilation": dims(d, dilation, 1)}
        pads = padding if isinstance(padding, str) else dims(d, padding, (0, 0))
        return lax.reduce_window(getattr(s, of), np.float32(start), op, *sizes, pads, **more)

    return f
