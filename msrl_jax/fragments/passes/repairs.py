"""Rewrites operations that XLA's partitioner computes incorrectly, or not at all, when an array is split over devices.

- Operations that pad an array at its edges (cumulative operations, windows, `pad`), before jaxlib 0.12: the partitioner
  reuses the padded shard of one operation for another with the same window, whatever the padding value. An operation that pads
  with anything but zero gets its own array, behind a barrier, so that only those that pad with zero share shards.
- Gradients of max-pooling windows: they lack the terms of windows that cross from one shard to the next. Dimensions with
  windows longer than one element are replicated.
- Reductions without a collective (exclusive or; and, or of integers; custom functions): devices gather the partial results if
  the reduction has a second operand.
- Maximum and minimum of floats: collectives lose nan. Reductions detect nan with a second one, of integers. Updates of
  `scatter_max` and `scatter_min` are replicated, so that no collective combines them.
- Convolutions with windows along a dimension of which devices have few elements: they, and the gradients of their kernels, read
  elements from wrong positions, or crash the process. Dimensions with windows are replicated.
- Fourier transforms of a dimension of which devices have few elements crash the process. The dimension is replicated.
- Negative padding before the first element together with interior padding crashes the process: the excess is sliced off
  instead. So do such windows: their dimensions are replicated.
- Updates of one element beyond the end, which JAX moves to the last position: several devices write it nowhere. Indices are
  clamped first.
- The partitioner does not support the upper half of an integer product: it is computed from halves.
- Updates of a part of an array by values computed from that array, on CPUs, even on one device: if the result gets another
  shape, XLA reshapes the array first, and then overwrites elements before it reads them. A barrier separates the new shape.
- Loops of length 0 whose body has effects, even on one device: a program with ordered effects but no callback is called
  without the token that it expects, or, on several devices, crashes when JAX writes it to its compilation cache.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from msrl_jax._compat import (
    JAXLIB,
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    aval,
    call_body,
    inline_function,
    jaxpr_as_fun,
    replace_jaxprs,
    rewrite_equations,
    scan_p,
    scan_parts,
    sub_jaxprs,
)

# They pad with one, an infinity, or a value of the user. (Sums, convolutions and slices pad with zero.)
_PADDING = frozenset(
    (
        *("cumprod", "cummax", "cummin", "cumlogsumexp", "reduce_window", "reduce_window_max", "reduce_window_min"),
        *("select_and_gather_add", "pad"),
    )
)
_BITWISE = {"reduce_xor": jax.lax.bitwise_xor, "reduce_or": jax.lax.bitwise_or, "reduce_and": jax.lax.bitwise_and}
# Their bodies see one shard, or one block of it, so nothing is partitioned inside.
_OPAQUE = frozenset(("pallas_call", "shard_map"))


def apply_xla_workarounds(closed: ClosedJaxpr, mesh: Mesh) -> ClosedJaxpr:
    """Rewrites a program so that XLA partitions it correctly over a mesh.

    Returns `closed` itself if it has none of these operations.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if mesh.size == 1 and not (on_cpu or closed.effects):
        return closed
    overlapping = {id(eqn) for eqn in _overlapping_updates(closed.jaxpr)} if on_cpu else set()

    def repair_equation(eqn: JaxprEqn, rewrite: Callable[[Jaxpr], Jaxpr]) -> list[JaxprEqn]:
        repair = _repair(eqn, mesh) if mesh.size > 1 else None
        if eqn.primitive is scan_p and scan_parts(eqn).length == 0 and eqn.effects:
            repair = _no_steps(eqn)
        elif id(eqn) in overlapping:
            compute = repair or partial(eqn.primitive.bind, **eqn.params)
            repair = lambda *xs: jax.lax.optimization_barrier(compute(*xs))
        if repair is not None:
            return inline_function(eqn, repair)
        return [eqn if eqn.primitive.name in _OPAQUE else replace_jaxprs(eqn, rewrite)]

    return rewrite_equations(closed, repair_equation)


