"""Which inputs a function reads."""

from collections.abc import Callable
from typing import Any

import jax

from msrl_jax._compat import used_inputs


def are_read(function: Callable[..., Any], first: Any, *other_args: Any) -> list[bool]:
    """Returns, for each leaf of the first argument of a pure function, whether its results depend on it."""
    return used_inputs(jax.make_jaxpr(function)(first, *other_args).jaxpr)[: len(jax.tree.leaves(first))]
