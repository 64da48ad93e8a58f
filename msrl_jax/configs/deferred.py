"""Values of fields that stand for others: texts and functions that `algorithms.build` resolves, and objects such as modules."""

import dataclasses
from typing import Any

import jax

from msrl_jax.configs.fields import is_option, path_of

INITIALIZED_MODULE = "is a module that has its parameters; give a function of a key that makes it: lambda key: ..."


def is_deferred(value: object) -> bool:
    """Whether a value may refer to something that `build` resolves: a text with a colon, or a function."""
    return ":" in value if isinstance(value, str) else callable(value)


def has_arrays(value: object) -> bool:
    """Whether a value holds arrays, as an initialized module does."""
    return any(isinstance(x, jax.Array) for x in jax.tree.leaves(value))


def is_object(value: Any) -> bool:
    """Whether the value of a field may be an object instead of plain data: a module, a core, a function, or several."""
    if is_option(value):
        return path_of(type(value)) is None or any(is_object(getattr(value, f.name)) for f in dataclasses.fields(value))
    several = isinstance(value, tuple) and (hasattr(value, "_fields") or all(map(callable, value)))
    return callable(value) or any(hasattr(value, method) for method in ("apply", "step", "make")) or several


def is_hashable(value: object) -> bool:
    """Whether a value may be a key, as the static part of a pytree must be."""
    try:
        hash(value)
    except TypeError:
        return False
    return True
