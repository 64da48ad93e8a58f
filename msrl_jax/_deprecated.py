"""Deprecated names of public functions: they work, and warn."""

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def deprecated(old: str, function: Callable[P, R]) -> Callable[P, R]:
    """Makes an alias under a function's old name.

    Args:
      old: the old name.
      function: the function under its new name.

    Returns:
      A function that warns, then calls `function`.
    """

    @functools.wraps(function)
    def alias(*args: P.args, **kwargs: P.kwargs) -> R:
        warnings.warn(f"{old} is now called {function.__name__}", DeprecationWarning, stacklevel=2)
        return function(*args, **kwargs)

    return alias
