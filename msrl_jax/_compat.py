"""The only module that imports JAX's unstable interfaces, `jax.extend` and `jax.interpreters`."""

import operator
import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.core import ShapedArray as ShapedArray
from jax.core import Tracer as Tracer
from jax.extend import core
from jax.extend.core import primitives
from jax.extend.random import threefry2x32_p as threefry2x32_p
from jax.interpreters import ad as ad
from jax.interpreters import batching as batching
from jax.interpreters import mlir as mlir
from jax.interpreters import partial_eval as pe
from jax.ref import AbstractRef as AbstractRef

JAXLIB = tuple(map(int, re.findall(r"\d+", version("jaxlib"))[:3]))  # without what comes after the patch, as in 0.12.0rc1

ClosedJaxpr = core.ClosedJaxpr
DebugInfo = core.DebugInfo
Jaxpr = core.Jaxpr
JaxprEqn = core.JaxprEqn
Literal = core.Literal
Primitive = core.Primitive
Var = core.Var
jaxpr_as_fun = core.jaxpr_as_fun
cond_p, jit_p, scan_p, while_p = primitives.cond_p, primitives.jit_p, primitives.scan_p, primitives.while_p

Atom = Var | Literal

PyTreeDef: TypeAlias = Any  # type checkers do not accept `jax.tree_util.PyTreeDef`, a variable, as a type

# Calls that only evaluate their bodies, so the bodies may be inlined. (The derivative rules of a custom_jvp or custom_vjp
# call, and the schedule of a remat, matter only under differentiation, which is done once a loop is traced.)
_CALLS = {
    jit_p: "jaxpr",
    primitives.closed_call_p: "call_jaxpr",
    primitives.custom_jvp_call_p: "call_jaxpr",
    primitives.custom_vjp_call_p: "call_jaxpr",
    primitives.remat_p: "jaxpr",
}

# Files whose lines say nothing about a computation: JAX's own, the libraries on it, and the marker of fragments.
_PACKAGES = os.path.dirname(os.path.dirname(jax.__file__))
_LIBRARIES = (
    *(os.path.join(_PACKAGES, name) + os.sep for name in ("jax", "flax", "optax")),
    os.path.join(os.path.dirname(__file__), "fragments") + os.sep,
    __file__,
    "<",
)

_LABELS = frozenset(("name", "debug_info", "jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees"))


def call_body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Returns the body of a call equation that may be inlined, or None if `eqn` is not such a call."""
    name = _CALLS.get(eqn.primitive)
    return None if name is None else _closed(eqn.params[name])


def call_labels(eqn: JaxprEqn) -> frozenset[str]:
    """Parameters of a call equation that do not affect its results: names and derivative rules."""
    return _LABELS if eqn.primitive in _CALLS else frozenset()


def lowering_rule(fn: Callable[..., Sequence[jax.Array]]) -> Callable[..., Any]:
    """Returns a rule that compiles a primitive as the operations of a function of arrays, which returns several."""
    return mlir.lower_fun(fn, multiple_results=True)


def lower_as(traced: jax.stages.Traced, rules: tuple[tuple[Primitive, Callable[..., Any]], ...]) -> jax.stages.Lowered:
    """Lowers a traced function, its primitives as the rules say; no other program is affected."""
    return traced.lower(_private_parameters=mlir.LoweringParameters(override_lowering_rules=rules))  # type: ignore[arg-type]


def context(eqn: JaxprEqn) -> Hashable:
    """Returns the JAX settings under which an equation was traced, such as the mesh."""
    return eqn.ctx


def is_conversion(eqn: JaxprEqn) -> bool:
    """Whether an equation converts a value to a dtype, possibly its own."""
    return eqn.primitive is primitives.convert_element_type_p


def _closed(body: ClosedJaxpr | Jaxpr) -> ClosedJaxpr:
    return body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())


class Scan(NamedTuple):
    """The parts of a scan equation. Its inputs are the constants, then the carry, then the xs."""

    body: ClosedJaxpr
    num_consts: int
    num_carry: int
    length: int
    reverse: bool  # whether it runs from the last x to the first


def scan_parts(eqn: JaxprEqn) -> Scan:
    """Returns the parts of a scan equation, which JAX 0.11 spells differently from 0.10."""
    p = eqn.params
    if "num_consts" in p:
        num_consts, num_carry = p["num_consts"], p["num_carry"]
    else:
        num_consts, num_carry, _ = map(len, p["ft_in"].unpack())
    return Scan(_closed(p["jaxpr"]), num_consts, num_carry, p["length"], p["reverse"])


def source_line(eqn: JaxprEqn) -> str | None:
    """Returns the line of Python that made an equation, outside of JAX and its libraries: `FILE:LINE (function)`."""
    # JAX has no public name for an equation's traceback; without one the line is unknown.
    traceback = getattr(getattr(eqn, "source_info", None), "traceback", None)
    for frame in getattr(traceback, "frames", ()):
        if not frame.file_name.startswith(_LIBRARIES):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return None


def aval(atom: Atom) -> ShapedArray:
    """Shape and dtype of a variable or literal."""
    array_aval = atom.aval
    assert isinstance(array_aval, ShapedArray), array_aval
    return array_aval


def sub_jaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Yields the jaxprs that an equation holds (loop bodies, branches, call bodies)."""
    for sub in core.jaxprs_in_params(eqn.params):
        yield sub.jaxpr if isinstance(sub, ClosedJaxpr) else sub


