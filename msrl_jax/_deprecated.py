"""Old spellings of public names: they still work, and warn."""

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def deprecated(old: str, function: Callable[P, R]) -> Callable[P, R]:
    """A function under an old name.

    Args:
      old: the old name.
      function: what it is called now.

    Returns:
      The same function, which warns when it is called.
    """

    @functools.wraps(function)
    def alias(*args: P.args, **kwargs: P.kwargs) -> R:
        warnings.warn(f"{old} is now called {function.__name__}", DeprecationWarning, stacklevel=2)
        return function(*args, **kwargs)

    return alias
