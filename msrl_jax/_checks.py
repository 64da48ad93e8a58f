"""Checks of arguments that several packages share, and file errors that name the file."""

import contextlib
import math
import numbers
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SEEDS = 2**32


def whole(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Checks and converts a whole number, such as `1_000_000` or `1e6`.

    Args:
      name: the argument's name, for messages.
      value: an integer, or a float without a fraction.
      least: the smallest number that is allowed.
      most: the largest number that is allowed, if there is one.

    Returns:
      The number as an `int`.

    Raises:
      ValueError: if the value is not a whole number, below `least` or above `most`.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    number: Any = value if is_number and math.isfinite(value) and value == math.floor(value) else None
    if number is None or number < least:
        raise ValueError(f"{name}={value!r}: use an integer of at least {least}")
    if most is not None and number > most:
        raise ValueError(f"{name}={value!r}: use an integer of at most {most}")
    return int(number)


def check_seed(seed: Any, seeds: int = 1, name: str = "seed") -> int:
    """Checks seeds of random number generators; a seed has 32 bits.

    Args:
      seed: the first seed.
      seeds: number of consecutive seeds.
      name: the argument's name, for messages.

    Returns:
      The first seed as an `int`.

    Raises:
      ValueError: if a seed is below 0 or needs more than 32 bits.
    """
    first = whole(name, seed, least=0)
    if first + seeds > _SEEDS:
        last = f"; the last of {seeds} seeds would be {first + seeds - 1}" if seeds > 1 else ""
        raise ValueError(f"{name}={first}: a seed has 32 bits{last}; use 0 to {_SEEDS - seeds}")
    return first


def as_path(name: str, value: Any) -> Path:
    """Checks and converts a path.

    Args:
      name: the argument's name, for messages.
      value: text, or an object that stands for a path.

    Returns:
      The path.

    Raises:
      TypeError: if the value is neither.
      ValueError: if the text is empty.
    """
    if value == "":
        raise ValueError(f"{name}='' names no path; give one, or leave it out")
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name}={value!r}: use a path as text or a pathlib.Path, or leave it out")
    return Path(value)


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
    """Adds the file's name to operating-system errors that lack it, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
