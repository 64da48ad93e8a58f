"""The marker: `fragment` turns a pure function into one equation that a distribution policy can place.

The equation calls our own primitive, which evaluates its body. Under `vmap` it stays one equation (with a batched body);
under differentiation it is replaced by its body, because gradients are computed inside a learner. Fragments may be nested.
"""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax

from msrl_jax._compat import (
    AbstractRef,
    ClosedJaxpr,
    DebugInfo,
    Jaxpr,
    JaxprEqn,
    Primitive,
    ad,
    batching,
    equations_in,
    is_traced_here,
    jaxpr_as_fun,
    mlir,
    set_dead_code_rule,
)

P = ParamSpec("P")
R = TypeVar("R")


class _FragmentPrimitive(Primitive):
    """Also accepts a function that is not yet traced, like JAX's own call primitives; checkify passes one."""

    multiple_results = True

    def bind(self, *args: Any, subfuns: Sequence[Any] = (), **params: Any) -> Any:
        if not subfuns:
            return super().bind(*args, **params)
        (fn,) = subfuns
        closed, shapes = jax.make_jaxpr(fn.call_wrapped, return_shape=True)(*args)
        body = as_inputs(closed, params["name"], paths_of(shapes))
        return super().bind(*closed.consts, *args, call_jaxpr=body, **params)


fragment_p = _FragmentPrimitive("fragment")


def _evaluate(*xs: Any, call_jaxpr: ClosedJaxpr, **marks: Any) -> Sequence[Any]:
    del marks
    return jaxpr_as_fun(call_jaxpr)(*xs)


def _batch(
    axis: Any, xs: Sequence[Any], dims: Sequence[int | None], *, call_jaxpr: ClosedJaxpr, **marks: Any
) -> tuple[Any, Any]:
    if "host" in marks:
        raise ValueError(
            f"fragment {marks['name']!r} runs on the host, where jax.vmap cannot batch it; run one member at a time (seeds=1), "
            "or pass the function the whole batch"
        )
    mapped: list[bool] = []

    def batched(*xs: Any) -> list[Any]:
        shared: list[Any] = []

        def evaluate(*xs: Any) -> list[Any]:
            ys = jaxpr_as_fun(call_jaxpr)(*xs)
            mapped[:] = [is_traced_here(y) for y in ys]
            shared[:] = [y for y, is_mapped in zip(ys, mapped, strict=True) if not is_mapped]
            return [y for y, is_mapped in zip(ys, mapped, strict=True) if is_mapped]

        mapped_results = iter(
            jax.vmap(evaluate, tuple(dims), 0, axis_size=axis.size, axis_name=axis.name, spmd_axis_name=axis.spmd_name)(*xs)
        )
        shared_results = iter(shared)
        return [next(mapped_results if is_mapped else shared_results) for is_mapped in mapped]

    closed = jax.make_jaxpr(batched)(*[jax.typeof(x) for x in xs])
    body = as_inputs(closed, marks["name"], call_jaxpr.jaxpr.debug_info.result_paths)
    results = fragment_p.bind(*closed.consts, *xs, call_jaxpr=body, **marks)
    return results, [0 if is_mapped else None for is_mapped in mapped]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call_jaxpr: ClosedJaxpr, **_: Any) -> tuple[Any, Any]:
    # Keep arguments and results without a tangent symbolic: a tangent of zeros would make 0 * inf = nan downstream.
    is_active = [not isinstance(t, ad.Zero) for t in tangents]
    is_active_out: list[bool] = []

    def evaluate(*xs: Any) -> Sequence[Any]:
        it = iter(xs)
        ys = jaxpr_as_fun(call_jaxpr)(*[next(it) if m else x for x, m in zip(primals, is_active, strict=True)])
        is_active_out[:] = map(is_traced_here, ys)
        return ys

    ys, dys = jax.jvp(
        evaluate,
        tuple(x for x, m in zip(primals, is_active, strict=True) if m),
        tuple(t for t, m in zip(tangents, is_active, strict=True) if m),
    )
    zeros = [ad.Zero(aval.to_tangent_aval()) for aval in call_jaxpr.out_avals]
    return ys, [dy if m else zero for dy, zero, m in zip(dys, zeros, is_active_out, strict=True)]


