"""The cost of programs: the operations of a jaxpr (XLA counts the body of a loop once), and the collectives in XLA's text."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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
    """The floating-point operations of a jaxpr: 2 per multiply-add of a product, 1 per element of other results.

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
            self._flops[id(jaxpr)] = sum(map(self.of, jaxpr.eqns))
        return self._flops[id(jaxpr)]

    def of(self, eqn: JaxprEqn) -> int:
        if (alone := _eqn_flops(eqn)) is not None:
            return alone
        if inner := [self.flops(sub) for sub in sub_jaxprs(eqn)]:
            if (platforms := eqn.params.get("branches_platforms")) is not None:  # the last branch is the default
                return next((n for n, names in zip(inner, platforms, strict=True) if self._names & {*(names or ())}), inner[-1])
            return max(inner) if eqn.primitive is cond_p else _repeats(eqn) * sum(inner)
        return 0 if eqn.primitive.name in _FREE else sum(map(_floats, eqn.outvars))

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
                yield replace(inner, depth=inner.depth + marked, calls=inner.calls * _repeats(eqn))


def _eqn_flops(eqn: JaxprEqn) -> int | None:
    """The operations of an equation whose count follows from its primitive; None for others."""
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
        at = np.arange(output)[:, None] * stride + np.arange(kernel) * dilation - low
        products *= int(np.sum((at >= 0) & (at < size * holes) & (at % holes == 0)))
    return products


def _repeats(eqn: JaxprEqn) -> int:
    """How often an equation evaluates its jaxpr, on all devices together."""
    if eqn.primitive is scan_p:
        return eqn.params["length"]
    if eqn.primitive.name == "shard_map":
        axes = next(v for k, v in eqn.params.items() if k.endswith("manual_axes"))  # JAX renamed it: newly_manual_axes
        return math.prod(eqn.params["mesh"].shape[a] for a in axes)
    return 1


def fragment_plans(jaxpr: Jaxpr, layout: Layout) -> list[FragmentPlan]:
    """The fragments of a jaxpr in program order, nested ones after the enclosing fragment."""
    platform = layout.placements[0].devices[0].platform
    return _Counter(platform, layout).fragments(jaxpr)


COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(COLLECTIVES)})(-start)?\(")
_MENTION = re.compile(rf"(?<![\w\-])(?:{'|'.join(COLLECTIVES)})(?:-start)?\(")
WHILE = re.compile(r" while\(.*?condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_CALL = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_SHAPE = re.compile(r"(pred|[a-z]+\d+\w*)\[([\d,<=]*)\]")
_BRACKETS = re.compile(r"[()\[\]{},]")
_QUOTED = re.compile(r'"[^"]*"')
OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program."""

    kind: str  # such as "all-reduce"
    nbytes: int  # bytes of its result on each device
    times: int  # executions per run. A loop of unknown length counts once; a conditional counts all branches
    source: str  # JAX's name for the operation that caused it


class Found(NamedTuple):
    """The collectives of a program."""

    collectives: list[Collective]
    lengths_known: bool  # whether all loops around them have a known length
    understood: bool  # whether the list is complete; if not, parts of the text could not be parsed


def computations(text: str) -> tuple[str, dict[str, list[str]]]:
    """The name of a program's entry, and the lines of all its computations by name."""
    bodies: dict[str, list[str]] = {}
    entry, current = "", ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = match[2]
            bodies[current] = []
            entry = current if match[1] else entry
        elif current:
            bodies[current].append(line)
    return entry, bodies


def called(line: str) -> list[str]:
    """The names of the computations that an instruction calls once, or of the branches that it chooses from."""
    branches = _BRANCHES.search(line)
    return [b.strip().lstrip("%") for b in branches[1].split(",")] if branches else _CALL.findall(line)


def collectives(text: str) -> Found:
    """Finds the collectives of a compiled program in its optimized HLO (`compiled.as_text()`)."""
    entry, bodies = computations(text)
    known, read = True, set[str]()

    def visit(name: str, times: int, sure: bool) -> Iterator[Collective]:
        nonlocal known
        for line in bodies.get(name, ()):
            if match := _COLLECTIVE.search(line):
                op = OP_NAME.search(line)
                known &= sure
                read.add(line)
                shape = _result(match[1]) if match[3] and match[2] != "all-reduce" else match[1]
                yield Collective(match[2], nbytes_of(shape), times, op[1] if op else "")
            if match := WHILE.search(line):
                trips = trip_count(line, bodies[name], bodies.get(match[1], ()), bodies.get(match[2], ()))
                length, sure_inside = 1 if trips is None else trips, sure and trips is not None
                yield from visit(match[1], times * (1 if trips is None else length + 1), sure_inside)
                yield from visit(match[2], times * length, sure_inside)
                continue
            if " async-update(" in line or " async-done(" in line:
                continue  # repeats the computation that async-start calls
            for inner in called(line):
                yield from visit(inner, times, sure)

    found = list(visit(entry, 1, True))
    mentioned = {line for line in text.splitlines() if _MENTION.search(_QUOTED.sub("", line))}
    return Found(found, known, bool(bodies.get(entry)) and mentioned <= read)


def _result(shape: str) -> str:
    """The result's shape in an asynchronous start, which is a tuple of operands, results and possibly contexts."""
    if not shape.startswith("("):
        return shape
    depth, commas = 0, []
    for bracket in _BRACKETS.finditer(shape):
        if bracket[0] == ",":
            commas += [bracket.start()] if depth == 1 else []
        else:
            depth += 1 if bracket[0] in "([{" else -1
    return shape[commas[0] : commas[1] if len(commas) > 1 else None]


def nbytes_of(shape: str) -> int:
    """The bytes of a shape in XLA's syntax, such as `f32[8,2]{1,0}`, or of all shapes of a tuple."""
    return sum(math.prod(map(int, re.findall(r"\d+", dims))) * _width(dtype) for dtype, dims in _SHAPE.findall(shape))


def _width(dtype: str) -> int:
    if dtype == "pred":
        return 1
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 0


_KNOWN = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"(\d+)"')
DEFINITION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")  # root, name, shape, kind, rest
_OPERAND = re.compile(r"%([\w.\-]+)")
_COPIES = ("copy", "copy-start", "copy-done", "bitcast")


def trip_count(loop: str, around: Sequence[str], condition: Sequence[str], body: Sequence[str]) -> int | None:
    """The number of iterations of a loop: XLA's, or that of a counter from 0 to a bound in steps of 1; None if unknown.

    `loop` is the line of the `while`; the others are the lines of the surrounding computation, the condition and the body.
    """
    if known := _KNOWN.search(loop):
        return int(known[1])
    before, test, step = map(_Computation, (around, condition, body))
    counts, start = re.fullmatch(r"entry (\d+) < (\d+)", test.text(test.root)), DEFINITION.match(loop)
    if not counts or not start:
        return None
    number = int(counts[1])
    from_zero = before.text(operands_of(start[5])[0], number) == "0"
    return int(counts[2]) if from_zero and step.text(step.root, number) == f"entry {number} + 1" else None


def operands_of(rest: str) -> list[str]:
    """The names of an instruction's operands, in the text after its opening parenthesis."""
    return _OPERAND.findall(rest.split(")", 1)[0])


class _Computation:
    """The instructions of a computation by name, each a kind and the text of its operands and attributes."""

    def __init__(self, lines: Sequence[str]):
        found = [match for line in lines if (match := DEFINITION.match(line))]
        self._made = {match[2]: (match[4], match[5]) for match in found}
        self.root = next((match[2] for match in found if match[1]), "")

    def text(self, name: str, number: int | None = None) -> str:
        """A value, or an entry of a tuple, in terms of the parameter's entries: `entry 1 + 1`; other text if impossible."""
        kind, rest = self._made.get(name, ("", ""))
        operands = operands_of(rest)
        if kind in _COPIES:
            return self.text(operands[0], number)
        if kind == "tuple" and number is not None:
            return self.text(operands[number]) if number < len(operands) else ""
        if kind == "constant":
            return rest.split(")", 1)[0]
        if kind == "get-tuple-element" and self.text(operands[0]) == "parameter":
            return f"entry {rest.rpartition('index=')[2].partition(',')[0]}"
        if kind == "add" or (kind == "compare" and "direction=LT" in rest):
            return {"add": " + ", "compare": " < "}[kind].join(map(self.text, operands))
        return kind
