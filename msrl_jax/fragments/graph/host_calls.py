"""`host_fragment`: a Python function as a fragment, which the runtime calls between programs with NumPy arrays.

Simulators, robots and services are not XLA programs. The compiler opens the loops around such a fragment; under `jax.jit`,
it is a callback of the program. Its arguments and results are transferred to and from host memory once.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from msrl_jax._compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    PyTreeDef,
    Var,
    call_body,
    equations_in,
    jaxpr_as_fun,
    make_jaxpr_of,
)
from msrl_jax.fragments.graph.marker import add_scope, as_inputs, fragment, fragment_p, is_fragment, is_host_call, paths_of
from msrl_jax.fragments.placement import HOST
from msrl_jax.fragments.support.checks import shown

IN_TRACES = "msrl:"
"""The prefix of names for host time in `jax.profiler` traces."""

_last_errors: list[Exception] = []
"""The last exception of a host function."""


@contextlib.contextmanager
def host_errors() -> Iterator[None]:
    """Raises the exception of a function that was called as a callback, instead of JAX's report of it."""
    _last_errors.clear()
    try:
        yield
    except jax.errors.JaxRuntimeError:
        if _last_errors:
            raise _last_errors.pop() from None
        raise


@dataclass(frozen=True, eq=False)
class HostFunction:
    """A Python function of flat arguments, with results of known types."""

    name: str
    fn: Callable[..., Any]
    arguments: PyTreeDef  # the tree of its arguments
    results: PyTreeDef  # the tree of its results
    paths: tuple[str, ...]  # the paths of its results
    kinds: tuple[jax.ShapeDtypeStruct, ...]  # shapes and dtypes of the results

    def __call__(self, *leaves: Any) -> list[np.ndarray]:
        """Calls the function and checks its results."""
        try:
            return self.start(*leaves)()
        except Exception as error:
            _last_errors[:] = [error]
            raise

    def start(self, *leaves: Any) -> Callable[[], list[np.ndarray]]:
        """Starts a call; if the function has no `start`, calls it immediately."""
        with jax.profiler.TraceAnnotation(f"{IN_TRACES}wait"):
            args = jax.tree.unflatten(self.arguments, [np.asarray(x) for x in leaves])
        annotation = jax.profiler.TraceAnnotation(f"{IN_TRACES}host {self.name}")
        if not self.can_start:
            with annotation:
                results = self._check_results(self.fn(*args))
            return lambda: results
        # The annotation lasts until the results arrive; other calls may start and end in the meantime.
        with contextlib.ExitStack() as stack:
            stack.enter_context(annotation)
            finish = self.fn.start(*args)  # type: ignore[attr-defined]
            until_results = stack.pop_all()

        def wait_for_results() -> list[np.ndarray]:
            with until_results:
                return self._check_results(finish())

        return wait_for_results

    @property
    def can_start(self) -> bool:
        """Whether a call can be started without waiting for its results."""
        return hasattr(self.fn, "start")

    def _check_results(self, result: Any) -> list[np.ndarray]:
        """Copies the results, so that the function may reuse its memory."""
        leaves, tree = jax.tree.flatten(result)
        if tree != self.results:
            raise TypeError(f"host fragment {self.name!r} returned {tree}, but declares {self.results}")
        copy = not getattr(self.fn, "makes_new_arrays", False)
        arrays = [np.array(x, copy=copy or None) for x in leaves]
        for path, x, kind in zip(self.paths, arrays, self.kinds, strict=True):
            if x.shape != kind.shape or x.dtype != kind.dtype:
                raise TypeError(
                    f"result{path} of host fragment {self.name!r} is {x.dtype}{list(x.shape)}, but it declares "
                    f"{np.dtype(kind.dtype)}{list(kind.shape)}; return NumPy arrays of the declared shapes and dtypes"
                )
        return arrays


