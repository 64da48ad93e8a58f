"""Counts the operations of a jaxpr (XLA's analysis counts the body of a loop only once)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from msrl_jax._compat import Atom, Jaxpr, JaxprEqn, aval, cond_p, scan_p, sub_jaxprs
from msrl_jax.fragments.graph.marker import is_fragment

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


@dataclass(frozen=True)
class FragmentCost:
    """The cost of a fragment in a training iteration."""

    name: str
    role: str
    depth: int  # how many fragments it is nested in
    flops: int  # operations of one call
    calls: int  # calls per iteration; inside a `shard_map`, on all of its devices together


def flops(jaxpr: Jaxpr) -> int:
    """Floating-point operations of a jaxpr: 2 for each multiply-add of a product, 1 for each element of anything else.

    A loop counts as often as it runs (a `while` once), a `cond` as its most expensive branch, a `shard_map` on all devices.
    """
    return _Counter().flops(jaxpr)


class _Counter:
    """Visits a jaxpr once, however often it is called."""

    def __init__(self):
        self._flops: dict[int, int] = {}
        self._costs: dict[int, list[FragmentCost]] = {}

    def flops(self, jaxpr: Jaxpr) -> int:
        if id(jaxpr) not in self._flops:
            self._flops[id(jaxpr)] = sum(map(self.of, jaxpr.eqns))
        return self._flops[id(jaxpr)]

    def of(self, eqn: JaxprEqn) -> int:
        if (alone := _eqn_flops(eqn)) is not None:
            return alone
        if inner := [self.flops(sub) for sub in sub_jaxprs(eqn)]:
            return max(inner) if eqn.primitive is cond_p else _repeats(eqn) * sum(inner)
        return 0 if eqn.primitive.name in _FREE else sum(map(_floats, eqn.outvars))

    def costs(self, jaxpr: Jaxpr) -> list[FragmentCost]:
        if id(jaxpr) not in self._costs:
            self._costs[id(jaxpr)] = [cost for eqn in jaxpr.eqns for cost in self.fragments(eqn)]
        return self._costs[id(jaxpr)]

    def fragments(self, eqn: JaxprEqn) -> Iterator[FragmentCost]:
        marked = is_fragment(eqn)
        if marked:
            yield FragmentCost(eqn.params["name"], eqn.params["role"], 0, self.flops(eqn.params["call_jaxpr"].jaxpr), 1)
        for sub in sub_jaxprs(eqn):
            for cost in self.costs(sub):
                yield replace(cost, depth=cost.depth + marked, calls=cost.calls * _repeats(eqn))


def _eqn_flops(eqn: JaxprEqn) -> int | None:
    """Operations of an equation that counts by its name; None for others."""
    name = eqn.primitive.name
    if name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        lhs = aval(eqn.invars[0]).shape
        return 2 * math.prod(aval(eqn.outvars[0]).shape) * math.prod(lhs[d] for d in contract)
    if name == "conv_general_dilated":
        return 2 * _conv_products(eqn)
    if name.startswith("scatter") and name not in _FREE:
        return _floats(eqn.invars[2])
    if name.startswith("reduce_window"):
        return _floats(eqn.outvars[0]) * math.prod(eqn.params["window_dimensions"])
    if name in _REDUCTIONS:
        return _floats(eqn.invars[0])
    return None


def _floats(atom: Atom) -> int:
    return math.prod(aval(atom).shape) if jnp.issubdtype(aval(atom).dtype, jnp.inexact) else 0


def _conv_products(eqn: JaxprEqn) -> int:
    """Multiply-adds of a convolution, without those that meet padding or the holes of a dilated input."""
    numbers = eqn.params["dimension_numbers"]
    (_, _, *inputs), (_, features, *kernels), (batch, channels, *outputs) = (
        [aval(v).shape[d] for d in spec]
        for v, spec in zip((*eqn.invars, *eqn.outvars), (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec), strict=True)
    )
    products = batch * channels * features
    dilations = zip(eqn.params["lhs_dilation"], eqn.params["rhs_dilation"], strict=True)
    strides = zip(eqn.params["window_strides"], eqn.params["padding"], dilations, strict=True)
    for size, kernel, output, (stride, (low, _), (holes, dilation)) in zip(inputs, kernels, outputs, strides, strict=True):
        at = np.arange(output)[:, None] * stride + np.arange(kernel) * dilation - low
        products *= int(np.sum((at >= 0) & (at < size * holes) & (at % holes == 0)))
    return products


def _repeats(eqn: JaxprEqn) -> int:
    """How often an equation evaluates the jaxpr that it holds, on all devices together."""
    if eqn.primitive is scan_p:
        return eqn.params["length"]
    if eqn.primitive.name == "shard_map":
        axes = next(v for k, v in eqn.params.items() if k.endswith("manual_axes"))  # JAX renamed it: newly_manual_axes
        return math.prod(eqn.params["mesh"].shape[a] for a in axes)
    return 1


def fragment_costs(jaxpr: Jaxpr) -> list[FragmentCost]:
    """The costs of the fragments of a jaxpr in program order, nested ones after the fragment that holds them."""
    return _Counter().costs(jaxpr)
