"""Traces a training iteration, and checks it before compilation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from msrl_jax._compat import ClosedJaxpr, PyTreeDef, ShapedArray, Tracer
from msrl_jax.fragments.graph.marker import paths_of
from msrl_jax.fragments.graph.program_key import computation_key
from msrl_jax.fragments.support.checks import shown

PyTree = Any

# The number of iterations in which the weak types of a state must converge.
_MAX_WEAK_TYPE_CHANGES = 8


def leaf_aval(leaf: object, name: str) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and weak type of a state leaf under `jax.jit`, where 64-bit NumPy arrays may be 32-bit
    arrays.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        extended = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        dtype = leaf.dtype if extended else jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, weak_type=bool(leaf.weak_type))
    try:
        aval = jax.typeof(leaf)
    except TypeError:
        if isinstance(leaf, np.ndarray):
            raise TypeError(
                f"{name} has dtype {leaf.dtype}, which JAX does not have; convert it, as in x.astype(np.float32)"
            ) from None
        raise TypeError(
            f"{name} is a {type(leaf).__name__}, not an array. Every leaf of a training state must be an array: "
            "close over Python objects in the iteration, or convert numbers with jnp.asarray"
        ) from None
    except ValueError:
        raise ValueError(f"{name} is a masked array, which JAX does not have; use its filled(value)") from None
    except OverflowError as error:
        raise OverflowError(f"{name}: {error}; use a smaller number, or jax_enable_x64") from None
    if not isinstance(aval, ShapedArray):
        raise TypeError(
            f"{name} is a mutable reference ({aval}). A training iteration is pure: pass the array itself "
            "(ref[...]) and return its next value"
        )
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def state_avals(state: PyTree) -> tuple[list[jax.ShapeDtypeStruct], list[str]]:
    """Shapes, dtypes and weak types of a state's leaves, and their readable paths."""
    paths = [f"state{path}" for path in paths_of(state)]
    return list(map(leaf_aval, jax.tree.leaves(state), paths)), paths


@dataclass(frozen=True)
class Traced:
    """A traced iteration."""

    jaxpr: ClosedJaxpr  # its inputs are the state's leaves, its outputs those of the next state and the metrics
    metrics: PyTreeDef  # the structure of the metrics
    # traces the iteration for other weak types of the leaves; returns the jaxpr and the structure of the metrics
    trace_again: Callable[[Sequence[bool]], tuple[ClosedJaxpr, PyTreeDef]] = field(repr=False)

    def computes_the_same(self, weak: Sequence[bool]) -> bool:
        """Whether iterations on leaves with these weak types compute the same values as the traced one.

        `jax.jit` traces again for other weak types, and may then compute something else.
        """
        expected_key, visited = computation_key(self.jaxpr), {_weak_types(self.jaxpr.in_avals)}
        while tuple(weak) not in visited:
            visited.add(tuple(weak))
            closed, _ = self.trace_again(weak)
            if computation_key(closed) != expected_key or len(visited) > _MAX_WEAK_TYPE_CHANGES:
                return False
            weak = _weak_types(closed.out_avals[: len(weak)])
        return True


def trace(iteration: Callable[..., Any], state: PyTree) -> Traced:
    """Traces an iteration, and checks that the next state has the structure, shapes and dtypes of the state.

    The trace is for the weak types to which the state's leaves converge. `jax.jit` ends up with the same trace.
    """
    avals, paths = state_avals(state)
    tree = jax.tree.structure(state)

    def flat(*leaves: Any) -> tuple[Any, Any]:
        result = iteration(jax.tree.unflatten(tree, leaves))
        if not (isinstance(result, tuple) and len(result) == 2):
            raise TypeError(
                f"the iteration returned {type(result).__name__}, not a pair (state, metrics); "
                "return (state, {}) if it has no metrics"
            )
        return result

    def trace_again(weak: Sequence[bool]) -> tuple[ClosedJaxpr, PyTreeDef]:
        typed = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=w) for a, w in zip(avals, weak, strict=True)]
        closed, (_, metrics) = jax.make_jaxpr(flat, return_shape=True)(*typed)
        return _copy_constants(closed), jax.tree.structure(metrics)

    closed, (after, metrics) = jax.make_jaxpr(flat, return_shape=True)(*avals)
    closed = _copy_constants(closed)
    _check_same_structure(state, tree, after)
    after_leaves = jax.tree.leaves(after)
    for path, before, now in zip(paths, avals, after_leaves, strict=True):
        if before.shape != now.shape or before.dtype != now.dtype:
            raise TypeError(
                f"the iteration changes {path} from {_type_text(before)} to {_type_text(now)}; the next state must have the "
                "shapes and dtypes of the state it was given"
            )
    return _weak_type_fixpoint(Traced(closed, jax.tree.structure(metrics), trace_again), paths)


