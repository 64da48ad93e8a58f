"""Stores what a loop returns of every step in one array, for devices on which every kernel counts.

XLA writes each of the arrays that a `scan` stacks with a kernel of its own, in every step: of a step of environments the
observation, the action, the reward, the ends and so on. Here a step packs the small ones into one row of words; behind the
loop they are taken apart. Data only move, so no number changes.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax._compat import ClosedJaxpr, Jaxpr, JaxprEqn, aval, inlined_at, jaxpr_as_fun, replace_jaxprs, scan_p, scan_parts

_WORDS = ("float32", "int32", "uint32", "bool")
_MOST_BYTES = 2**14  # of one array in one step; larger ones cost more to take apart than to store
_FEWEST = 3


def with_packed_rows(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program whose loops store small results of their steps together; `closed` itself if none has as many as three."""
    known: dict[int, Jaxpr] = {}

    def of(jaxpr: Jaxpr) -> Jaxpr:
        if id(jaxpr) not in known:
            eqns = [new for eqn in jaxpr.eqns for new in equations(replace_jaxprs(eqn, of))]
            same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
            known[id(jaxpr)] = jaxpr if same else jaxpr.replace(eqns=eqns)
        return known[id(jaxpr)]

    def equations(eqn: JaxprEqn) -> Sequence[JaxprEqn]:
        small = _small(eqn) if eqn.primitive is scan_p and not eqn.effects else []
        return inlined_at(eqn, lambda *xs: _packed(eqn, small, xs)) if len(small) >= _FEWEST else [eqn]

    new = of(closed.jaxpr)
    return closed if new is closed.jaxpr else ClosedJaxpr(new, closed.consts)


def _small(eqn: JaxprEqn) -> list[int]:
    """Which of the arrays that a loop stacks have few bytes, of words or truth values."""
    stacked = eqn.outvars[scan_parts(eqn).num_carry :]
    rows = [(aval(v).dtype.name, math.prod(aval(v).shape[1:])) for v in stacked]
    return [i for i, (dtype, size) in enumerate(rows) if dtype in _WORDS and 0 < 4 * size <= _MOST_BYTES]


def _packed(eqn: JaxprEqn, small: Sequence[int], operands: Sequence[Any]) -> list[Any]:
    scan = scan_parts(eqn)
    first, behind = scan.num_consts, scan.num_consts + scan.num_carry
    step = jaxpr_as_fun(scan.body)
    stacked = [aval(v) for v in eqn.outvars[scan.num_carry :]]

    def packing(carry: Any, xs: Any) -> tuple[Any, Any]:
        results = step(*operands[:first], *carry, *xs)
        rows = results[scan.num_carry :]
        words = jnp.concatenate([_as_words(rows[i]).ravel() for i in small])
        return results[: scan.num_carry], (words, [row for i, row in enumerate(rows) if i not in small])

    carry, (words, others) = jax.lax.scan(
        packing, list(operands[first:behind]), list(operands[behind:]), length=scan.length, reverse=scan.reverse,
        unroll=eqn.params.get("unroll", 1),
    )
    unpacked, at = {}, 0
    for i in small:
        size = math.prod(stacked[i].shape[1:])
        unpacked[i] = _from_words(words[:, at : at + size].reshape(stacked[i].shape), stacked[i].dtype)
        at += size
    rest = iter(others)
    return [*carry, *(unpacked[i] if i in unpacked else next(rest) for i in range(len(stacked)))]


def _as_words(x: jax.Array) -> jax.Array:
    return x.astype(jnp.uint32) if x.dtype == bool else jax.lax.bitcast_convert_type(x, jnp.uint32)


def _from_words(words: jax.Array, dtype: Any) -> jax.Array:
    return words != 0 if dtype.name == "bool" else jax.lax.bitcast_convert_type(words, dtype)
