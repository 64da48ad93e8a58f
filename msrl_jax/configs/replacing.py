"""Replaces values in configs, including fields of their options."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from msrl_jax.configs.fields import Config, is_option, option_classes
from msrl_jax.configs.names import all_fields
from msrl_jax.configs.options import import_custom_class, located, read_option
from msrl_jax.fragments.support.checks import shown
from msrl_jax.fragments.support.naming import is_path
from msrl_jax.fragments.support.text_values import parts_of, split_specs

T = TypeVar("T")


def config_and_options(config: Config) -> list[Any]:
    """Returns a config and the options in it."""
    values = [getattr(config, f.name) for f in dataclasses.fields(config)]
    return [config, *(option for value in values if is_option(value) for option in config_and_options(value))]


def replace_options(config: Config, values: Mapping[str, Any]) -> Config:
    """Replaces the options of a config by those among some values of its fields, without checking the config."""
    fields, kind = all_fields(type(config)), type(config).__name__
    options = {name: value for name, value in values.items() if name in fields and option_classes(fields[name])}
    return replace_unchecked(
        config, {name: read_option(f"{kind}.{name}", value, fields[name]) for name, value in options.items()}
    )


def import_options(kind: type, values: Mapping[str, Any]) -> None:
    """Imports the options that texts name as MODULE:CLASS, so that their fields are fields of the config.

    A value may be several: a list, or texts between commas.
    """
    for name, field in all_fields(kind).items():
        value = values.get(name)
        for one in value if isinstance(value, list | tuple) else [value]:
            for text in split_specs(one) if isinstance(one, str) else ():
                if Any not in parts_of(field.type) or not is_path(text):  # that may be another object
                    import_custom_class(f"{kind.__name__}.{name}", text, field)


def replace_unchecked(config: T, values: Mapping[str, Any]) -> T:
    """Replaces fields of a config with traced numbers, without checks; the numbers must have been checked before."""

    def replace(config: T, **values: Any) -> T:
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
    direct = {name: x for name, x in values.items() if "." not in name}
    nested: dict[str, dict[str, Any]] = {}
    for name, x in values.items():
        head, dot, field = name.partition(".")
        if dot:
            nested.setdefault(head, {})[field] = x
    for head, option_values in nested.items():
        place, option = f"{where}.{head}", direct.get(head, getattr(config, head))
        option = read_option(place, option, fields[head]) if isinstance(option, str) else option
        for name, x in option_values.items():
            if name.partition(".")[0] not in getattr(option, "__dataclass_fields__", ()):
                having = " or ".join(repr(kind.option) for kind in option_classes(fields[head]) if name in all_fields(kind))
                fact = f"{place}.{name}={shown(x)}: {head} is {' '.join(str(option).split())}, which has no {name}"
                raise ValueError(f"{fact}; leave it out, or give {head}={having} too")
        with located(place, option):
            direct[head] = with_values(option, option_values, where=place, replace=replace)
    return replace(config, **direct)
