"""Evaluates code with calls of the host in it piece by piece: programs, and between them the functions, called directly.

So an exception or an interrupt in a function is the caller's own, and not an error of a program.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax._compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    call_body,
    jaxpr_as_fun,
    jaxprs_in,
    make_jaxpr_of,
)
from msrl_jax.fragments.graph.marker import is_fragment, is_host_call


def calls_host(jaxpr: Jaxpr) -> bool:
    """Whether code has a fragment that the host calls, at any depth."""
    return any(is_host_call(eqn) for inner in jaxprs_in(jaxpr) for eqn in inner.eqns)


def evaluate(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluates code; calls of the host in loops and branches stay parts of programs.

    Args:
      closed: the code.
      args: its arguments.

    Returns:
      Its results.
    """
    values: dict[Var, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values |= zip(closed.jaxpr.invars, args, strict=True)
    waiting: list[JaxprEqn] = []

    def read(atom: Atom) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    def run() -> None:
        made = dict.fromkeys(v for eqn in waiting for v in eqn.outvars)
        ins = dict.fromkeys(a for eqn in waiting for a in eqn.invars if isinstance(a, Var) and a not in made)
        if waiting:
            program = jax.jit(jaxpr_as_fun(make_jaxpr_of(waiting, list(ins), list(made), "initialize")))
            values.update(zip(made, program(*map(read, ins)), strict=True))
        waiting.clear()

    for eqn in closed.jaxpr.eqns:
        inner = eqn.params["call_jaxpr"] if is_fragment(eqn) else call_body(eqn)
        if is_host_call(eqn):
            run()
            results = map(jnp.asarray, eqn.params["host"](*map(read, eqn.invars)))
        elif inner is not None and calls_host(inner.jaxpr):
            run()
            results = iter(evaluate(inner, list(map(read, eqn.invars))))
        else:
            waiting.append(eqn)
            continue
        values.update(zip(eqn.outvars, results, strict=True))
    run()
    return list(map(read, closed.jaxpr.outvars))
