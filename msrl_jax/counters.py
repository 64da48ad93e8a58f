"""Counters that do not wrap: two 32-bit words, because JAX has no 64-bit integers by default.

Schedules read a counter with `fraction`, periods with `remainder`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_WORD = 2**32
_BYTES = tuple(range(24, -1, -8))


class Counter(NamedTuple):
    """The number `high * 2**32 + low`, exact up to 1.8e19.

    Attributes:
      high: the upper word. shape=(...), dtype=uint32
      low: the lower word. shape=(...), dtype=uint32
    """

    high: jax.Array
    low: jax.Array


def counter(value: int = 0) -> Counter:
    """Makes a counter.

    Args:
      value: its start, from 0 to `2**64 - 1`.

    Returns:
      The counter, with scalar words.

    Raises:
      ValueError: if the number is out of range.
    """
    if not 0 <= value < _WORD**2:
        raise ValueError(f"a counter starts from a number in [0, 2**64), not from {value}")
    return Counter(jnp.uint32(value // _WORD), jnp.uint32(value % _WORD))


def advance(count: Counter, by: jax.Array | int = 1) -> Counter:
    """Adds to a counter.

    Args:
      count: the counter.
      by: the increment: a Python integer below 2**64, or an array of nonnegative integers, which broadcasts.

    Returns:
      The sum.
    """
    upper, lower = divmod(by, _WORD) if isinstance(by, int) else (0, by)
    added = jnp.asarray(lower).astype(jnp.uint32) if not isinstance(lower, int) else jnp.uint32(lower)
    low = count.low + added
    return Counter(count.high + jnp.uint32(upper) + (low < added).astype(jnp.uint32), low)


def times(count: Counter, by: int) -> Counter:
    """Multiplies a counter.

    Args:
      count: the counter.
      by: the factor, from 0 to `2**32 - 1`.

    Returns:
      The product, modulo 2**64.
    """
    product = Counter(count.high * jnp.uint32(by), jnp.zeros_like(count.low))
    for i, half in enumerate((count.low & 0xFFFF, count.low >> 16)):
        for j, factor in enumerate((by & 0xFFFF, by >> 16)):
            part, places = half * jnp.uint32(factor), i + j  # of 16 bits each
            upper = (jnp.zeros_like(part), part >> 16, part)[places]
            lower = (part, part << 16, jnp.zeros_like(part))[places]
            product = advance(product._replace(high=product.high + upper), lower)
    return product


def difference(later: Counter, earlier: Counter) -> jax.Array:
    """Subtracts two counters.

    Args:
      later: a counter.
      earlier: another one, less than 2**31 away.

    Returns:
      `later - earlier`. int32
    """
    return (later.low - earlier.low).astype(jnp.int32)


def fraction(count: Counter, scale: int, total: int) -> jax.Array:
    """The fraction of a total that a counter has reached.

    Args:
      count: the counter.
      scale: units per count, such as environment steps per iteration.
      total: the total in these units; at least 1.

    Returns:
      `min(1, count * scale / total)`, with a relative error of at most 2**-22. float32
    """
    high, low = np.float32(_WORD * scale / total), np.float32(scale / total)
    reached = count.high.astype(jnp.float32) * high + count.low.astype(jnp.float32) * low
    return jnp.minimum(reached, 1.0)


def remainder(count: Counter, period: int) -> jax.Array:
    """The remainder of a counter after division.

    Args:
      count: the counter.
      period: the divisor, from 1 to 2**24.

    Returns:
      `count % period`. int32

    Raises:
      ValueError: if the period is out of range.
    """
    if not 1 <= period <= 2**24:
        raise ValueError(f"a period of {period} is not in [1, 2**24]; use one that is")
    rest = jnp.zeros_like(count.low)
    for word in count:
        for shift in _BYTES:  # long division: a rest below 2**24, shifted by a byte, stays below 2**32
            rest = (rest * 256 + ((word >> shift) & 255)) % jnp.uint32(period)
    return rest.astype(jnp.int32)


def at_least(count: Counter, number: int) -> jax.Array:
    """Whether a counter has reached a number.

    Args:
      count: the counter.
      number: the number; a negative one is always reached.

    Returns:
      `count >= number`. bool
    """
    limit = counter(max(number, 0))
    return (count.high > limit.high) | ((count.high == limit.high) & (count.low >= limit.low))


def to_float(count: Counter) -> jax.Array:
    """Converts a counter to float32, for metrics and weights.

    Args:
      count: the counter.

    Returns:
      The number, with a relative error of at most 2**-22. float32
    """
    return count.high.astype(jnp.float32) * jnp.float32(_WORD) + count.low.astype(jnp.float32)


def to_int(count: Counter) -> int:
    """Converts a counter to an exact integer, on the host.

    Args:
      count: a counter with scalar words that are not traced.

    Returns:
      The number.
    """
    return int(count.high) * _WORD + int(count.low)