def replace_jaxprs(eqn: JaxprEqn, rewrite: Callable[[Jaxpr], Jaxpr]) -> JaxprEqn:
    """Returns an equation with each jaxpr replaced by `rewrite(jaxpr)`; returns `eqn` itself if none changes."""

    def replaced(param: Any) -> Any:
        if isinstance(param, ClosedJaxpr):
            new = rewrite(param.jaxpr)
            return param if new is param.jaxpr else ClosedJaxpr(new, param.consts)
        if isinstance(param, Jaxpr):
            return rewrite(param)
        if isinstance(param, tuple) and any(isinstance(p, ClosedJaxpr | Jaxpr) for p in param):
            new = tuple(map(replaced, param))
            return param if all(a is b for a, b in zip(new, param, strict=True)) else new
        return param

    params = {k: replaced(v) for k, v in eqn.params.items()}
    if all(v is eqn.params[k] for k, v in params.items()):
        return eqn
    new = eqn.replace(params=params)
    return new.replace(effects=eqn.effects - (_effects(sub_jaxprs(eqn)) - _effects(sub_jaxprs(new))))


def rewrite_equations(
    closed: ClosedJaxpr, rule: Callable[[JaxprEqn, Callable[[Jaxpr], Jaxpr]], Iterable[JaxprEqn]]
) -> ClosedJaxpr:
    """Returns a program with other equations, without the effects that only former ones had; `closed` itself if none changes.

    `rule(eqn, rewrite)` returns the equations that replace `eqn`. It calls `rewrite` on the jaxprs that `eqn` holds.
    """
    rewritten_jaxprs: dict[int, Jaxpr] = {}

    def rewrite(jaxpr: Jaxpr) -> Jaxpr:
        if id(jaxpr) not in rewritten_jaxprs:
            eqns = [new for eqn in jaxpr.eqns for new in rule(eqn, rewrite)]
            same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
            effects = jaxpr.effects - (_effects(jaxpr.eqns) - _effects(eqns))
            rewritten_jaxprs[id(jaxpr)] = jaxpr if same else jaxpr.replace(eqns=eqns, effects=effects)
        return rewritten_jaxprs[id(jaxpr)]

    new = rewrite(closed.jaxpr)
    return closed if new is closed.jaxpr else ClosedJaxpr(new, closed.consts)


def _effects(parts: Iterable[Jaxpr | JaxprEqn]) -> frozenset[Any]:
    return frozenset().union(*(part.effects for part in parts))


