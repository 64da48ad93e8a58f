"""Checks for the fields of an algorithm's config: every message names the field, its value and what it should be."""

import difflib
import math
import numbers
from collections.abc import Iterable
from typing import Any


def _reject(config: Any, field: str, remedy: str) -> ValueError:
    return ValueError(f"{type(config).__name__}.{field}={getattr(config, field)!r}: use {remedy}")


def _is_integer(value: Any, minimum: int) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= minimum


def check_integers(config: Any, minimum: int, *fields: str) -> None:
    """Raises ValueError unless every named field is an integer of at least `minimum`."""
    for field in fields:
        if not _is_integer(getattr(config, field), minimum):
            raise _reject(config, field, f"an integer of at least {minimum}")


def check_numbers(
    config: Any, *fields: str, low: float = 0.0, high: float = math.inf, open_low: bool = False
) -> None:
    """Raises ValueError unless every named field is a finite number within [low, high] (above `low` if `open_low`)."""
    for field in fields:
        value = getattr(config, field)
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < low or value > high or (open_low and value == low):
            upper = "" if high == math.inf else f" and at most {high:g}"
            raise _reject(config, field, f"a finite number {'above' if open_low else 'of at least'} {low:g}{upper}")


def check_booleans(config: Any, *fields: str) -> None:
    """Raises ValueError unless every named field is True or False."""
    for field in fields:
        if not isinstance(getattr(config, field), bool):
            raise _reject(config, field, "True or False")


def check_choice(config: Any, field: str, options: Iterable[str]) -> None:
    """Raises ValueError unless the named field is one of `options`; the message suggests the nearest one."""
    options, value = sorted(options), getattr(config, field)
    if value not in options:
        near = difflib.get_close_matches(str(value), options, n=1)
        raise _reject(config, field, repr(near[0]) if near else f"one of {options}")


def check_sizes(config: Any, field: str) -> None:
    """Raises ValueError unless the named field is a tuple of positive integers."""
    value = getattr(config, field)
    if not isinstance(value, tuple) or not value or not all(_is_integer(size, 1) for size in value):
        raise _reject(config, field, "a tuple of positive integers, such as (64, 64)")
