"""Counters that do not wrap: two 32-bit words, because JAX has no 64-bit integers by default.

Use `fraction` to read a counter in schedules, `remainder` for periods.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_WORD = 2**32
_BYTES = tuple(range(24, -1, -8))


class Counter(NamedTuple):
    """The number `high * 2**32 + low`, exact up to 1.8e19."""

    high: jax.Array  # the upper word. shape=(...), dtype=uint32
    low: jax.Array  # the lower word. shape=(...), dtype=uint32


def counter(value: int = 0) -> Counter:
    """Makes a scalar counter that starts at a number from 0 to `2**64 - 1`; raises ValueError otherwise."""
    if not 0 <= value < _WORD**2:
        raise ValueError(f"a counter starts at a number in [0, 2**64), not at {value}")
    return Counter(jnp.uint32(value // _WORD), jnp.uint32(value % _WORD))


def advance(count: Counter, amount: jax.Array | int = 1) -> Counter:
    """Adds a Python integer below 2**64, or an array of nonnegative integers, which broadcasts."""
    upper, lower = divmod(amount, _WORD) if isinstance(amount, int) else (0, amount)
    added = jnp.asarray(lower).astype(jnp.uint32) if not isinstance(lower, int) else jnp.uint32(lower)
    low = count.low + added
    return Counter(count.high + jnp.uint32(upper) + (low < added).astype(jnp.uint32), low)


def times(count: Counter, multiplier: int) -> Counter:
    """Multiplies by a Python integer from 0 to `2**32 - 1`, modulo 2**64."""
    product = Counter(count.high * jnp.uint32(multiplier), jnp.zeros_like(count.low))
    for i, half in enumerate((count.low & 0xFFFF, count.low >> 16)):
        for j, factor in enumerate((multiplier & 0xFFFF, multiplier >> 16)):
            part, places = half * jnp.uint32(factor), i + j  # of 16 bits each
            upper = (jnp.zeros_like(part), part >> 16, part)[places]
            lower = (part, part << 16, jnp.zeros_like(part))[places]
            product = advance(product._replace(high=product.high + upper), lower)
    return product


def difference(later: Counter, earlier: Counter) -> jax.Array:
    """Returns the difference of two counters less than 2**31 apart. int32"""
    return (later.low - earlier.low).astype(jnp.int32)


def fraction(count: Counter, total: int) -> jax.Array:
    """Returns the fraction of a total that a counter has reached, at most 1, with a relative error of at most 2**-22.
    float32
    """
    high, low = np.float32(_WORD / total), np.float32(1 / total)
    ratio = count.high.astype(jnp.float32) * high + count.low.astype(jnp.float32) * low
    return jnp.minimum(ratio, 1.0)


def remainder(count: Counter, period: int) -> jax.Array:
    """Returns the remainder after division by a period, int32; raises ValueError unless the period is from 1 to 2**24."""
    if not 1 <= period <= 2**24:
        raise ValueError(f"a period of {period} is not in [1, 2**24]; use one in this range")
    residue = jnp.zeros_like(count.low)
    for word in count:
        for shift in _BYTES:  # long division: a rest below 2**24, shifted by a byte, stays below 2**32
            residue = (residue * 256 + ((word >> shift) & 255)) % jnp.uint32(period)
    return residue.astype(jnp.int32)


def at_least(count: Counter, number: int) -> jax.Array:
    """Whether a counter has reached a number; always True for negative numbers. bool"""
    limit = counter(max(number, 0))
    return (count.high > limit.high) | ((count.high == limit.high) & (count.low >= limit.low))


def to_float(count: Counter) -> jax.Array:
    """Converts to float32, for metrics and weights, with a relative error of at most 2**-22."""
    return count.high.astype(jnp.float32) * jnp.float32(_WORD) + count.low.astype(jnp.float32)


def to_int(count: Counter) -> int:
    """Converts a counter with scalar words to an exact integer, on the host; the counter must not be traced."""
    return int(count.high) * _WORD + int(count.low)
