"""Checks of arguments that several packages share, and file errors that name the file."""

import contextlib
import math
import numbers
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def whole(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Converts a whole number, such as `1e6`, to an `int`; raises ValueError, which names the argument, if it does not fit."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    number: Any = value if is_number and math.isfinite(value) and value == math.floor(value) else None
    if number is None or number < least:
        raise ValueError(f"{name}={value!r}: use an integer of at least {least}")
    if most is not None and number > most:
        raise ValueError(f"{name}={value!r}: use an integer of at most {most}")
    return int(number)


def check_seed(seed: Any, seeds: int = 1, name: str = "seed") -> int:
    """Converts the first of some consecutive seeds to an `int`; raises ValueError if one is below 0 or needs over 32 bits."""
    first, most = whole(name, seed, least=0), 2**32 - seeds
    if first > most:
        last = f"; the last of {seeds} seeds would be {first + seeds - 1}" if seeds > 1 else ""
        raise ValueError(f"{name}={first}: a seed has 32 bits{last}; use 0 to {most}")
    return first


def as_path(name: str, value: Any) -> Path:
    """Converts text, or an object that stands for a path; raises TypeError for anything else, ValueError if it is empty."""
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