def _repair(eqn: JaxprEqn, mesh: Mesh) -> Callable[..., Any] | None:
    """Returns a function that computes the results of an equation correctly on several devices; None if the equation itself
    does.
    """
    name, p = eqn.primitive.name, eqn.params
    bind = partial(eqn.primitive.bind, **p)
    replicate = partial(_replicate, mesh)
    is_float = bool(eqn.invars) and jnp.issubdtype(getattr(eqn.invars[0].aval, "dtype", bool), jnp.floating)
    if name == "pad" and any(low < 0 < inner for low, _, inner in p["padding_config"]):
        return lambda x, value: _pad_then_slice(_behind_barrier([x])[0], value, p["padding_config"])
    if name.startswith("reduce_window") and any(low < 0 for low, _ in p["padding"]) and max(p["base_dilation"]) > 1:
        return lambda *xs: bind(
            *_behind_barrier([replicate(x, [i > 1 for i in p["base_dilation"]]) if x.ndim else x for x in xs])
        )
    if JAXLIB < (0, 12) and name in _PADDING and not (name == "pad" and _is_zero(eqn.invars[1])):
        return lambda *xs: bind(*_behind_barrier(xs))
    if name == "select_and_scatter_add":
        return lambda *xs: bind(*_behind_barrier([replicate(x, [i > 1 for i in p["window_dimensions"]]) for x in xs]))
    if name == "conv_general_dilated" and any(map(any, windows := _windowed_dims(eqn))):
        return lambda *xs: bind(*map(replicate, xs, windows))
    if name == "fft":
        return lambda x: bind(replicate(x, [d >= x.ndim - len(p["fft_lengths"]) for d in range(x.ndim)]))
    if name == "dynamic_update_slice" and not all(isinstance(v, Literal) for v in eqn.invars[2:]):
        return lambda x, update, *starts: bind(x, update, *_clamp_starts(x, update, starts))
    if name in _BITWISE and not (name != "reduce_xor" and aval(eqn.invars[0]).dtype == bool):
        return _bitwise_reduction(eqn)
    if name in ("reduce_max", "reduce_min") and is_float:
        return lambda x: jnp.where(jax.lax.reduce_max((x != x).astype(jnp.int8), p["axes"]) > 0, jnp.nan, bind(x))
    if name in ("scatter-max", "scatter-min") and is_float:
        return lambda x, *updates: bind(x, *_replicate_updates(eqn, updates, replicate))
    if name == "reduce" and len(eqn.invars) == 2:
        computation = jaxpr_as_fun(p["jaxpr"])
        return _gathering_reduction(lambda a, b: computation(a, b)[0], p["dimensions"])
    if name == "mulhi":
        return _upper_half
    return None


def _no_steps(eqn: JaxprEqn) -> Callable[..., list[jax.Array]]:
    """Returns the results of a loop of length 0: the initial carry, and stacks without rows."""
    _, num_consts, num_carry, _, _ = scan_parts(eqn)
    stacks = [aval(v) for v in eqn.outvars[num_carry:]]

    def compute(*xs: jax.Array) -> list[jax.Array]:
        carry = jax.lax.optimization_barrier(list(xs[num_consts : num_consts + num_carry]))
        return [*carry, *(jax.lax.empty(kind.shape, kind.dtype) for kind in stacks)]

    return compute


