"""Rewrites operations that XLA's partitioner computes wrongly or not at all where an array is split over devices.

- Operations that pad an array at its edges (cumulative operations, windows, `pad`): the partitioner keeps the padded shard of
  one and gives it to another with the same window, whatever that pads with. An operation that pads with anything but zero
  gets an array of its own, behind a barrier, so only those that pad with zero share shards.
- Gradients of windows that take the largest element: they lack the terms of windows that cross from one shard to the next.
  Dimensions along which windows are longer than one element are made whole.
- Reductions for which there is no collective (exclusive or; and, or of integers; functions of users): devices gather the
  partial results if the reduction has a second operand. So do the largest and the smallest of floats along a first dimension,
  whose collective on CPUs loses a nan. (Along others it may be lost: most of those are not split, such as that of actions.)
- Loops of no steps whose body has effects, on one device too: a program that has ordered effects and no callback is called
  without the token that it takes, or, on several devices, ends the process when JAX writes it to its compilation cache.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from msrl_jax._compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    aval,
    inlined_at,
    jaxpr_as_fun,
    replace_jaxprs,
    scan_p,
    scan_parts,
    with_equations,
)

# They pad with a one, an infinity, or what the user gives. (Sums, convolutions and slices pad with zero.)
_PADDING = frozenset(
    (
        *("cumprod", "cummax", "cummin", "cumlogsumexp", "reduce_window", "reduce_window_max", "reduce_window_min"),
        *("select_and_gather_add", "pad"),
    )
)
_BITWISE = {"reduce_xor": jax.lax.bitwise_xor, "reduce_or": jax.lax.bitwise_or, "reduce_and": jax.lax.bitwise_and}
_EXTREMES: dict[str, tuple[Any, float]] = {"reduce_max": (jax.lax.max, -np.inf), "reduce_min": (jax.lax.min, np.inf)}
# Their bodies see one shard, or one block of it: nothing is partitioned there.
_OPAQUE = frozenset(("pallas_call", "shard_map"))


def repaired(closed: ClosedJaxpr, mesh: Mesh) -> ClosedJaxpr:
    """Rewrites a program so that XLA partitions it rightly over a mesh.

    It is `closed` itself if it has none of these operations; on one device, all but loops of no steps stay as they are.
    """
    if mesh.size == 1 and not closed.effects:
        return closed
    known: dict[int, Jaxpr] = {}

    def of(jaxpr: Jaxpr) -> Jaxpr:
        if id(jaxpr) not in known:
            eqns = [new for eqn in jaxpr.eqns for new in equations(eqn)]
            same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
            known[id(jaxpr)] = jaxpr if same else with_equations(jaxpr, eqns)
        return known[id(jaxpr)]

    def equations(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
        name = eqn.primitive.name
        if eqn.primitive is scan_p and scan_parts(eqn).length == 0 and eqn.effects:
            yield from inlined_at(eqn, _no_steps(eqn))
        elif mesh.size == 1:
            yield replace_jaxprs(eqn, of)
        elif name in _PADDING and not (name == "pad" and _is_zero(eqn.invars[1])):
            yield from inlined_at(eqn, lambda *xs: eqn.primitive.bind(*_fenced(xs), **eqn.params))
        elif name == "select_and_scatter_add":
            yield from inlined_at(eqn, lambda *xs: eqn.primitive.bind(*_fenced(_unsplit(eqn, xs, mesh)), **eqn.params))
        elif name in _BITWISE and not (name != "reduce_xor" and aval(eqn.invars[0]).dtype == bool):
            yield from inlined_at(eqn, _bitwise(eqn))
        elif name in _EXTREMES and 0 in eqn.params["axes"] and jnp.issubdtype(aval(eqn.invars[0]).dtype, jnp.floating):
            combine, start = _EXTREMES[name]
            reduce = _gathered(combine, eqn.params["axes"])
            yield from inlined_at(eqn, lambda x: reduce(x, jnp.asarray(start, x.dtype)))
        elif name == "reduce" and len(eqn.invars) == 2:
            computation = jaxpr_as_fun(eqn.params["jaxpr"])
            yield from inlined_at(eqn, _gathered(lambda a, b: computation(a, b)[0], eqn.params["dimensions"]))
        else:
            yield eqn if name in _OPAQUE else replace_jaxprs(eqn, of)

    new = of(closed.jaxpr)
    return closed if new is closed.jaxpr else ClosedJaxpr(new, closed.consts)


def _no_steps(eqn: JaxprEqn) -> Callable[..., list[jax.Array]]:
    """What a loop of no steps returns: the carry as it was, and stacks without rows."""
    _, num_consts, num_carry, _, _ = scan_parts(eqn)
    stacks = [aval(v) for v in eqn.outvars[num_carry:]]

    def results(*xs: jax.Array) -> list[jax.Array]:
        carry = jax.lax.optimization_barrier(list(xs[num_consts : num_consts + num_carry]))
        return [*carry, *(jax.lax.empty(kind.shape, kind.dtype) for kind in stacks)]

    return results


def _is_zero(atom: Atom) -> bool:
    return isinstance(atom, Literal) and not any(np.asarray(atom.val).tobytes())


def _fenced(xs: Sequence[jax.Array]) -> list[jax.Array]:
    """The operands, with the arrays among them behind a barrier."""
    arrays = iter(jax.lax.optimization_barrier([x for x in xs if x.ndim]))
    return [next(arrays) if x.ndim else x for x in xs]


def _unsplit(eqn: JaxprEqn, xs: Sequence[jax.Array], mesh: Mesh) -> list[jax.Array]:
    """The operands, not split along dimensions in which windows are longer than one element."""
    dims = [None if size > 1 else PartitionSpec.UNCONSTRAINED for size in eqn.params["window_dimensions"]]
    at = NamedSharding(mesh, PartitionSpec(*dims))
    return [jax.lax.with_sharding_constraint(x, at) for x in xs]


def _bitwise(eqn: JaxprEqn) -> Callable[..., jax.Array]:
    dtype = aval(eqn.invars[0]).dtype
    start = np.invert(np.zeros((), dtype)) if eqn.primitive.name == "reduce_and" else np.zeros((), dtype)
    reduce = _gathered(_BITWISE[eqn.primitive.name], eqn.params["axes"])
    return lambda x: reduce(x, jnp.asarray(start))


def _gathered(combine: Callable[[Any, Any], Any], axes: Sequence[int]) -> Callable[..., jax.Array]:
    """A reduction along axes, with a second operand of which nothing is read. The barrier keeps XLA from removing it."""

    def reduce(x: jax.Array, start: jax.Array) -> jax.Array:
        none = jnp.zeros((), jnp.int8)
        both = jax.lax.reduce(
            (x, jnp.broadcast_to(none, x.shape)),
            (start, none),
            lambda a, b: (combine(a[0], b[0]), jnp.maximum(a[1], b[1])),
            tuple(axes),
        )
        return jax.lax.optimization_barrier(both)[0]

    return reduce