def _transpose(cotangents: Sequence[Any], *xs: Any, call_jaxpr: ClosedJaxpr, **_: Any) -> list[Any]:
    linear = [ad.is_undefined_primal(x) for x in xs]

    def evaluate(*ys: Any) -> Sequence[Any]:
        it = iter(ys)
        return jaxpr_as_fun(call_jaxpr)(*[next(it) if lin else x for x, lin in zip(xs, linear, strict=True)])

    avals = [x.aval for x, lin in zip(xs, linear, strict=True) if lin]
    grads = iter(jax.linear_transpose(evaluate, *avals)(list(map(ad.instantiate_zeros, cotangents))))
    return [next(grads) if lin else None for lin in linear]


fragment_p.def_impl(_evaluate)
fragment_p.def_effectful_abstract_eval(lambda *_, call_jaxpr, **__: (call_jaxpr.out_avals, call_jaxpr.effects))
mlir.register_lowering(fragment_p, mlir.lower_fun(_evaluate, multiple_results=True))
batching.fancy_primitive_batchers[fragment_p] = _batch
ad.primitive_jvps[fragment_p] = _jvp
ad.primitive_transposes[fragment_p] = _transpose


def is_fragment(eqn: JaxprEqn) -> bool:
    """Whether a jaxpr equation is a marked fragment."""
    return eqn.primitive is fragment_p


def is_host_call(eqn: JaxprEqn) -> bool:
    """Whether a jaxpr equation is a host fragment."""
    return is_fragment(eqn) and "host" in eqn.params


set_dead_code_rule(fragment_p, keeps_all=is_host_call)  # a host function takes and makes all values


_scope: contextvars.ContextVar[str] = contextvars.ContextVar("scope", default="")


@contextlib.contextmanager
def fragment_scope(scope: str) -> Iterator[None]:
    """Adds a scope to the names of fragments called inside, `NAME/SCOPE` in plans and errors, to distinguish equal parts.

    Args:
      scope: the owner of the parts, such as a team of agents; empty adds nothing. An inner scope replaces an outer one.
    """
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)


def add_scope(name: str) -> str:
    """Returns the name of a fragment, with the current scope."""
    return f"{name}/{_scope.get()}" if _scope.get() else name


