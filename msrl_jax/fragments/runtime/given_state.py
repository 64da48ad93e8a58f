"""Checks that a state is like the one that the program was compiled for."""

from collections.abc import Sequence
from typing import Any

import jax

from msrl_jax._compat import Tracer
from msrl_jax.fragments.graph.trace import Traced, leaf_aval
from msrl_jax.fragments.passes.instructions import Value


class GivenState:
    """The structure, shapes and dtypes of the state that a program was compiled for."""

    def __init__(self, tree: Any, leaves: Sequence[Value], traced: Traced):
        """Stores the expected state.

        Args:
          tree: the state's structure.
          leaves: its leaves.
          traced: the iteration.
        """
        self._tree, self._leaves, self._traced = tree, leaves, traced
        self._weak_types = {tuple(bool(v.aval.weak_type) for v in leaves)}

    def check_tree(self, tree: Any) -> None:
        """Raises ValueError if a state has another structure."""
        if tree != self._tree:
            raise ValueError(f"the program was compiled for a state {self._tree}, but is given {tree}")

    def check_leaves(self, flat: Sequence[Any]) -> None:
        """Checks the leaves of a state.

        Args:
          flat: the leaves.

        Raises:
          TypeError: if one is not an array or a number, or is traced.
          ValueError: if one has another shape or dtype, or a weak type with which `jax.jit` would compute something else.
          RuntimeError: if one was donated or deleted.
        """
        if any(isinstance(x, Tracer) for x in flat):
            raise TypeError(
                "a program is no function of traced arrays: it sends compiled code to devices itself, so jax.jit, jax.grad and "
                "jax.vmap do not apply to it. Call it on arrays, outside of them; apply them to what the iteration calls"
            )
        avals = [leaf_aval(x, v.label) for x, v in zip(flat, self._leaves, strict=True)]
        for x, found, value in zip(flat, avals, self._leaves, strict=True):
            want = value.aval
            if found.shape != want.shape or found.dtype != want.dtype:
                raise ValueError(
                    f"{value.label} is {found.dtype}{list(found.shape)}, but the program was compiled for "
                    f"{want.dtype}{list(want.shape)}"
                )
            check_not_given_away(x, value.label)
        weak = tuple(bool(a.weak_type) for a in avals)
        if weak not in self._weak_types:
            if not self._traced.computes_the_same(weak):
                i = next(i for i, v in enumerate(self._leaves) if weak[i] != v.aval.weak_type)
                kinds = [f"{'weak' if w else 'strong'} {avals[i].dtype}" for w in (weak[i], not weak[i])]
                raise ValueError(
                    f"{self._leaves[i].label} is a {kinds[0]}, but the program was compiled for a {kinds[1]}, and jax.jit "
                    "would promote dtypes differently for the two. Convert it, or compile the program for it (a Python number "
                    "has a weak type, also after jnp.asarray; an array with an explicit dtype has a strong one)"
                )
            self._weak_types.add(weak)


def check_not_given_away(x: Any, name: str) -> None:
    """Raises RuntimeError if an array was donated or deleted; says how to avoid that."""
    if isinstance(x, jax.Array) and x.is_deleted():
        raise RuntimeError(
            f"{name} has no memory any more: an earlier run(..., donate=True), a function with donate_argnums or delete() took "
            "it, perhaps in a callback. Use the state that the run returned, run with donate=False, or give away a copy"
        )