def inline_function(eqn: JaxprEqn, fn: Callable[..., Any]) -> list[JaxprEqn]:
    """Returns the equations of a function of an equation's operands, to replace it; they keep its source location."""
    closed = jax.make_jaxpr(fn)(*[jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in map(aval, eqn.invars)])
    assert not closed.consts, "the function captures arrays"
    atoms: dict[Atom, Atom] = {**dict(zip(closed.jaxpr.invars, eqn.invars, strict=True))}
    results: dict[Atom, Var] = dict(zip(closed.jaxpr.outvars, eqn.outvars, strict=True))
    replacements = []
    for e in closed.jaxpr.eqns:
        ins = [a if isinstance(a, Literal) else atoms.get(a) or results.get(a, a) for a in e.invars]
        outs = [results.get(v, v) for v in e.outvars]
        replacements.append(e.replace(invars=ins, outvars=outs, source_info=eqn.source_info, ctx=eqn.ctx))
    return replacements


def equations_in(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yields the equations of a jaxpr and of all that it holds at any depth, once for functions under `jax.jit` called
    twice.
    """
    visited: set[int] = set()
    stack = [jaxpr]
    while stack:
        current = stack.pop()
        if id(current) not in visited:
            visited.add(id(current))
            yield from current.eqns
            stack += reversed([sub for eqn in current.eqns for sub in sub_jaxprs(eqn)])


def new_var(var: Var) -> Var:
    """Returns a new variable of the same type."""
    return Var(var.aval)


def is_dropped(var: Var) -> bool:
    """Whether `var` is the placeholder `_`, to which JAX binds unused results."""
    return type(var) is not Var


def is_reference(var: Var) -> bool:
    """Whether `var` is a mutable reference, not an array."""
    return not isinstance(var.aval, ShapedArray)


def is_tracing() -> bool:
    """Whether a function is being transformed now, as by `jax.jit`, `vmap` or `grad`."""
    return type(core.find_top_trace(())).__name__ != "EvalTrace"


def is_traced_here(x: object) -> bool:
    """Whether the innermost active transformation gives `x` a batch axis or a tangent."""
    # JAX has no public name for a tracer's trace. Without it every value would count as batched or differentiated.
    return isinstance(x, Tracer) and x._trace is core.find_top_trace((x,))


def make_jaxpr_of(eqns: Sequence[JaxprEqn], inputs: Sequence[Var], outputs: Sequence[Atom], name: str) -> ClosedJaxpr:
    """Returns a closed jaxpr of `eqns` that maps `inputs` to `outputs`."""
    effects = frozenset().union(*[e.effects for e in eqns]) if eqns else frozenset()
    info = DebugInfo("msrl_jax", name, ("",) * len(inputs), ("",) * len(outputs))
    return ClosedJaxpr(Jaxpr((), list(inputs), list(outputs), list(eqns), effects, debug_info=info), ())


def drop_unused(jaxpr: Jaxpr) -> Jaxpr:
    """`jaxpr` without the equations that no output needs; its inputs and outputs stay as they are."""
    return pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def set_dead_code_rule(primitive: Primitive, keeps_all: Callable[[JaxprEqn], bool]) -> None:
    """Drops unused equations, results and inputs of a primitive's `call_jaxpr`, unless `keeps_all(eqn)`."""

    def rule(used_outputs: list[bool], *live_and_eqn: Any) -> tuple[list[bool], JaxprEqn | None]:
        eqn = live_and_eqn[-1]  # before it, from JAX 0.12 on, comes which inputs live on after the jaxpr
        return ([True] * len(eqn.invars), eqn) if keeps_all(eqn) else pe.dce_jaxpr_closed_call_rule(used_outputs, *live_and_eqn)

    pe.dce_rules[primitive] = rule


def used_inputs(jaxpr: Jaxpr) -> list[bool]:
    """Whether each input of a jaxpr is used by an output."""
    return pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1]
