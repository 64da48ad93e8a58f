"""Combines the small arrays of a loop into one, for devices on which the number of kernels matters.

XLA updates each array of a `scan`'s carry, and writes each stacked array, with a separate kernel in every step: in an
environment step the observation, the action, the reward, the flags and so on; in an update every bias and its moments. Here,
the small arrays are packed into one vector of words and unpacked where they are used. For short bodies, several steps are
unrolled into one loop iteration. Operations and their order do not change, but XLA fuses them differently, so the last bits may
differ where it optimizes.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax._compat import (
    ClosedJaxpr,
    JaxprEqn,
    Scan,
    ShapedArray,
    aval,
    equations_in,
    inline_function,
    jaxpr_as_fun,
    replace_jaxprs,
    rewrite_equations,
    scan_p,
    scan_parts,
)
from msrl_jax.fragments.placement import Placement

_WORDS = ("float32", "int32", "uint32", "bool")
# Limits per carried array, and per stacked array, which is only written. Moving larger arrays takes longer than launching a
# kernel: a T4 reads and writes 256 KiB in 1.7 us, an H100 in 0.2, and a kernel launch takes 2 to 3.
_MAX_CARRY_BYTES, _MAX_ROW_BYTES = 2**14, 2**18
_MIN_ARRAYS, _MIN_STEPS = 3, 4  # minimum number of arrays, and of steps of a loop: unpacking after the loop also costs kernels
_MAX_UNROLLED = {50: 8, 300: 5}  # maximum number of equations of a body -> maximum number of steps per loop iteration


def is_single_accelerator(placement: Placement) -> bool:
    """Whether a placement is one accelerator, where the number of kernels matters and nothing is split."""
    return placement.mesh.size == 1 and placement.devices[0].platform != "cpu"


def combine_small_arrays(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program whose loops combine their small arrays; `closed` itself if no loop has at least three."""
    return rewrite_equations(closed, lambda eqn, rewrite: _with_fewer_arrays(replace_jaxprs(eqn, rewrite)))


def _with_fewer_arrays(eqn: JaxprEqn) -> list[JaxprEqn]:
    """Returns the equations of a loop that combines its small arrays; other equations, and loops for which it does not pay,
    alone.
    """
    if eqn.primitive is not scan_p or eqn.effects:
        return [eqn]
    scan = scan_parts(eqn)
    if scan.length < _MIN_STEPS:
        return [eqn]
    results = [aval(v) for v in scan.body.jaxpr.outvars]
    carry = SmallArrayPacker(results[: scan.num_carry])
    rows = SmallArrayPacker(results[scan.num_carry :], max_bytes=_MAX_ROW_BYTES)
    steps = _choose_unroll(scan, eqn.params.get("unroll", 1))
    if not carry.small and not rows.small and steps == 1:
        return [eqn]
    return inline_function(eqn, lambda *operands: _loop(scan, carry, rows, steps, operands))


class SmallArrayPacker:
    """Arrays whose small members are packed into one vector of words; none are packed unless `is_enabled`."""

    def __init__(self, arrays: Sequence[ShapedArray], is_enabled: bool = True, max_bytes: int = _MAX_CARRY_BYTES):
        self._arrays = arrays
        fits = lambda x: x.dtype.name in _WORDS and not x.weak_type and 0 < 4 * math.prod(x.shape) <= max_bytes
        small = [i for i, x in enumerate(arrays) if fits(x)]
        self.small = frozenset(small if is_enabled and len(small) >= _MIN_ARRAYS else ())

    def pack(self, xs: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Returns the vector, `()` if there is none, and the other arrays."""
        words = [_as_words(x).ravel() for i, x in enumerate(xs) if i in self.small]
        return jnp.concatenate(words) if words else (), [x for i, x in enumerate(xs) if i not in self.small]

    def unpack(self, words: Any, other_arrays: Sequence[Any]) -> Iterator[Any]:
        """Yields the arrays, with the leading dimensions of the vector `[..., N]`."""
        remaining, offset = iter(other_arrays), 0
        for i, array in enumerate(self._arrays):
            if i not in self.small:
                yield next(remaining)
                continue
            size = math.prod(array.shape)
            part = words[..., offset : offset + size]
            yield _from_words(part.reshape(*part.shape[:-1], *array.shape), array.dtype)
            offset += size


def _choose_unroll(scan: Scan, unroll: int) -> int:
    """Returns the number of steps per loop iteration."""
    equations = sum(1 for _ in equations_in(scan.body.jaxpr))
    max_steps = next((steps for size, steps in _MAX_UNROLLED.items() if equations <= size), 1)
    return max(unroll, *(steps for steps in range(1, max_steps + 1) if scan.length % steps == 0))


def _loop(scan: Scan, carry: SmallArrayPacker, rows: SmallArrayPacker, steps: int, operands: Sequence[Any]) -> list[Any]:
    carry_start, xs_start = scan.num_consts, scan.num_consts + scan.num_carry
    step = jaxpr_as_fun(scan.body)

    def packed_step(before: Any, xs: Any) -> tuple[Any, Any]:
        if steps > 1:  # or XLA would simplify across steps, e.g. merge two products with constants, which rounds once
            before = jax.lax.optimization_barrier(before)
        results = step(*operands[:carry_start], *carry.unpack(*before), *xs)
        return carry.pack(results[: scan.num_carry]), rows.pack(results[scan.num_carry :])

    after, stacked = jax.lax.scan(
        packed_step,
        carry.pack(operands[carry_start:xs_start]),
        list(operands[xs_start:]),
        scan.length,
        scan.reverse,
        unroll=steps,
    )
    return [*carry.unpack(*after), *rows.unpack(*stacked)]


def _as_words(x: jax.Array) -> jax.Array:
    return x.astype(jnp.uint32) if x.dtype.name == "bool" else jax.lax.bitcast_convert_type(x, jnp.uint32)


def _from_words(words: jax.Array, dtype: np.dtype) -> jax.Array:
    return words != 0 if dtype.name == "bool" else jax.lax.bitcast_convert_type(words, dtype)
