"""Checks the values of fields, and converts them to plain Python values."""

import dataclasses
import difflib
import math
import numbers
import operator
import typing
from collections.abc import Collection, Mapping
from typing import Any, Literal

import jax
import numpy as np
from jax.core import Tracer

from msrl_jax.configs.deferred import INITIALIZED_MODULE, has_arrays, is_deferred, is_hashable, is_object
from msrl_jax.configs.fields import Config, option_classes
from msrl_jax.fragments.support.checks import name_of, shown
from msrl_jax.fragments.support.text_values import Call, parts_of

RELATIONS = {"above": operator.gt, "at least": operator.ge, "at most": operator.le, "below": operator.lt}
"""How a number may be related to a bound, in words."""


def check_fields(self: Config) -> None:
    """Raises ValueError unless every `field` of a dataclass has a value of its type and within its bounds."""
    for f in dataclasses.fields(self):
        where, kinds = f"{type(self).__name__}.{f.name}", parts_of(f.type)
        value = _plain(getattr(self, f.name), kinds)
        has_no_number = isinstance(value, Tracer) or (value is None and type(None) in kinds)
        if options := option_classes(f):
            value = options[0].read(where, value, f)
        if not (has_no_number or (f.metadata.get("tunable") and is_deferred(value))):
            value = _check_value(where, value, kinds, f.metadata)
        object.__setattr__(self, f.name, value)


def _plain(value: Any, kinds: tuple[Any, ...]) -> Any:
    """Returns plain Python: scalar arrays as numbers, floats such as 1e5 as integers, calls as text, lists as tuples."""
    if isinstance(value, np.ndarray | jax.Array | np.bool_) and value.ndim == 0 and not isinstance(value, Tracer):
        value = value.item()
    if int in kinds and float not in kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Call) and str in kinds:  # such as storage=frame_stack(4)
        return str(value)
    if isinstance(value, list | tuple) and any(tuple in (k, typing.get_origin(k)) for k in kinds):  # lists are not hashable
        return tuple(int(n) if isinstance(n, np.integer) else n for n in value)
    return value


def _check_value(where: str, value: Any, kinds: tuple[Any, ...], metadata: Mapping[str, Any]) -> Any:
    """Returns a valid value, as a Python number if it is a number."""
    if Any in kinds and is_object(value) and not is_hashable(value) and has_arrays(value):  # such as an Equinox module
        raise TypeError(f"{where}={name_of(value)} {INITIALIZED_MODULE}")
    if remedy := _remedy(value, kinds, metadata.get("bounds", {})):
        or_schedule = ", or a schedule, such as 'linear:0.1'" if metadata.get("tunable") and isinstance(value, str) else ""
        raise ValueError(f"{where}={shown(str(value) if isinstance(value, Call) else value)}: use {remedy}{or_schedule}")
    if isinstance(value, numbers.Real) and type(value) not in (bool, int, float):
        # NumPy scalars compute at low precision, and JSON does not support fractions.
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return value


def _remedy(value: Any, kinds: tuple[Any, ...], bounds: Mapping[str, float]) -> str | None:
    """Says what to use instead of an invalid value; None if the value is valid."""
    if Any in kinds and (is_deferred(value) or is_object(value)):
        return None if is_hashable(value) else "tuples instead of lists"
    if words := [word for kind in kinds if typing.get_origin(kind) is Literal for word in typing.get_args(kind)]:
        return _word_remedy(value, words, Any in kinds)
    if bool in kinds:
        return None if isinstance(value, bool) else "True or False"
    if float in kinds:
        return _float_remedy(value, bounds)
    if int in kinds:
        bounds = bounds or {"at least": 1}
        fits = _is_number(value) and isinstance(value, numbers.Integral) and _is_within(value, bounds)
        return None if fits else f"an integer of {_bounds_text(bounds, '.0f')}"
    if any(typing.get_args(kind)[:1] == (int,) for kind in kinds):
        fits = isinstance(value, tuple) and value and all(type(n) is int and n >= 1 for n in value)
        return None if fits else "a tuple of positive integers, such as (64, 64)"
    return None


def _word_remedy(value: object, words: list[Any], or_object: bool) -> str | None:
    if value in words:
        return None
    matches = difflib.get_close_matches(str(value).lower(), words, n=1)
    or_custom = ", your own object, or MODULE:NAME of one" if or_object else ""
    return repr(matches[0]) if matches else f"one of {sorted(words)}{or_custom}"


def _float_remedy(value: Any, bounds: Mapping[str, float]) -> str | None:
    try:
        number = float(value) if _is_number(value) else math.nan
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and _is_within(number, bounds)):
        several = ", or give the list to msrl.train: a member for each" if isinstance(value, list | tuple) else ""
        return f"a finite number {_bounds_text(bounds, 'g')}".rstrip() + several
    is_float32 = number == 0 or 1.2e-38 <= abs(number) <= 3.4e38
    return None if is_float32 else "a number that float32 holds, 0 or from 1.2e-38 to 3.4e38"


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_within(number: Any, bounds: Mapping[str, float]) -> bool:
    return all(RELATIONS[relation](number, bound) for relation, bound in bounds.items())


def _bounds_text(bounds: Mapping[str, float], form: str) -> str:
    return " and ".join(f"{relation} {bound:{form}}" for relation, bound in bounds.items())


def check_unused(config: Any, names: Collection[str], because: str) -> None:
    """Raises ValueError if a field that has no effect differs from its default; `because` completes the message."""
    for f in dataclasses.fields(config):
        if f.name in names and getattr(config, f.name) != f.default:
            raise ValueError(f"{type(config).__name__}.{f.name} has no effect {because}; leave it out")


def is_constant(value: object, number: float) -> bool:
    """Whether a number of a config is constant in the whole program and equal to `number`."""
    return not isinstance(value, Tracer) and value == number
