"""Checks of arguments and names that several packages share; errors suggest the nearest name."""

import contextlib
import difflib
import math
import numbers
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def whole(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Converts an integral number, such as `1e6`, to an `int`; raises ValueError, which names the argument, otherwise."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a NumPy or JAX number
        with contextlib.suppress(NotImplementedError):  # typed keys
            value = value.item()
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    number: Any = value if is_number and math.isfinite(value) and value == math.floor(value) else None
    if number is None or number < least:
        raise ValueError(f"{name}={shown(value)}: use an integer of at least {least}")
    if most is not None and number > most:
        raise ValueError(f"{name}={shown(value)}: use an integer of at most {most}")
    return int(number)


def check_seed(seed: object, seeds: int = 1) -> int:
    """Converts the first of consecutive seeds to an `int`; raises ValueError if one is below 0 or needs over 32 bits."""
    first, max_seed = whole("seed", seed, least=0), 2**32 - seeds
    if first > max_seed:
        last = f"; the last of {seeds} seeds would be {first + seeds - 1}" if seeds > 1 else ""
        raise ValueError(f"seed={first}: a seed has 32 bits{last}; use 0 to {max_seed}")
    return first


def check_loaded(result: object, loader: str = "Result.load") -> None:
    """Raises TypeError if the folder of a run is given instead of the run."""
    if isinstance(result, str | os.PathLike):
        raise TypeError(f"{str(result)!r} is not a result; load it: msrl.{loader}({str(result)!r})")


def add(kind: str, table: dict[str, T], name: str, value: T) -> T:
    """Adds an entry, and returns it; raises ValueError if another entry has the name."""
    if table.setdefault(name, value) is not value:
        article = "an" if kind[0] in "aeiou" else "a"
        raise ValueError(f"{article} {kind} named {name!r} is registered already; choose another name")
    return value


def find(kind: str, table: Mapping[str, T], name: str) -> T:
    """Looks up an entry, ignoring case; raises ValueError, which suggests the nearest, if the name is unknown."""
    if not isinstance(name, str):
        raise TypeError(f"the name of the {kind} is {shown(name)}; choose from {', '.join(map(repr, sorted(table)))}")
    by_lower = {other.lower(): other for other in table}
    key = name if name in table else by_lower.get(name.lower())
    if key is None:
        raise ValueError(f"unknown {kind} {name!r}{suggestion(name, table)}; choose from {', '.join(sorted(table))}")
    return table[key]


_LONGEST = 100  # maximum number of characters of a value in a message


def shown(value: object) -> str:
    """Returns a value as messages show it: its repr on one line, truncated if it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def name_of(value: object) -> str:
    """How messages name a value: a string as it is, an object by its name or its class."""
    return repr(value) if isinstance(value, str) else getattr(value, "__qualname__", type(value).__qualname__)


def suggestion(name: str, options: Iterable[str]) -> str:
    """Text that suggests the option that a misspelled or abbreviated name probably means; empty if there is none.

    It is one with these initials (`lr` for `learning-rate`), otherwise one of similar spelling, or one that starts with `name`.
    """
    lower, by_lower = name.lower(), {option.lower(): option for option in options}
    initials = {option: "".join(word[0] for word in re.split(r"[\W_]+", option) if word) for option in by_lower}
    matches = [option for option in by_lower if len(lower) > 1 and initials[option] == lower]
    matches = matches or difflib.get_close_matches(lower, by_lower, n=1)
    matches = matches or [option for option in by_lower if option.startswith(lower)]
    return f" (did you mean {by_lower[matches[0]]!r}?)" if matches else ""
