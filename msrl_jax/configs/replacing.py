"""Replaces values in configs, including fields of their options."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from msrl_jax.configs.choices import located, read_option
from msrl_jax.configs.fields import choices, is_option
from msrl_jax.configs.names import all_fields
from msrl_jax.fragments.support.checks import shown

T = TypeVar("T")


def with_options(config: Any) -> list[Any]:
    """Returns a config and the options in it."""
    held = [getattr(config, f.name) for f in dataclasses.fields(config)]
    return [config, *(part for each in held if is_option(each) for part in with_options(each))]


def with_values(config: T, values: Mapping[str, Any]) -> T:
    """Replaces fields of a config, whose names may be dotted; raises ValueError if a value is invalid."""
    return _replaced(type(config).__name__, config, values, dataclasses.replace)


def with_traced(config: T, values: Mapping[str, Any]) -> T:
    """Replaces fields of a config with traced numbers, without checks; the numbers must have been checked before."""

    def replace(config: Any, **values: Any) -> Any:
        traced = copy.copy(config)
        for name, value in values.items():
            object.__setattr__(traced, name, value)
        return traced

    return _replaced(type(config).__name__, config, values, replace)


def _replaced(where: str, config: Any, values: Mapping[str, Any], replace: Callable[..., Any]) -> Any:
    own = {name: x for name, x in values.items() if "." not in name}
    inner: dict[str, dict[str, Any]] = {}
    for name, x in values.items():
        head, dot, rest = name.partition(".")
        if dot:
            inner.setdefault(head, {})[rest] = x
    for head, given in inner.items():
        (f,) = (f for f in dataclasses.fields(config) if f.name == head)
        place, held = f"{where}.{head}", own.get(head, getattr(config, head))
        held = read_option(place, held, f) if isinstance(held, str) else held
        for name, x in given.items():
            if name.partition(".")[0] not in getattr(held, "__dataclass_fields__", ()):
                having = " or ".join(repr(kind.option) for kind in choices(f) if name in all_fields(kind))
                fact = f"{place}.{name}={shown(x)}: {head} is {held}, which has no {name}"
                raise ValueError(f"{fact}; leave it out, or give {head}={having} too")
        with located(place, held):
            own[head] = _replaced(place, held, given, replace)
    return replace(config, **own)
