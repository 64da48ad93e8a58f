"""Checks for the fields of an algorithm's config; every message names the field, its value and the remedy.

A field whose default is None may be None. A number of a trace passes: it stands for numbers that were checked before.
"""

import math
import numbers
from collections.abc import Iterable, Iterator
from typing import Any

from jax.core import Tracer

from msrl_jax._spelling import nearest


def _given(config: object, fields: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for field in fields:
        value = getattr(config, field)
        if value is not None or getattr(type(config), field, ...) is not None:
            yield field, value


def _reject(config: object, field: str, remedy: str) -> ValueError:
    return ValueError(f"{type(config).__name__}.{field}={getattr(config, field)!r}: use {remedy}")


def _is_integer(value: Any, minimum: int) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= minimum


def check_integers(config: object, minimum: int, *fields: str) -> None:
    """Raises ValueError unless every named field is an integer of at least `minimum`."""
    for field, value in _given(config, fields):
        if not _is_integer(value, minimum):
            raise _reject(config, field, f"an integer of at least {minimum}")


def check_periods(config: object, *fields: str) -> None:
    """Raises ValueError unless every named field is an integer from 1 to `2**24`, the limit of `counters.remainder`."""
    for field, value in _given(config, fields):
        if not _is_integer(value, 1) or value > 2**24:
            raise _reject(config, field, f"an integer of at least 1 and at most {2**24}")


def check_numbers(
    config: object, *fields: str, low: float = -math.inf, above: float = -math.inf, high: float = math.inf
) -> None:
    """Raises ValueError unless every named field is a finite number in [low, high], and greater than `above`."""
    bounds = {"above": above, "at least": low, "at most": high}
    wanted = " and ".join(f"{relation} {bound:g}" for relation, bound in bounds.items() if math.isfinite(bound))
    for field, value in _given(config, fields):
        if isinstance(value, Tracer):
            continue
        number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
        if not (math.isfinite(number) and low <= number <= high and number > above):
            raise _reject(config, field, f"a finite number {wanted}".rstrip())


def check_float32(config: object, *fields: str) -> None:
    """Raises ValueError if a number of a named field becomes 0 or infinite in float32, in which programs have it."""
    for field, value in _given(config, fields):
        if isinstance(value, numbers.Real) and math.isfinite(value) and value and not 1.2e-38 <= abs(value) <= 3.4e38:
            raise _reject(config, field, "a number that float32 holds, 0 or from 1.2e-38 to 3.4e38")


def check_booleans(config: object, *fields: str) -> None:
    """Raises ValueError unless every named field is True or False."""
    for field in fields:
        if not isinstance(getattr(config, field), bool):
            raise _reject(config, field, "True or False")


def check_choice(config: object, field: str, options: Iterable[str]) -> None:
    """Raises ValueError unless the named field is one of `options`; the message suggests the nearest one."""
    options = sorted(options)
    for _, value in _given(config, [field]):
        if value not in options:
            near = nearest(str(value), options)
            raise _reject(config, field, repr(near) if near else f"one of {options}")


def check_sizes(config: object, field: str) -> None:
    """Raises ValueError unless the named field is a tuple of positive integers."""
    value = getattr(config, field)
    if not isinstance(value, tuple) or not value or not all(_is_integer(size, 1) for size in value):
        raise _reject(config, field, "a tuple of positive integers, such as (64, 64)")