def host_fragment(fn: Callable[..., Any], results: Any, *, name: str | None = None) -> Callable[..., Any]:
    """Marks a Python function as a fragment that the host calls with NumPy arrays.

    Every call runs exactly once. Calls of one function run in order if each takes a result of the previous one, such as a
    counter; independent calls may run in any order.

    Args:
      fn: a function of pytrees of NumPy arrays, which it must not modify. If it has a method `start` that takes the same
        arguments and returns a function for the results, independent programs and calls run in the meantime.
      results: a pytree of `jax.ShapeDtypeStruct`s, or of arrays, like the function's result.
      name: the fragment's name in plans and errors. The function's name if not given.

    Returns:
      A function of pytrees of arrays that returns arrays of these shapes and dtypes.

    Raises:
      TypeError: if a result is declared without shape and dtype. Calls raise it for arguments that are not arrays or that are
        typed keys, and if the function's result differs from the declaration.
    """
    title = str(name or getattr(fn, "__name__", type(fn).__name__))
    declared, tree = jax.tree.flatten(results)
    paths = paths_of(results)
    for path, x in zip(paths, declared, strict=True):
        if not (hasattr(x, "shape") and hasattr(x, "dtype")) or jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise TypeError(f"host fragment {title!r} declares {shown(x)} for result{path}; declare a jax.ShapeDtypeStruct")
    kinds = tuple(jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for x in declared)

    def marked(*args: Any) -> Any:
        leaves, arguments = jax.tree.flatten(args)
        for path, x in jax.tree_util.tree_leaves_with_path(args):
            if jnp.issubdtype(jax.typeof(x).dtype, jax.dtypes.extended):
                where = jax.tree_util.keystr(path)
                raise TypeError(f"argument{where} of host fragment {title!r} is a typed key; pass jax.random.key_data(key)")
        scoped_name = add_scope(title)
        function = HostFunction(scoped_name, fn, arguments, tree, paths, kinds)
        body = jax.make_jaxpr(lambda *leaves: io_callback(function, list(kinds), *leaves))(*leaves)
        body = as_inputs(body, scoped_name, paths)
        return jax.tree.unflatten(tree, fragment_p.bind(*leaves, call_jaxpr=body, name=scoped_name, role=HOST, host=function))

    return marked


def received(results: Any, role: str) -> Any:
    """Moves results of the host to where a role runs, in one transfer, and makes them results of a program there."""
    return fragment(role=role, name="receive")(lambda x: x)(results)


def calls_host(jaxpr: Jaxpr) -> bool:
    """Whether code contains a host fragment, at any depth."""
    return any(map(is_host_call, equations_in(jaxpr)))


def evaluate_with_host(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluates code with host calls piece by piece: compiled programs, and the functions in between, called directly.

    An exception or interrupt in a function is therefore raised in the caller, and is not an error of a program. Host calls in
    loops and branches stay parts of programs.
    """
    values: dict[Var, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values |= zip(closed.jaxpr.invars, args, strict=True)
    pending: list[JaxprEqn] = []

    def value_of(atom: Atom) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    def run() -> None:
        outputs = dict.fromkeys(v for eqn in pending for v in eqn.outvars)
        inputs = dict.fromkeys(a for eqn in pending for a in eqn.invars if isinstance(a, Var) and a not in outputs)
        if pending:
            program = jax.jit(jaxpr_as_fun(make_jaxpr_of(pending, list(inputs), list(outputs), "initialize")))
            values.update(zip(outputs, program(*map(value_of, inputs)), strict=True))
        pending.clear()

    for eqn in closed.jaxpr.eqns:
        inner = eqn.params["call_jaxpr"] if is_fragment(eqn) else call_body(eqn)
        if is_host_call(eqn):
            run()
            results = map(jnp.asarray, eqn.params["host"](*map(value_of, eqn.invars)))
        elif inner is not None and calls_host(inner.jaxpr):
            run()
            results = iter(evaluate_with_host(inner, list(map(value_of, eqn.invars))))
        else:
            pending.append(eqn)
            continue
        values.update(zip(eqn.outvars, results, strict=True))
    run()
    return list(map(value_of, closed.jaxpr.outvars))
