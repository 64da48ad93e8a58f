"""Finds where the first nan or infinity of an iteration comes from, by evaluating its equations one after another.

Every value carries the number of the computation that its nan or infinity comes from. A computation with a non-finite result
from finite operands gets a new number; other non-finite results inherit the smallest number of their operands. So the number
of a bad result leads to its first cause, and infinities that have no effect, such as those of a mask, are left aside. The
cause is then evaluated in smaller parts: a loop step by step, a fragment or a call equation by equation.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax._compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    aval,
    call_body,
    cond_p,
    drop_unused,
    is_dropped,
    jaxpr_as_fun,
    make_jaxpr_of,
    scan_p,
    scan_parts,
    source_line,
    sub_jaxprs,
)
from msrl_jax.fragments.graph.marker import is_fragment


@dataclass(frozen=True)
class Origin:
    """The first computation of an iteration with a non-finite result from finite operands.

    Attributes:
      fragment: name of the innermost fragment that holds it; None if it is outside of all fragments.
      role: the role of that fragment.
      number: counts the fragments of the same name in the iteration, from 0.
      within: names of the fragments around that fragment, from the outermost.
      path: pytree path of the fragment's non-finite result, such as `[1].reward`.
      index: the first non-finite element of that result.
      value: that element, "nan", "inf" or "-inf".
      others: paths of its other non-finite results.
      steps: step and length of every loop around the fragment and in it, from the outermost; steps count from 0.
      primitive: JAX's name of the operation.
      source: `FILE:LINE (function)` of the operation, outside of libraries; None if unknown.
      eager: whether the fragment's result is non-finite too if its operations run one by one, without compiling them together.
      operands: the operands of the fragment, all finite.
    """

    fragment: str | None
    role: str | None
    number: int
    within: tuple[str, ...]
    path: str
    index: tuple[int, ...]
    value: str
    others: tuple[str, ...]
    steps: tuple[tuple[int, int], ...]
    primitive: str
    source: str | None
    eager: bool
    operands: tuple[Any, ...] = field(repr=False)


class Tainted(NamedTuple):
    """A value, and the number of the computation that its nan or infinity comes from; None if it is finite."""

    value: Any
    origin: float | None


class _Event(NamedTuple):
    """A computation with a non-finite result from finite operands."""

    eqn: JaxprEqn
    operands: tuple[Any, ...]
    step: tuple[int, int] | None


Consts: TypeAlias = Sequence[Any]


def is_finite(x: Any) -> bool:
    """Whether a value holds neither nan nor infinities; integers, booleans and keys do not."""
    return not jnp.issubdtype(x.dtype, jnp.inexact) or bool(np.isfinite(np.asarray(x)).all())


def find_origin(eqns: Sequence[JaxprEqn], env: Mapping[Var, Any], results: Sequence[Atom]) -> Origin | int | None:
    """Evaluates an iteration, without effects, and finds where the non-finite elements of its results come from.

    `env` holds the values of variables that the equations do not make, on one device. If one of them is not finite and no
    equation is to blame, its number is returned; None if all results are finite.
    """
    given = {var: Tainted(value, None if is_finite(value) else _GIVEN + i) for i, (var, value) in enumerate(env.items())}
    walk = _Walk()
    tainted = walk.block(eqns, given, None)
    origin = _earliest(tainted.get(a) for a in results if isinstance(a, Var))
    if origin is None:
        return None
    if origin >= _GIVEN:
        return int(origin - _GIVEN)
    return _descend(walk, walk.events[int(origin)], eqns)


def evaluate_again(eqn: JaxprEqn, operands: Sequence[Any], all_eqns: Sequence[JaxprEqn]) -> Origin | None:
    """Evaluates a fragment again, operation by operation, on finite operands; the origin, or None if all is finite."""
    walk = _Walk()
    outs = walk.equation(eqn, [Tainted(x, None) for x in operands], None)
    return _descend(walk, walk.events[0], all_eqns) if _earliest(outs) is not None else None


def fragments_of(eqns: Sequence[JaxprEqn]) -> Iterator[JaxprEqn]:
    """All fragments in equations in order of appearance, nested ones included."""
    for eqn in eqns:
        if is_fragment(eqn):
            yield eqn
        for sub in sub_jaxprs(eqn):
            yield from fragments_of(sub.eqns)


def find_fragment(closed: ClosedJaxpr, name: str, number: int) -> tuple[JaxprEqn | None, Sequence[JaxprEqn]]:
    """The equation of the `number`-th fragment of a name, or None; and the equations of the iteration."""
    eqns = drop_unused(closed.jaxpr).eqns
    same = [eqn for eqn in fragments_of(eqns) if eqn.params["name"] == name]
    return (same[number] if number < len(same) else None), eqns


_GIVEN = float(2**52)
"""Numbers of values that were non-finite at the start: larger than those of computations, so that these take the blame."""


def _earliest(values: Any) -> float | None:
    return min((d.origin for d in values if d is not None and d.origin is not None), default=None)


class _Walk:
    """Evaluates equations, each as a whole, and notes the events."""

    def __init__(self) -> None:
        self.events: list[_Event] = []
        self._compiled: dict[int, tuple[JaxprEqn, Callable[..., Any]]] = {}

    def block(
        self, eqns: Sequence[JaxprEqn], env: Mapping[Var, Tainted], step: tuple[int, int] | None
    ) -> dict[Var, Tainted]:
        """Evaluates equations in order; returns the values of all variables."""
        env = dict(env)
        for eqn in eqns:
            outs = self.equation(eqn, [_read(env, a) for a in eqn.invars], step)
            env.update((v, d) for v, d in zip(eqn.outvars, outs, strict=True) if not is_dropped(v))
        return env

    def equation(self, eqn: JaxprEqn, ins: Sequence[Tainted], step: tuple[int, int] | None) -> list[Tainted]:
        """Evaluates one equation."""
        operands = tuple(d.value for d in ins)
        outs = self.function(eqn)(*operands)
        inherited = _earliest(ins)
        finite = [is_finite(x) for x in outs]
        if inherited is None and not all(finite):
            inherited = float(len(self.events))
            self.events.append(_Event(eqn, operands, step))
        return [Tainted(x, None if fine else inherited) for x, fine in zip(outs, finite, strict=True)]

    def function(self, eqn: JaxprEqn) -> Callable[..., Any]:
        """Evaluates an equation as a whole: compiled if it holds code, such as a fragment or a loop."""
        if id(eqn) not in self._compiled:
            outputs = [Var(v.aval) for v in eqn.outvars]
            free = [Var(a.aval) for a in eqn.invars]
            alone = make_jaxpr_of([eqn.replace(invars=[*free], outvars=outputs)], free, outputs, "equation")
            run = jaxpr_as_fun(alone)
            self._compiled[id(eqn)] = eqn, jax.jit(run) if any(True for _ in sub_jaxprs(eqn)) else run
        return self._compiled[id(eqn)][1]


def _read(env: Mapping[Var, Tainted], atom: Atom) -> Tainted:
    return Tainted(jnp.asarray(atom.val, aval(atom).dtype), None) if isinstance(atom, Literal) else env[atom]


def _bound(jaxpr: Jaxpr, consts: Consts, ins: Sequence[Tainted]) -> dict[Var, Tainted]:
    fixed = {v: Tainted(x, None if is_finite(x) else _GIVEN) for v, x in zip(jaxpr.constvars, consts, strict=True)}
    return fixed | dict(zip(jaxpr.invars, ins, strict=True))


def _parts(walk: _Walk, event: _Event) -> _Event | None:
    """The event inside of an event; None if the computation has no parts, or none of them is non-finite by itself."""
    eqn, ins = event.eqn, [Tainted(x, None) for x in event.operands]
    if eqn.primitive is scan_p:
        return _steps(walk, eqn, ins)
    body = eqn.params["call_jaxpr"] if is_fragment(eqn) else call_body(eqn)
    if eqn.primitive is cond_p:
        branches = eqn.params["branches"]
        body, ins = branches[int(np.clip(int(ins[0].value), 0, len(branches) - 1))], ins[1:]
    if body is None:
        return None
    start = len(walk.events)
    env = walk.block(body.jaxpr.eqns, _bound(body.jaxpr, body.consts, ins), None)
    origin = _earliest(env[a] for a in body.jaxpr.outvars if isinstance(a, Var))
    return walk.events[int(origin)] if origin is not None and start <= origin < _GIVEN else None


def _steps(walk: _Walk, eqn: JaxprEqn, ins: Sequence[Tainted]) -> _Event | None:
    """The event in the first step of a scan whose carry or row is not finite."""
    scan = scan_parts(eqn)
    jaxpr, split = scan.body.jaxpr, scan.num_consts + scan.num_carry
    consts, carry, xs = ins[: scan.num_consts], ins[scan.num_consts : split], ins[split:]
    for step in reversed(range(scan.length)) if scan.reverse else range(scan.length):
        rows = [Tainted(x.value[step], None) for x in xs]
        start = len(walk.events)
        env = walk.block(jaxpr.eqns, _bound(jaxpr, scan.body.consts, [*consts, *carry, *rows]), (step, scan.length))
        outs = [_read(env, a) for a in jaxpr.outvars]
        origin = _earliest(outs)
        if origin is not None:
            return walk.events[int(origin)] if start <= origin < _GIVEN else None
        carry = outs[: scan.num_carry]
    return None


def _descend(walk: _Walk, event: _Event, eqns: Sequence[JaxprEqn]) -> Origin:
    """Follows an event into its parts as far as it has any."""
    chain = [event]
    while (inner := _parts(walk, chain[-1])) is not None:
        chain.append(inner)
    marked = [i for i, e in enumerate(chain) if is_fragment(e.eqn)]
    steps = tuple(e.step for e in chain if e.step is not None)
    last = chain[-1]
    if not marked:
        operands, name, role, number = (), None, None, 0
        first = next(i for i, x in enumerate(walk.function(last.eqn)(*last.operands)) if not is_finite(x))
        path, index, value, others = "", *_element(walk, last.eqn, last.operands, first), ()
    else:
        eqn, operands = chain[marked[-1]][:2]
        name, role = eqn.params["name"], eqn.params["role"]
        same = [e for e in fragments_of(eqns) if e.params["name"] == name]
        number = next((i for i, e in enumerate(same) if e is eqn), 0)
        first, *rest = _bad_results(walk, eqn, operands)
        index, value = _element(walk, eqn, operands, first)
        paths = _result_paths(eqn)
        path, others = paths[first], tuple(paths[i] for i in rest)
    return Origin(
        fragment=name, role=role, number=number, within=tuple(chain[i].eqn.params["name"] for i in marked[:-1]), path=path,
        index=index, value=value, others=others, steps=steps, primitive=last.eqn.primitive.name,
        source=source_line(last.eqn), eager=not any(True for _ in sub_jaxprs(last.eqn)), operands=operands,
    )  # fmt: skip


def _result_paths(eqn: JaxprEqn) -> Sequence[str]:
    return eqn.params["call_jaxpr"].jaxpr.debug_info.result_paths or [f"[{i}]" for i in range(len(eqn.outvars))]


def _bad_results(walk: _Walk, eqn: JaxprEqn, operands: Sequence[Any]) -> list[int]:
    """Positions of a fragment's non-finite results: those with the shortest paths first, then in the order of computation."""
    jaxpr = eqn.params["call_jaxpr"].jaxpr
    made = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
    outs = walk.function(eqn)(*operands)
    paths = _result_paths(eqn)

    def order(i: int) -> tuple[float, float]:
        atom = jaxpr.outvars[i]
        return paths[i].count(".") + paths[i].count("["), made.get(atom, -1) if isinstance(atom, Var) else math.inf

    return sorted((i for i, x in enumerate(outs) if not is_finite(x)), key=order)


def _element(walk: _Walk, eqn: JaxprEqn, operands: Sequence[Any], position: int) -> tuple[tuple[int, ...], str]:
    x = np.asarray(walk.function(eqn)(*operands)[position])
    index = tuple(int(i) for i in np.argwhere(~np.isfinite(x))[0])
    element = complex(x[index])
    value = "nan" if np.isnan(element) else "inf" if element.real > 0 else "-inf"
    return index, value