def _overlapping_updates(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yields the equations that update a part of an array by values computed from the same inputs as the array."""
    stack, visited = [(jaxpr, False)], set[tuple[int, bool]]()
    while stack:
        current, related = stack.pop()
        inputs = (*current.constvars, *current.invars)
        # The inputs from which a value is computed, as bits. The inputs of a call may come from one array.
        sources: dict[Atom, int] = {v: 1 if related else 1 << i for i, v in enumerate(inputs)}
        for eqn in current.eqns:
            input_sources = [sources.get(a, 0) if isinstance(a, Var) else 0 for a in eqn.invars]
            sources |= dict.fromkeys(eqn.outvars, reduce(operator.or_, input_sources, 0))
            if (update := _one_update(eqn)) and input_sources[0] & sources.get(update, 0):
                yield eqn
            is_call = call_body(eqn) is not None
            new = [sub for sub in sub_jaxprs(eqn) if (id(sub), is_call) not in visited]
            visited |= {(id(sub), is_call) for sub in new}
            stack += [(sub, is_call) for sub in new]


def _one_update(eqn: JaxprEqn) -> Var | None:
    """Returns the values that an equation writes contiguously into an array, if there are several."""
    if eqn.primitive.name == "dynamic_update_slice":
        update = eqn.invars[1]
    elif eqn.primitive.name.startswith("scatter") and aval(eqn.invars[1]).size == aval(eqn.invars[1]).shape[-1]:
        update = eqn.invars[2]
    else:
        return None
    return update if isinstance(update, Var) and aval(update).size > 1 else None


def _is_zero(atom: Atom) -> bool:
    return isinstance(atom, Literal) and not any(np.asarray(atom.val).tobytes())


def _behind_barrier(xs: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the operands, with the arrays among them behind a barrier."""
    arrays = iter(jax.lax.optimization_barrier([x for x in xs if x.ndim]))
    return [next(arrays) if x.ndim else x for x in xs]


def _replicate(mesh: Mesh, x: jax.Array, dims: Sequence[bool]) -> jax.Array:
    """Returns an array that is not split along some dimensions."""
    sharding = NamedSharding(
        mesh, PartitionSpec(*[None if is_replicated else PartitionSpec.UNCONSTRAINED for is_replicated in dims])
    )
    return jax.lax.with_sharding_constraint(x, sharding) if any(dims) else x


def _windowed_dims(eqn: JaxprEqn) -> list[list[bool]]:
    """Returns the dimensions of a convolution's array and kernel that have windows, strides, dilation or padding."""
    p, dims = eqn.params, eqn.params["dimension_numbers"]
    parts = zip(p["window_strides"], p["lhs_dilation"], p["rhs_dilation"], p["padding"], dims.rhs_spec[2:], strict=True)
    kernel = aval(eqn.invars[1]).shape
    windows = [(*steps, pads, kernel[d]) != (1, 1, 1, (0, 0), 1) for *steps, pads, d in parts]
    along = [{d for d, window in zip(spec[2:], windows, strict=True) if window} for spec in (dims.lhs_spec, dims.rhs_spec)]
    return [[d in window_dims for d in range(len(kernel))] for window_dims in along]


def _replicate_updates(eqn: JaxprEqn, updates: Sequence[jax.Array], replicate: Callable[..., jax.Array]) -> list[jax.Array]:
    """Returns the indices and updates of a scatter, replicated along the dimensions whose updates may have the same target."""
    dims = eqn.params["dimension_numbers"]
    indices, values = updates
    may_overlap = [d not in dims.scatter_indices_batching_dims for d in range(indices.ndim - 1)]
    remaining = iter(may_overlap)
    along = [d not in dims.update_window_dims and next(remaining) for d in range(values.ndim)]
    return [replicate(indices, [*may_overlap, False]), replicate(values, along)]


def _clamp_starts(x: jax.Array, update: jax.Array, starts: Sequence[jax.Array]) -> list[jax.Array]:
    """Start indices of an update, clamped to the array."""
    last = [size - part for size, part in zip(x.shape, update.shape, strict=True)]
    return [jax.lax.clamp(np.asarray(0, i.dtype), i, np.asarray(n, i.dtype)) for i, n in zip(starts, last, strict=True)]


def _pad_then_slice(x: jax.Array, value: jax.Array, config: Sequence[tuple[int, int, int]]) -> jax.Array:
    """Pads without negative numbers, and slices off the excess."""
    padded = jax.lax.pad(x, value, [(max(low, 0), max(high, 0), inner) for low, high, inner in config])
    starts = [max(-low, 0) for low, _, _ in config]
    return jax.lax.slice(padded, starts, [n - max(-high, 0) for n, (_, high, _) in zip(padded.shape, config, strict=True)])


def _upper_half(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the upper half of the bits of a product of integers."""
    bits = jnp.iinfo(x.dtype).bits
    half, low = bits // 2, (1 << bits // 2) - 1
    a, b = x.astype(f"uint{bits}"), y.astype(f"uint{bits}")
    middle = (a >> half) * (b & low) + ((a & low) * (b & low) >> half)
    high = (a >> half) * (b >> half) + (middle >> half) + ((middle & low) + (a & low) * (b >> half) >> half)
    if jnp.issubdtype(x.dtype, jnp.signedinteger):
        high = high - jnp.where(x < 0, b, jnp.zeros_like(b)) - jnp.where(y < 0, a, jnp.zeros_like(a))
    return high.astype(x.dtype)


def _bitwise_reduction(eqn: JaxprEqn) -> Callable[..., jax.Array]:
    dtype = aval(eqn.invars[0]).dtype
    start = np.invert(np.zeros((), dtype)) if eqn.primitive.name == "reduce_and" else np.zeros((), dtype)
    reduce = _gathering_reduction(_BITWISE[eqn.primitive.name], eqn.params["axes"])
    return lambda x: reduce(x, jnp.asarray(start))


def _gathering_reduction(combine: Callable[[Any, Any], Any], axes: Sequence[int]) -> Callable[..., jax.Array]:
    """Returns a reduction along axes with an unused second operand. The barrier keeps XLA from removing it."""

    def reduce(x: jax.Array, start: jax.Array) -> jax.Array:
        none = jnp.zeros((), jnp.int8)
        results = jax.lax.reduce(
            (x, jnp.broadcast_to(none, x.shape)),
            (start, none),
            lambda a, b: (combine(a[0], b[0]), jnp.maximum(a[1], b[1])),
            tuple(axes),
        )
        return jax.lax.optimization_barrier(results)[0]

    return reduce
