"""How much a piece of a training loop computes, counted on its jaxpr (XLA's analysis counts a loop's body once)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from msrl_jax._compat import Jaxpr, JaxprEqn, aval, cond_p, scan_p, sub_jaxprs
from msrl_jax.fragments.marker import is_fragment

# Primitives that move data or compute on integers only; everything else counts one operation for each result.
_FREE = frozenset(
    (
        *("broadcast_in_dim", "reshape", "squeeze", "slice", "dynamic_slice", "dynamic_update_slice", "gather"),
        *("concatenate", "transpose", "rev", "pad", "copy", "iota", "convert_element_type", "bitcast_convert_type"),
        *("select_n", "stop_gradient", "split", "expand_dims", "empty2", "sort", "device_put", "sharding_constraint"),
        *("random_bits", "random_seed", "random_split", "random_wrap", "random_unwrap", "random_fold_in", "threefry2x32"),
        *("shift_left", "shift_right_logical", "xor", "or", "and", "not", "eq", "ne", "lt", "gt", "le", "ge"),
        "optimization_barrier",
    )
)
_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin", "cumsum", "cumprod", "cummax")


def flops(jaxpr: Jaxpr) -> int:
    """Floating-point operations of a jaxpr: 2 for each multiply-add of a product, 1 for each element of anything else.

    Args:
      jaxpr: the jaxpr; loops count as often as they run, a `while` once, a `cond` as its dearest branch.

    Returns:
      The number.
    """
    return sum(_eqn_flops(e) for e in jaxpr.eqns)


def _eqn_flops(eqn: JaxprEqn) -> int:
    name = eqn.primitive.name
    inner = [flops(sub) for sub in sub_jaxprs(eqn)]
    if eqn.primitive is scan_p:
        return eqn.params["length"] * sum(inner)
    if eqn.primitive is cond_p:
        return max(inner)
    if name in _REDUCTIONS:
        return math.prod(aval(eqn.invars[0]).shape)
    if inner:
        return sum(inner)
    if name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        lhs = aval(eqn.invars[0]).shape
        return 2 * math.prod(aval(eqn.outvars[0]).shape) * math.prod(lhs[d] for d in contract)
    if name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        kernel = aval(eqn.invars[1]).shape
        per_result = math.prod(kernel) // kernel[numbers.rhs_spec[0]]
        return 2 * math.prod(aval(eqn.outvars[0]).shape) * per_result
    if name in _FREE:
        return 0
    return sum(math.prod(aval(v).shape) for v in eqn.outvars)


@dataclass(frozen=True)
class FragmentCost:
    """A fragment as it stands in a training iteration.

    Attributes:
      name: its name.
      role: its role.
      depth: how many fragments it is nested in.
      flops: operations of one call.
      calls: calls per iteration.
    """

    name: str
    role: str
    depth: int
    flops: int
    calls: int


def fragment_costs(jaxpr: Jaxpr, times: int = 1, depth: int = 0) -> Iterator[FragmentCost]:
    """The fragments of a jaxpr in program order, nested ones behind the fragment that holds them.

    Args:
      jaxpr: the jaxpr.
      times: how often an iteration evaluates it.
      depth: how many fragments surround it.

    Yields:
      One cost for each place where a fragment is called.
    """
    for eqn in jaxpr.eqns:
        marked = is_fragment(eqn)
        if marked:
            body = eqn.params["call_jaxpr"].jaxpr
            yield FragmentCost(eqn.params["name"], eqn.params["role"], depth, flops(body), times)
        repeat = eqn.params["length"] if eqn.primitive is scan_p else 1
        for sub in sub_jaxprs(eqn):
            yield from fragment_costs(sub, times * repeat, depth + marked)
