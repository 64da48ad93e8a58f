"""`unroll`: steps of environments in a loop, all at once or in groups that take turns.

With groups, the environments of one group can be simulated while actions are chosen for another. On devices that gains nothing;
simulators on the host and networks on devices then work at the same time. In the shape descriptions, `T` denotes the length of
an unroll, `E` the number of environments and `G` the number of groups.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from msrl_jax.fragments import fragment_scope

_STEPS_OF_ENVS = P(None, "env")


def unroll(
    step: Callable[[Any, Any], tuple[Any, Any]],
    start: Any,
    inputs: Any,
    *,
    axes: Any,
    input_axes: Any = _STEPS_OF_ENVS,
    groups: int = 1,
) -> tuple[Any, Any]:
    """Scans a step of environments over time.

    Group `g` has the environments whose number modulo `G` is `g`, so that every device has some of each group. What the groups
    share, such as running statistics, each group takes from the one before it.

    Args:
      step: `(carry, inputs of a step) -> (carry, rows [E, ...])`, also of fewer environments.
      start: the carry before the first step.
      inputs: what each step takes besides. `[T, ...]`
      axes: a prefix tree of the carry with `PartitionSpec`s that have "env" where environments are counted.
      input_axes: such a prefix tree of the inputs.
      groups: number of groups, `G`; it divides `E`.

    Returns:
      The carry after the last step, and the rows. `[T, E, ...]`
    """
    if groups == 1:
        return jax.lax.scan(step, start, inputs)
    flat, tree = jax.tree.flatten(start)
    dims = [_env_dim(spec) for spec in _leaf_specs(axes, start)]
    given, input_tree = jax.tree.flatten(inputs)
    input_dims = [_env_dim(spec) for spec in _leaf_specs(input_axes, inputs)]
    own = [i for i, dim in enumerate(dims) if dim is not None]
    parts = [[_part(flat[i], dims[i], groups, g) for i in own] for g in range(groups)]
    rows_in = [[_part(x, dim, groups, g) for x, dim in zip(given, input_dims, strict=True)] for g in range(groups)]

    def step_groups(carry: Any, inputs: Any) -> tuple[Any, Any]:
        parts, shared = carry
        after, rows = [], []
        for g, (part, x) in enumerate(zip(parts, inputs, strict=True)):
            leaves = list(shared)
            for i, leaf in zip(own, part, strict=True):
                leaves[i] = leaf
            with fragment_scope(str(g)):
                whole, row = step(jax.tree.unflatten(tree, leaves), jax.tree.unflatten(input_tree, x))
            leaves = jax.tree.leaves(whole)
            after.append([leaves[i] for i in own])
            shared = [None if i in own else leaf for i, leaf in enumerate(leaves)]
            rows.append(row)
        return (after, shared), rows

    shared = [None if i in own else x for i, x in enumerate(flat)]
    (parts, shared), rows = jax.lax.scan(step_groups, (parts, shared), rows_in)
    leaves = list(shared)
    for k, i in enumerate(own):
        leaves[i] = _merged([part[k] for part in parts], dims[i])
    return jax.tree.unflatten(tree, leaves), jax.tree.map(lambda *x: _merged(x, 1), *rows)


def _leaf_specs(axes: Any, tree: Any) -> list[P]:
    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    spread = jax.tree.map(lambda spec, part: [spec] * len(jax.tree.leaves(part)), axes, tree, is_leaf=is_spec)
    return jax.tree.leaves(spread, is_leaf=is_spec)


def _env_dim(spec: P) -> int | None:
    return next((d for d, axis in enumerate(spec) if axis == "env"), None)


def _part(x: jax.Array, dim: int | None, groups: int, g: int) -> jax.Array:
    """Every `G`-th entry along a dimension, from the `g`-th on; all of `x` if the dimension is None."""
    if dim is None:
        return x
    x = x.reshape(*x.shape[:dim], -1, groups, *x.shape[dim + 1 :])
    return jax.lax.index_in_dim(x, g, dim + 1, keepdims=False)


def _merged(parts: Any, dim: Any) -> jax.Array:
    """The inverse of `_part`."""
    x = jnp.stack(parts, dim + 1)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
