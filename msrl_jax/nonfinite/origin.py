"""Finds the origin of the first non-finite value of an iteration, by evaluating its equations one by one.

The search goes back from a non-finite result through non-finite operands to the computations that produced a non-finite value
from finite operands and constants; the first of them is the cause. Infinities without effect, such as those of a mask, are
therefore ignored. The cause is then evaluated in smaller parts: a loop step by step, a fragment or a call equation by equation.
"""

import itertools
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax._compat import (
    Atom,
    ClosedJaxpr,
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
    """The first computation of an iteration with a non-finite result from finite operands and constants."""

    fragment: str | None  # name of the innermost fragment that contains it; None if it is outside all fragments
    role: str | None  # the role of that fragment
    number: int  # index among the fragments with the same name in the iteration
    within: tuple[str, ...]  # names of the enclosing fragments, outermost first
    path: str  # pytree path of the fragment's non-finite result, such as `[1].reward`
    index: tuple[int, ...]  # the first non-finite element of that result
    value: str  # that element, "nan", "inf" or "-inf"
    others: tuple[str, ...]  # paths of its other non-finite results
    # step (from 0) and length of every loop around the fragment and in it, outermost first
    steps: tuple[tuple[int, int], ...]
    primitive: str  # JAX's name of the operation
    source: str | None  # `FILE:LINE (function)` of the operation, outside libraries; None if unknown
    eager: bool  # whether the fragment's result is also non-finite if its operations run one by one
    constant: str | None  # the non-finite constant among the operands of the operation, such as "nan"; None if there is none
    operands: tuple[jax.Array, ...] = field(repr=False)  # the operands of the fragment, all finite except constants


class _Cause(NamedTuple):
    """A computation with a non-finite result from finite operands and constants, and the step of the loop around it."""

    eqn: JaxprEqn
    operands: tuple[jax.Array, ...]
    step: tuple[int, int] | None


def is_finite(value: jax.Array) -> bool:
    """Whether a value has no non-finite elements; integers, booleans and keys never have any."""
    return not jnp.issubdtype(value.dtype, jnp.inexact) or bool(np.isfinite(np.asarray(value)).all())


def find_origin(
    eqns: Sequence[JaxprEqn],
    env: Mapping[Var, jax.Array],
    results: Sequence[Atom],
    constants: Mapping[Var, jax.Array] | None = None,
) -> Origin | int | None:
    """Evaluates the equations of an iteration, without effects, and finds the origin of non-finite elements of its results.

    `env` and `constants` have the values, on one device, of variables that are not computed by any equation. Returns the
    origin; or the index of a non-finite entry of `env`, if no equation is the cause; or None if all results are finite.
    """
    search = _Search()
    cause = search.cause(eqns, search.values(eqns, {**env, **(constants or {})}), results, None, env)
    return search.origin(cause, eqns) if isinstance(cause, _Cause) else None if cause is None else list(env).index(cause)


def evaluate_again(eqn: JaxprEqn, operands: Sequence[jax.Array], all_eqns: Sequence[JaxprEqn]) -> Origin | None:
    """Evaluates a fragment again, operation by operation; returns its first non-finite result, or None if all are finite."""
    search = _Search()
    if all(map(is_finite, search.function(eqn)(*operands))):
        return None
    return search.origin(_Cause(eqn, tuple(operands), None), all_eqns)


def find_fragment(closed: ClosedJaxpr, name: str, number: int) -> tuple[JaxprEqn | None, Sequence[JaxprEqn]]:
    """Returns the equation of a fragment in a traced iteration, given its name and index, or None; and all equations."""
    eqns = drop_unused(closed.jaxpr).eqns
    return next(itertools.islice(_fragments(eqns, name), number, None), None), eqns


def _fragments(eqns: Sequence[JaxprEqn], name: str | None) -> Iterator[JaxprEqn]:
    """Yields all fragments with a name, in order of appearance, including nested ones."""
    for eqn in eqns:
        if is_fragment(eqn) and eqn.params["name"] == name:
            yield eqn
        for sub in sub_jaxprs(eqn):
            yield from _fragments(sub.eqns, name)


def _value_of(env: Mapping[Var, jax.Array], atom: Atom) -> jax.Array:
    return jnp.asarray(atom.val, aval(atom).dtype) if isinstance(atom, Literal) else env[atom]


class _Search:
    """Evaluates equations, each as a whole, and searches for a cause in its parts."""

    def __init__(self) -> None:
        self._functions: dict[int, tuple[JaxprEqn, Callable[..., Sequence[jax.Array]]]] = {}

    def function(self, eqn: JaxprEqn) -> Callable[..., Sequence[jax.Array]]:
        """Returns an equation as a function, compiled if it contains code, such as a fragment or a loop."""
        if id(eqn) not in self._functions:
            outputs, free = [Var(v.aval) for v in eqn.outvars], [Var(a.aval) for a in eqn.invars]
            call = jaxpr_as_fun(make_jaxpr_of([eqn.replace(invars=[*free], outvars=outputs)], free, outputs, "equation"))
            self._functions[id(eqn)] = eqn, jax.jit(call) if any(True for _ in sub_jaxprs(eqn)) else call
        return self._functions[id(eqn)][1]

    def values(self, eqns: Sequence[JaxprEqn], env: Mapping[Var, jax.Array]) -> dict[Var, jax.Array]:
        env = dict(env)
        for eqn in eqns:
            outs = self.function(eqn)(*(_value_of(env, a) for a in eqn.invars))
            env.update((v, x) for v, x in zip(eqn.outvars, outs, strict=True) if not is_dropped(v))
        return env

    def cause(
        self,
        eqns: Sequence[JaxprEqn],
        env: Mapping[Var, jax.Array],
        results: Sequence[Atom],
        step: tuple[int, int] | None,
        inputs: Container[Var] = (),
    ) -> _Cause | Var | None:
        """Returns the first cause of non-finite results; or a non-finite variable of `inputs`; or None.

        A non-finite variable that is neither computed by an equation nor in `inputs` is a constant.
        """
        producers = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
        pending, visited = [a for a in results if isinstance(a, Var)], set[Var]()
        causes, bad_inputs = set[int](), list[Var]()
        while pending:
            var = pending.pop()
            if var in visited or is_finite(env[var]):
                continue
            visited.add(var)
            if var not in producers:
                bad_inputs += [var] if var in inputs else []
                continue
            operands = [a for a in eqns[producers[var]].invars if isinstance(a, Var) and (a in producers or a in inputs)]
            bad_operands = [a for a in operands if not is_finite(env[a])]
            pending += bad_operands
            if not bad_operands:
                causes.add(producers[var])
        if not causes:
            return next(iter(bad_inputs), None)
        eqn = eqns[min(causes)]
        return _Cause(eqn, tuple(_value_of(env, a) for a in eqn.invars), step)

    def part(self, cause: _Cause) -> tuple[_Cause | None, bool]:
        """Returns the cause inside a cause, if any, and whether the result is non-finite if the parts run one by one."""
        eqn, ins = cause.eqn, cause.operands
        if eqn.primitive is scan_p:
            return self._cause_in_scan(eqn, ins)
        body = eqn.params["call_jaxpr"] if is_fragment(eqn) else call_body(eqn)
        if eqn.primitive is cond_p:
            branches = eqn.params["branches"]
            body, ins = branches[int(np.clip(int(ins[0]), 0, len(branches) - 1))], ins[1:]
        if body is None:
            return None, True
        inner_cause, outs = self._cause_in_body(body, ins, None)
        return inner_cause, not all(map(is_finite, outs))

    def _cause_in_body(
        self, body: ClosedJaxpr, ins: Sequence[jax.Array], step: tuple[int, int] | None
    ) -> tuple[_Cause | None, list[jax.Array]]:
        """Returns the cause in the body of a computation, if any, and the body's results."""
        jaxpr = body.jaxpr
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*body.consts, *ins], strict=True))
        env = self.values(jaxpr.eqns, env)
        cause = self.cause(jaxpr.eqns, env, jaxpr.outvars, step)
        return cause if isinstance(cause, _Cause) else None, [_value_of(env, a) for a in jaxpr.outvars]

    def _cause_in_scan(self, eqn: JaxprEqn, ins: Sequence[jax.Array]) -> tuple[_Cause | None, bool]:
        """Returns the cause in the first scan step with a non-finite carry or output, as returned by `part`."""
        scan = scan_parts(eqn)
        carry_end = scan.num_consts + scan.num_carry
        consts, carry, xs = ins[: scan.num_consts], ins[scan.num_consts : carry_end], ins[carry_end:]
        is_bad = False
        for step in reversed(range(scan.length)) if scan.reverse else range(scan.length):
            rows = [x[step] for x in xs]
            cause, outs = self._cause_in_body(scan.body, [*consts, *carry, *rows], (step, scan.length))
            if cause is not None:
                return cause, True
            is_bad |= not all(map(is_finite, outs))
            carry = outs[: scan.num_carry]
        return None, is_bad

    def origin(self, cause: _Cause, eqns: Sequence[JaxprEqn]) -> Origin:
        """Follows a cause into its parts as far as possible."""
        chain, inner, is_bad = [cause], *self.part(cause)
        while inner is not None:
            chain.append(inner)
            inner, is_bad = self.part(inner)
        marked, innermost = [i for i, e in enumerate(chain) if is_fragment(e.eqn)], chain[-1]
        eqn, operands = chain[marked[-1]][:2] if marked else innermost[:2]
        outs = self.function(eqn)(*operands)
        paths, order = _result_paths(eqn) if marked else ([""] * len(outs), None)
        first_result, *other_results = sorted((i for i, x in enumerate(outs) if not is_finite(x)), key=order)
        bad = np.asarray(outs[first_result])
        index = tuple(int(i) for i in np.argwhere(~np.isfinite(bad))[0])
        element = complex(bad[index])
        name = eqn.params["name"] if marked else None
        lines = (source_line(e.eqn) for e in reversed(chain[marked[-1] + 1 if marked else 0 :]))  # JAX-internal parts have none
        return Origin(
            fragment=name,
            role=eqn.params["role"] if marked else None,
            path=paths[first_result],
            index=index,
            number=next((i for i, e in enumerate(_fragments(eqns, name)) if e is eqn), 0),
            within=tuple(chain[i].eqn.params["name"] for i in marked[:-1]),
            value="nan" if np.isnan(element) else "inf" if element.real > 0 else "-inf",
            others=tuple(paths[i] for i in other_results) if marked else (),
            steps=tuple(e.step for e in chain if e.step is not None),
            primitive=innermost.eqn.primitive.name,
            source=next(filter(None, lines), None),
            eager=is_bad,
            constant=_describe_constant(innermost),
            operands=operands if marked else (),
        )


def _describe_constant(cause: _Cause) -> str | None:
    """Returns the first non-finite operand or constant of a computation; None if all are finite."""
    inner = [a.val for jaxpr in sub_jaxprs(cause.eqn) for a in jaxpr.outvars if isinstance(a, Literal)]
    for value in map(np.asarray, (value for value in (*cause.operands, *inner) if not is_finite(jnp.asarray(value)))):
        bad = str(value[~np.isfinite(value)].flat[0])
        return f"{value.dtype}{list(value.shape)} with {bad}" if value.ndim else bad
    return None


def _result_paths(eqn: JaxprEqn) -> tuple[Sequence[str], Callable[[int], tuple[float, float]]]:
    """Returns the paths of a fragment's results, and their order: shortest path first, then order of computation."""
    jaxpr = eqn.params["call_jaxpr"].jaxpr
    paths = jaxpr.debug_info.result_paths or [f"[{i}]" for i in range(len(eqn.outvars))]
    producers = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}

    def order(i: int) -> tuple[float, float]:
        atom = jaxpr.outvars[i]
        return paths[i].count(".") + paths[i].count("["), producers.get(atom, -1) if isinstance(atom, Var) else math.inf

    return paths, order
