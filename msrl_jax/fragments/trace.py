"""Tracing and checking a training iteration before anything compiles."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from msrl_jax._compat import ClosedJaxpr, ShapedArray

PyTree = Any


def state_avals(state: PyTree) -> tuple[list[jax.ShapeDtypeStruct], list[str]]:
    """Shapes, dtypes and readable paths of a state's leaves.

    Args:
      state: pytree of arrays or of `jax.ShapeDtypeStruct`.

    Returns:
      One struct and one path for each leaf.

    Raises:
      TypeError: if a leaf is not an array, or is a mutable reference; names its path.
    """
    avals, paths = [], []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda x: x is None):
        name = "state" + jax.tree_util.keystr(path)
        if leaf is None:
            continue
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            try:
                aval = jax.typeof(leaf)
            except TypeError:
                raise TypeError(
                    f"{name} is a {type(leaf).__name__}, not an array. Every leaf of a training state is an array: "
                    "close over Python objects in the iteration, or convert numbers with jnp.asarray"
                ) from None
            if not isinstance(aval, ShapedArray):
                raise TypeError(
                    f"{name} is a mutable reference ({aval}). A training iteration is pure: pass the array itself "
                    "(ref[...]) and return its next value"
                )
            leaf = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        avals.append(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        paths.append(name)
    return avals, paths


def trace(iteration: Callable, state: PyTree) -> tuple[ClosedJaxpr, PyTree]:
    """Traces an iteration and checks that it returns the state it was given, but for the values.

    Args:
      iteration: pure function `state -> (state, metrics)`.
      state: pytree of arrays or of `jax.ShapeDtypeStruct`.

    Returns:
      The jaxpr, whose inputs are the state's leaves and whose outputs are the next state's and the metrics'; and the
      structure of the metrics.

    Raises:
      TypeError: if the result is not a pair, or the next state differs in structure, shape or dtype; names the leaf.
    """
    avals, paths = state_avals(state)
    tree = jax.tree.structure(state)

    def flat(*leaves):
        result = iteration(jax.tree.unflatten(tree, leaves))
        if not (isinstance(result, tuple) and len(result) == 2):
            raise TypeError(
                f"the iteration returned {type(result).__name__}, not a pair (state, metrics); "
                "return (state, {}) if it has no metrics"
            )
        return result

    closed, (after, metrics) = jax.make_jaxpr(flat, return_shape=True)(*avals)
    _check_same_structure(state, tree, after)
    after_leaves = jax.tree.leaves(after)
    for path, before, now in zip(paths, avals, after_leaves, strict=True):
        if before.shape != now.shape or before.dtype != now.dtype:
            raise TypeError(
                f"the iteration changes {path} from {_short(before)} to {_short(now)}; the next state must have the "
                "shapes and dtypes of the state it was given"
            )
    return closed, metrics


def _short(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}"


def _check_same_structure(state: PyTree, tree: Any, after: PyTree) -> None:
    if jax.tree.structure(after) == tree:
        return
    was = {jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state)}
    now = {jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(after)}
    if missing := sorted(was - now):
        raise TypeError(f"the iteration returns a state without {_list(missing)}; return every leaf that it was given")
    if extra := sorted(now - was):
        raise TypeError(f"the iteration returns a state with {_list(extra)}, which the state it was given lacks")
    raise TypeError(
        f"the iteration returns a state of another type: it was given {tree} and returned {jax.tree.structure(after)}"
    )


def _list(paths: list[str]) -> str:
    shown = ", ".join("state" + p for p in paths[:3])
    return shown + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def leaf_axes(state: PyTree, axes: PyTree) -> list[PartitionSpec]:
    """The logical axes of every leaf of a state.

    Args:
      state: the state.
      axes: a prefix of its tree, of PartitionSpecs of logical axis names; None stands for `PartitionSpec()`.

    Returns:
      One PartitionSpec for each leaf.

    Raises:
      ValueError: if `axes` is no prefix of the state, or names more dimensions than a leaf has.
    """

    def is_spec(x: Any) -> bool:
        return x is None or isinstance(x, PartitionSpec)

    for path, spec in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_spec):
        if not is_spec(spec):
            raise ValueError(
                f"axes{jax.tree_util.keystr(path)} is {spec!r}; give a jax.sharding.PartitionSpec of logical axis names, "
                'such as PartitionSpec("env"), or None'
            )
    try:
        specs = jax.tree.map(
            lambda spec, sub: jax.tree.map(lambda _: spec or PartitionSpec(), sub), axes, state, is_leaf=is_spec
        )
    except ValueError as error:
        raise ValueError(
            f"`axes` does not match the state: {error}. Give a prefix of the state's tree, such as "
            "type(state)(params=P(), env_state=P('env'), ...)"
        ) from None
    found = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    avals, paths = state_avals(state)
    for spec, aval, path in zip(found, avals, paths, strict=True):
        if len(spec) > len(aval.shape):
            raise ValueError(
                f"axes of {path} name {len(spec)} dimensions ({spec}), but it is {_short(aval)}; "
                "name at most as many as it has"
            )
    return found


def axis_leaves(state: PyTree, specs: list[PartitionSpec]) -> dict[str, list[tuple[str, int]]]:
    """The leaves that carry each logical axis.

    Args:
      state: the state.
      specs: logical axes of its leaves.

    Returns:
      Axis -> pairs of a leaf's path and its size along that axis.
    """
    found: dict[str, list[tuple[str, int]]] = {}
    for spec, aval, path in zip(specs, *state_avals(state), strict=True):
        for entry, size in zip(spec, aval.shape, strict=False):
            for axis in (entry,) if isinstance(entry, str) else tuple(entry or ()):
                found.setdefault(axis, []).append((path, int(size)))
    return found
