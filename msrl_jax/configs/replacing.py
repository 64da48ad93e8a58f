"""Replaces values in configs, including fields of their options."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from msrl_jax.configs.choices import located, own_class, read
from msrl_jax.configs.fields import choices, is_option
from msrl_jax.configs.names import all_fields
from msrl_jax.fragments.support.checks import shown
from msrl_jax.fragments.support.naming import is_path
from msrl_jax.fragments.support.text_values import parts_of, split_specs

T = TypeVar("T")


def with_options(config: Any) -> list[Any]:
    """Returns a config and the options in it."""
    held = [getattr(config, f.name) for f in dataclasses.fields(config)]
    return [config, *(part for each in held if is_option(each) for part in with_options(each))]


def with_given_options(config: T, given: Mapping[str, Any]) -> T:
    """Replaces the options of a config by those among given values of its fields, without checking the config."""
    fields, kind = all_fields(type(config)), type(config).__name__
    chosen = {n: x for n, x in given.items() if n in fields and choices(fields[n])}
    return with_traced(config, {n: read(f"{kind}.{n}", x, fields[n]) for n, x in chosen.items()})


def import_options(kind: type, given: Mapping[str, Any]) -> None:
    """Imports the options that texts name as MODULE:CLASS, so that their fields are fields of the config.

    A value may be several: a list, or texts between commas.
    """
    for name, f in all_fields(kind).items():
        value = given.get(name)
        for each in value if isinstance(value, list | tuple) else [value]:
            for text in split_specs(each) if isinstance(each, str) else ():
                if Any not in parts_of(f.type) or not is_path(text):  # that may be another object
                    own_class(f"{kind.__name__}.{name}", text, f)


def with_traced(config: T, values: Mapping[str, Any]) -> T:
    """Replaces fields of a config with traced numbers, without checks; the numbers must have been checked before."""

    def replace(config: Any, **values: Any) -> Any:
        traced = copy.copy(config)
        for name, value in values.items():
            object.__setattr__(traced, name, value)
        return traced

    return with_values(config, values, replace=replace)


def with_values(
    config: T, values: Mapping[str, Any], *, where: str = "", replace: Callable[..., Any] = dataclasses.replace
) -> T:
    """Replaces fields of a config, whose names may be dotted; raises ValueError if a value is invalid.

    `where` is the place of the config in messages, by default its class; `replace` replaces fields that are not dotted.
    """
    fields, where = {f.name: f for f in dataclasses.fields(config)}, where or type(config).__name__  # type: ignore[arg-type]
    own = {name: x for name, x in values.items() if "." not in name}
    inner: dict[str, dict[str, Any]] = {}
    for name, x in values.items():
        head, dot, rest = name.partition(".")
        if dot:
            inner.setdefault(head, {})[rest] = x
    for head, given in inner.items():
        place, held = f"{where}.{head}", own.get(head, getattr(config, head))
        held = read(place, held, fields[head]) if isinstance(held, str) else held
        for name, x in given.items():
            if name.partition(".")[0] not in getattr(held, "__dataclass_fields__", ()):
                having = " or ".join(repr(kind.option) for kind in choices(fields[head]) if name in all_fields(kind))
                fact = f"{place}.{name}={shown(x)}: {head} is {' '.join(str(held).split())}, which has no {name}"
                raise ValueError(f"{fact}; leave it out, or give {head}={having} too")
        with located(place, held):
            own[head] = with_values(held, given, where=place, replace=replace)
    return replace(config, **own)
