"""The cost of programs: the floating-point operations of a jaxpr, and of each fragment in it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from msrl_jax._compat import Atom, Jaxpr, JaxprEqn, aval, cond_p, scan_p, sub_jaxprs
from msrl_jax.fragments.graph.marker import is_fragment
from msrl_jax.fragments.placement import Layout

# Primitives that only move data. Primitives without floating-point results (integers, random bits, comparisons) are free too.
_FREE = frozenset(
    (
        *("broadcast_in_dim", "reshape", "squeeze", "slice", "dynamic_slice", "dynamic_update_slice", "gather", "scatter"),
        *("concatenate", "transpose", "rev", "pad", "copy", "convert_element_type", "bitcast_convert_type", "select_n"),
        *("stop_gradient", "split", "expand_dims", "iota", "empty2", "sort", "device_put", "sharding_constraint"),
        *("optimization_barrier", "pvary"),
    )
)
_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin", "cumsum", "cumprod", "cummax")


_IN_JAX = {"gpu": {"gpu", "cuda", "rocm"}}  # names of platforms in branches


@dataclass(frozen=True)
class FragmentPlan:
    """A fragment: `flops` of one call on the whole batch, `calls` per iteration, on `devices` devices of `placement`."""

    name: str
    role: str
    placement: str
    devices: int
    depth: int  # nesting depth
    flops: int
    calls: int  # inside a `shard_map`, the total over all of its devices


def flops(jaxpr: Jaxpr, platform: str) -> int:
    """Returns the floating-point operations of a jaxpr: 2 per multiply-add of a product, 1 per element of other results.

    The body of a loop counts once per repetition (of a `while`, once), a `cond` as its most expensive branch, or as the branch
    for the platform, such as "cpu", if it has platform-dependent branches; a `shard_map` on all devices.
    """
    return _Counter(platform).flops(jaxpr)


class _Counter:
    """Visits each jaxpr once, however often it is called."""

    def __init__(self, platform: str, layout: Layout | None = None):
        self._names = _IN_JAX.get(platform, {platform})
        self._layout = layout or Layout({})
        self._flops: dict[int, int] = {}
        self._fragments: dict[int, list[FragmentPlan]] = {}

    def flops(self, jaxpr: Jaxpr) -> int:
        if id(jaxpr) not in self._flops:
            self._flops[id(jaxpr)] = sum(map(self.eqn_flops, jaxpr.eqns))
        return self._flops[id(jaxpr)]

    def eqn_flops(self, eqn: JaxprEqn) -> int:
        if (own_flops := _direct_flops(eqn)) is not None:
            return own_flops
        if inner := [self.flops(sub) for sub in sub_jaxprs(eqn)]:
            if (platforms := eqn.params.get("branches_platforms")) is not None:  # the last branch is the default
                return next((n for n, names in zip(inner, platforms, strict=True) if self._names & {*(names or ())}), inner[-1])
            return max(inner) if eqn.primitive is cond_p else _repetitions(eqn) * sum(inner)
        return 0 if eqn.primitive.name in _FREE else sum(map(_count_floats, eqn.outvars))

    def fragments(self, jaxpr: Jaxpr) -> list[FragmentPlan]:
        if id(jaxpr) not in self._fragments:
            self._fragments[id(jaxpr)] = [fragment for eqn in jaxpr.eqns for fragment in self.fragments_of(eqn)]
        return self._fragments[id(jaxpr)]

    def fragments_of(self, eqn: JaxprEqn) -> Iterator[FragmentPlan]:
        marked = is_fragment(eqn)
        if marked:
            name, role, body = eqn.params["name"], eqn.params["role"], eqn.params["call_jaxpr"].jaxpr
            placement = self._layout.placement(role, name)
            yield FragmentPlan(name, role, placement.name, len(placement.devices), 0, self.flops(body), 1)
        for sub in sub_jaxprs(eqn):
            for inner in self.fragments(sub):
                yield replace(inner, depth=inner.depth + marked, calls=inner.calls * _repetitions(eqn))


def _direct_flops(eqn: JaxprEqn) -> int | None:
    """Returns the operations of an equation whose count follows from its primitive; None for others."""
    name = eqn.primitive.name
    if name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        lhs = aval(eqn.invars[0]).shape
        return 2 * math.prod(aval(eqn.outvars[0]).shape) * math.prod(lhs[d] for d in contract)
    if name == "conv_general_dilated":
        return 2 * _count_conv_products(eqn)
    if name.startswith("scatter") and name not in _FREE:
        return _count_floats(eqn.invars[2])
    if name.startswith("reduce_window"):
        return _count_floats(eqn.outvars[0]) * math.prod(eqn.params["window_dimensions"])
    if name in _REDUCTIONS:
        return _count_floats(eqn.invars[0])
    return None


def _count_floats(atom: Atom) -> int:
    return math.prod(aval(atom).shape) if jnp.issubdtype(aval(atom).dtype, jnp.inexact) else 0


def _count_conv_products(eqn: JaxprEqn) -> int:
    """Multiply-adds of a convolution, except those with padding or the holes of a dilated input."""
    numbers = eqn.params["dimension_numbers"]
    (_, _, *inputs), (_, features, *kernels), (batch, channels, *outputs) = (
        [aval(v).shape[d] for d in spec]
        for v, spec in zip((*eqn.invars, *eqn.outvars), (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec), strict=True)
    )
    products = batch * channels * features
    dilations = zip(eqn.params["lhs_dilation"], eqn.params["rhs_dilation"], strict=True)
    strides = zip(eqn.params["window_strides"], eqn.params["padding"], dilations, strict=True)
    for size, kernel, output, (stride, (low, _), (holes, dilation)) in zip(inputs, kernels, outputs, strides, strict=True):
        positions = np.arange(output)[:, None] * stride + np.arange(kernel) * dilation - low
        products *= int(np.sum((positions >= 0) & (positions < size * holes) & (positions % holes == 0)))
    return products


def _repetitions(eqn: JaxprEqn) -> int:
    """How often an equation evaluates its jaxpr, on all devices together."""
    if eqn.primitive is scan_p:
        return eqn.params["length"]
    if eqn.primitive.name == "shard_map":
        axes = next(v for k, v in eqn.params.items() if k.endswith("manual_axes"))  # JAX renamed it: newly_manual_axes
        return math.prod(eqn.params["mesh"].shape[a] for a in axes)
    return 1


def fragment_plans(jaxpr: Jaxpr, layout: Layout) -> list[FragmentPlan]:
    """Returns the fragments of a jaxpr in program order, nested ones after the enclosing fragment."""
    platform = layout.placements[0].devices[0].platform
    return _Counter(platform, layout).fragments(jaxpr)