@overload
def fragment(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def fragment(
    *, role: str | None = None, name: str | None = None, static_argnames: str | Sequence[str] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def fragment(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    role: str | None = None,
    name: str | None = None,
    static_argnames: str | Sequence[str] = (),
) -> Callable[..., Any]:
    """Marks a pure function as a fragment: the unit that a distribution policy places.

    The marked function computes the same as the plain one, under every JAX transformation.

    Args:
      fn: the function, if used as a decorator without arguments.
      role: the fragment's role, such as `"env"`, `"actor"` or `"learner"`; a policy maps roles to placements. By default, the
        function's name.
      name: the fragment's name in plans and errors. By default, the function's name.
      static_argnames: names of the arguments that are Python values, not arrays (as in `jax.jit`).

    Returns:
      A function of the same signature, or a decorator if `fn` is not given.

    Raises:
      TypeError: if the function has no argument of a static name. Calls raise it for an argument that is not an array, or is a
        mutable reference.
    """
    mark = functools.partial(_mark, role=role, name=name, static_argnames=static_argnames)
    return mark if fn is None else mark(fn)


def _mark(
    fn: Callable[..., Any], *, role: str | None, name: str | None, static_argnames: str | Sequence[str]
) -> Callable[..., Any]:
    function_name = getattr(fn, "__name__", type(fn).__name__)
    name, role = str(name or function_name), str(role or function_name)
    static = frozenset((static_argnames,) if isinstance(static_argnames, str) else static_argnames)
    signature = inspect.signature(fn)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = {i: n for i, (n, p) in enumerate(signature.parameters.items()) if p.kind in kinds}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    if (unknown := sorted(static - set(signature.parameters))) and not takes_any:
        raise TypeError(
            f"fragment {name!r} has no argument {unknown[0]!r}, named in static_argnames; "
            f"its arguments are {list(signature.parameters)}"
        )

    @functools.wraps(fn)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            return fn(*args, **kwargs)
        static_values: dict[int | str, Any] = {i: a for i, a in enumerate(args) if positional.get(i) in static}
        static_values |= {k: v for k, v in kwargs.items() if k in static}
        arrays = [None if i in static_values else a for i, a in enumerate(args)]
        leaves, tree = jax.tree.flatten((arrays, {k: None if k in static_values else v for k, v in kwargs.items()}))
        if any(map(_fault, leaves)):
            arguments = _leaves_by_path(_non_static_arguments(signature, static, args, kwargs))
            path, fault = next((path, _fault(leaf)) for path, leaf in arguments.items() if _fault(leaf))
            raise TypeError(f"fragment {name!r}: argument {path} is a {fault}")

        def flat(*leaves: Any) -> Any:
            args, kwargs = jax.tree.unflatten(tree, leaves)
            args, kwargs = (
                [static_values.get(i, a) for i, a in enumerate(args)],
                {k: static_values.get(k, v) for k, v in kwargs.items()},
            )
            array_arguments = _non_static_arguments(signature, static, args, kwargs)
            before, before_again = (
                _leaves_by_path(array_arguments),
                _leaves_by_path(array_arguments),
            )  # twice: some types create leaves on access
            with jax.named_scope(add_scope(name)):  # lets profilers and plans find the fragment of an operation
                result = fn(*args, **kwargs)
            _check_not_changed(name, before, before_again, _leaves_by_path(array_arguments), result)
            return result

        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        if faults := list(filter(None, map(_fault, closed.consts))):
            raise TypeError(f"fragment {name!r} closes over a {faults[0]}")
        if closed.effects and _makes_reference(closed.jaxpr):
            raise TypeError(f"fragment {name!r} makes a mutable reference; carry its value through a loop instead")
        title = add_scope(name)
        body = as_inputs(closed, title, paths_of(shapes))
        results = fragment_p.bind(*closed.consts, *leaves, call_jaxpr=body, name=title, role=role)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return marked


def _check_not_changed(
    name: str, before: dict[str, Any], before_again: dict[str, Any], after: dict[str, Any], result: Any
) -> None:
    """Raises TypeError if a fragment replaced or added a leaf of an argument, unless it returns that leaf."""
    returned = {id(x) for x in jax.tree.leaves(result)}
    for path in before | after:
        changed = path not in before or before[path] is before_again[path] is not after.get(path)
        if changed and id(after.get(path)) not in returned:
            raise TypeError(
                f"fragment {name!r} changes its argument {path} in place, and the change would be lost, because it gets a "
                "copy. Return the new value and assign it outside (for a flax.nnx module, return nnx.state(module), or pass "
                "what nnx.split returns, nnx.merge it inside and return its state)"
            )


def _fault(x: Any) -> str | None:
    """Describes an `x` that is not an array, with a remedy; None if it is an array."""
    try:
        aval = jax.typeof(x)
    except TypeError:
        kind = type(x).__name__ + (f" of {x.dtype}" if hasattr(x, "dtype") else "")
        return f"{kind}, not an array; close over it, or name its argument in static_argnames"
    except ValueError:
        return "masked array, which JAX does not have; use its filled(value)"
    return "mutable reference; pass its value ref[...] and return the next" if isinstance(aval, AbstractRef) else None


def _makes_reference(jaxpr: Jaxpr) -> bool:
    return any(isinstance(v.aval, AbstractRef) for eqn in equations_in(jaxpr) for v in eqn.outvars)


def _non_static_arguments(
    signature: inspect.Signature, static: frozenset[str], args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Returns the non-static arguments by name."""
    arguments = signature.bind_partial(*args, **{k: v for k, v in kwargs.items() if k not in static}).arguments
    return {k: v for k, v in arguments.items() if k not in static}


def _leaves_by_path(arguments: dict[str, Any]) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(arguments)
    return {f"{path[0].key}{jax.tree_util.keystr(path[1:])}": leaf for path, leaf in leaves}


def paths_of(tree: Any) -> tuple[str, ...]:
    """Returns the paths of a tree's leaves as text."""
    return tuple(jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree))


def as_inputs(closed: ClosedJaxpr, name: str, paths: Sequence[str] | None) -> ClosedJaxpr:
    """Turns the captured values of a fragment's body (arrays, outer tracers) into leading inputs; names its results `paths`."""
    jaxpr = closed.jaxpr
    names = ("captured",) * len(closed.consts) + ("argument",) * len(jaxpr.invars)
    info = DebugInfo("fragment", name, names, tuple(paths or ("",) * len(jaxpr.outvars)))
    inner = Jaxpr((), [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns, jaxpr.effects, debug_info=info)
    return ClosedJaxpr(inner, ())