def _copy_constants(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Copies NumPy arrays that the code captures: the caller may write to them later, and a program must not change."""
    return ClosedJaxpr(closed.jaxpr, [c if isinstance(c, jax.Array) else np.array(c) for c in closed.consts])


def _weak_types(avals: Sequence[Any]) -> tuple[bool, ...]:
    return tuple(bool(a.weak_type) for a in avals)


def _weak_type_fixpoint(traced: Traced, paths: Sequence[str]) -> Traced:
    """Returns the trace for the weak types to which the state converges, if all iterations compute the same values."""
    visited: set[tuple[bool, ...]] = set()
    while True:  # terminates, because weak types repeat, or are new at most _MOST_CHANGES times
        before, after = _weak_types(traced.jaxpr.in_avals), _weak_types(traced.jaxpr.out_avals[: len(paths)])
        visited.add(before)
        if after in visited:
            return traced
        closed, metrics = traced.trace_again(after)
        if len(visited) > _MAX_WEAK_TYPE_CHANGES or computation_key(closed) != computation_key(traced.jaxpr):
            break
        traced = Traced(closed, metrics, traced.trace_again)
    i = next(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
    kind_before, kind_after = ("weak", "strong") if before[i] else ("strong", "weak")
    aval = traced.jaxpr.in_avals[i]
    raise TypeError(
        f"the iteration changes {paths[i]} from {kind_before} to {kind_after} {_type_text(aval)}, and computes different "
        "values for the two: jax.jit would promote dtypes differently in the first iteration than in the next. Set the dtype "
        f"where the state is created and where the iteration returns it, as in jnp.asarray(x, jnp.{aval.dtype})"
    )


def _type_text(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}"


def _check_same_structure(state: PyTree, tree: PyTreeDef, after: PyTree) -> None:
    if jax.tree.structure(after) == tree:
        return
    paths_before, paths_after = set(paths_of(state)), set(paths_of(after))
    if missing_paths := sorted(paths_before - paths_after):
        raise TypeError(
            f"the iteration returns a state without {_list_paths(missing_paths)}; return every leaf that it was given"
        )
    if extra_paths := sorted(paths_after - paths_before):
        raise TypeError(f"the iteration returns a state with {_list_paths(extra_paths)}, which the state it was given lacks")
    raise TypeError(
        f"the iteration returns a state of another type: it was given {tree} and returned {jax.tree.structure(after)}"
    )


def _list_paths(paths: list[str]) -> str:
    return ", ".join("state" + p for p in paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def leaf_axes(state: PyTree, axes: PyTree) -> list[PartitionSpec]:
    """Returns the logical axes of every leaf of a state; `axes` is a prefix of its tree with PartitionSpecs of axis names, or
    None.
    """

    def is_spec(x: object) -> bool:
        return x is None or isinstance(x, PartitionSpec)

    for path, spec in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_spec):
        if not is_spec(spec):
            raise ValueError(
                f"axes{jax.tree_util.keystr(path)} is {shown(spec)}; use a jax.sharding.PartitionSpec of logical axis names, "
                'such as PartitionSpec("env"), or None'
            )
    try:
        specs = jax.tree.map(
            lambda spec, sub: jax.tree.map(lambda _: spec or PartitionSpec(), sub), axes, state, is_leaf=is_spec
        )
    except ValueError as error:
        raise ValueError(
            f"`axes` does not match the state: {error}. Use a prefix of the state's tree, such as "
            "type(state)(params=P(), env_state=P('env'), ...)"
        ) from None
    leaf_specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    avals, paths = state_avals(state)
    for spec, aval, path in zip(leaf_specs, avals, paths, strict=True):
        entries = [e for entry in spec for e in (entry if isinstance(entry, tuple) else (entry,))]
        if invalid := [e for e in entries if not isinstance(e, str | None)]:
            raise ValueError(
                f"axes of {path} contain {shown(invalid[0])}; name logical axes with strings, such as 'env', in the order of "
                "the dimensions"
            )
        if len(spec) > len(aval.shape):
            raise ValueError(
                f"axes of {path} name {len(spec)} dimensions ({spec}), but it is {_type_text(aval)}; name at most that many"
            )
    return leaf_specs


def axis_leaves(state: PyTree, specs: list[PartitionSpec]) -> dict[str, list[tuple[str, int]]]:
    """Logical axis -> the leaves that have it: path, and size along the axis."""
    leaves: dict[str, list[tuple[str, int]]] = {}
    for spec, aval, path in zip(specs, *state_avals(state), strict=True):
        for entry, size in zip(spec, aval.shape, strict=False):
            for axis in (entry,) if isinstance(entry, str) else tuple(entry or ()):
                leaves.setdefault(axis, []).append((path, int(size)))
    return leaves


class StateChecker:
    """Checks states against the one that a program was compiled for."""

    def __init__(self, tree: PyTreeDef, paths: Sequence[str], traced: Traced):
        self._tree, self._paths, self._traced = tree, paths, traced
        self._avals = traced.jaxpr.in_avals
        self._weak_types = {_weak_types(self._avals)}

    def check_tree(self, tree: PyTreeDef) -> None:
        """Raises ValueError if a state has a different structure."""
        if tree != self._tree:
            raise ValueError(f"the program was compiled for a state {self._tree}, but is given {tree}")

    def check_leaves(self, flat: Sequence[Any]) -> None:
        """Rejects leaves that are not arrays, are traced or deleted, or have a type other than that of the program.

        A different weak type is rejected if `jax.jit` would compute something else with it.
        """
        if any(isinstance(x, Tracer) for x in flat):
            raise TypeError(
                "a program is not a function of traced arrays: it sends compiled code to devices itself, so jax.jit, jax.grad "
                "and jax.vmap do not apply to it. Call it on arrays, outside them; apply them to what the iteration calls"
            )
        avals = [leaf_aval(x, path) for x, path in zip(flat, self._paths, strict=True)]
        for x, aval, expected, path in zip(flat, avals, self._avals, self._paths, strict=True):
            if aval.shape != expected.shape or aval.dtype != expected.dtype:
                raise ValueError(
                    f"{path} is {aval.dtype}{list(aval.shape)}, but the program was compiled for "
                    f"{expected.dtype}{list(expected.shape)}"
                )
            check_not_donated(x, path)
        weak = _weak_types(avals)
        if weak not in self._weak_types:
            if not self._traced.computes_the_same(weak):
                i = next(i for i, a in enumerate(self._avals) if weak[i] != a.weak_type)
                kinds = [f"{'weak' if w else 'strong'} {avals[i].dtype}" for w in (weak[i], not weak[i])]
                raise ValueError(
                    f"{self._paths[i]} is a {kinds[0]}, but the program was compiled for a {kinds[1]}, and jax.jit "
                    "would promote dtypes differently for the two. Convert it, or compile the program for it (a Python number "
                    "has a weak type, also after jnp.asarray; an array with an explicit dtype has a strong one)"
                )
            self._weak_types.add(weak)


def check_not_donated(x: object, name: str) -> None:
    """Raises RuntimeError if an array was donated or deleted, with a remedy."""
    if isinstance(x, jax.Array) and x.is_deleted():
        raise RuntimeError(
            f"{name} no longer has memory: an earlier run(..., donate=True), a function with donate_argnums or delete() took "
            "it, perhaps in a callback. Use the state that the run returned, run with donate=False, or pass a copy"
        )
