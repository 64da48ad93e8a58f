"""Keeps the small arrays of a loop in one, for devices on which every kernel counts.

XLA updates each array of a `scan`'s carry and writes each array that the `scan` stacks with a kernel of its own, in every step:
of a step of environments the observation, the action, the reward, the ends and so on, of an update every bias and its moments.
Here the small ones travel as one vector of words, and are taken apart where they are used. Of short bodies, several steps are
one turn of the loop. Operations and their order stay; but XLA fuses them otherwise, so last bits may differ where it optimises.
"""

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax._compat import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Scan,
    ShapedArray,
    aval,
    inlined_at,
    jaxpr_as_fun,
    jaxprs_in,
    replace_jaxprs,
    scan_p,
    scan_parts,
)
from msrl_jax.fragments.placement import Placement

_WORDS = ("float32", "int32", "uint32", "bool")
# Of one array that is carried, and of one that is stacked, which is only written. Moving larger ones takes longer than a kernel
# takes to start: a T4 reads and writes 256 KiB in 1.7 us, an H100 in 0.2, and a kernel starts in 2 to 3.
_MOST_BYTES, _MOST_STACKED = 2**14, 2**18
_FEWEST, _SHORTEST = 3, 4  # arrays, and steps of a loop, that are worth it: what is taken apart behind it are kernels too
_STEPS = {50: 8, 300: 5}  # most steps that are one turn, of bodies of at most so many equations


def is_single_accelerator(placement: Placement) -> bool:
    """Whether a placement is one accelerator: there the number of kernels matters, and nothing is split."""
    return placement.mesh.size == 1 and placement.devices[0].platform != "cpu"


def compacted(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program whose loops keep their small arrays together; `closed` itself if it has no loop with as many as three."""
    known: dict[int, Jaxpr] = {}

    def of(jaxpr: Jaxpr) -> Jaxpr:
        if id(jaxpr) not in known:
            eqns = [new for eqn in jaxpr.eqns for new in equations(replace_jaxprs(eqn, of))]
            same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
            known[id(jaxpr)] = jaxpr if same else jaxpr.replace(eqns=eqns)
        return known[id(jaxpr)]

    def equations(eqn: JaxprEqn) -> Sequence[JaxprEqn]:
        if eqn.primitive is not scan_p or eqn.effects:
            return [eqn]
        scan = scan_parts(eqn)
        if scan.length < _SHORTEST:
            return [eqn]
        results = [aval(v) for v in scan.body.jaxpr.outvars]
        carry = SmallArrayPacker(results[: scan.num_carry])
        rows = SmallArrayPacker(results[scan.num_carry :], most=_MOST_STACKED)
        steps = _steps(scan, eqn.params.get("unroll", 1))
        if not carry.small and not rows.small and steps == 1:
            return [eqn]
        return inlined_at(eqn, lambda *operands: _loop(scan, carry, rows, steps, operands))

    new = of(closed.jaxpr)
    return closed if new is closed.jaxpr else ClosedJaxpr(new, closed.consts)


class SmallArrayPacker:
    """Arrays of which the small ones are one vector of words; none of them if not `worth` it."""

    def __init__(self, arrays: Sequence[ShapedArray], worth: bool = True, most: int = _MOST_BYTES):
        self._arrays = arrays
        fits = lambda x: x.dtype.name in _WORDS and not x.weak_type and 0 < 4 * math.prod(x.shape) <= most  # noqa: E731
        small = [i for i, x in enumerate(arrays) if fits(x)]
        self.small = frozenset(small if worth and len(small) >= _FEWEST else ())

    def pack(self, xs: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The vector, `()` if there is none, and the other arrays."""
        words = [_as_words(x).ravel() for i, x in enumerate(xs) if i in self.small]
        return jnp.concatenate(words) if words else (), [x for i, x in enumerate(xs) if i not in self.small]

    def unpack(self, words: Any, others: Sequence[Any]) -> Iterator[Any]:
        """The arrays, each with the leading dimensions of the vector `[..., N]`."""
        rest, at = iter(others), 0
        for i, array in enumerate(self._arrays):
            if i not in self.small:
                yield next(rest)
                continue
            size = math.prod(array.shape)
            part = words[..., at : at + size]
            yield _from_words(part.reshape(*part.shape[:-1], *array.shape), array.dtype)
            at += size


def _steps(scan: Scan, given: int) -> int:
    """How many steps are one turn of a loop."""
    equations = sum(len(inner.eqns) for inner in jaxprs_in(scan.body.jaxpr))
    most = next((steps for size, steps in _STEPS.items() if equations <= size), 1)
    return max(given, *(steps for steps in range(1, most + 1) if scan.length % steps == 0))


def _loop(scan: Scan, carry: SmallArrayPacker, rows: SmallArrayPacker, steps: int, operands: Sequence[Any]) -> list[Any]:
    first, behind = scan.num_consts, scan.num_consts + scan.num_carry
    step = jaxpr_as_fun(scan.body)

    def packing(before: Any, xs: Any) -> tuple[Any, Any]:
        if steps > 1:  # else XLA would simplify across steps: two products with constants to one, which rounds once
            before = jax.lax.optimization_barrier(before)
        results = step(*operands[:first], *carry.unpack(*before), *xs)
        return carry.pack(results[: scan.num_carry]), rows.pack(results[scan.num_carry :])

    after, stacked = jax.lax.scan(
        packing, carry.pack(operands[first:behind]), list(operands[behind:]), scan.length, scan.reverse, unroll=steps
    )
    return [*carry.unpack(*after), *rows.unpack(*stacked)]


def _as_words(x: jax.Array) -> jax.Array:
    return x.astype(jnp.uint32) if x.dtype.name == "bool" else jax.lax.bitcast_convert_type(x, jnp.uint32)


def _from_words(words: jax.Array, dtype: Any) -> jax.Array:
    return words != 0 if dtype.name == "bool" else jax.lax.bitcast_convert_type(words, dtype)
