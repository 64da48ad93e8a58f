"""Fields of configs and of the options in them, by dotted name."""

import dataclasses
import operator
from typing import Any

from msrl_jax.configs.fields import Config, is_option, option_classes


def all_fields(config: Config | type[Config], parents: tuple[Any, ...] = ()) -> dict[str, dataclasses.Field[Any]]:
    """Returns the fields of a config and its options, by dotted name; for a class, those of all options that it accepts.

    Its `parents` are left out, because an option may hold others of its protocol.
    """
    fields: dict[str, dataclasses.Field[Any]] = {}
    for f in dataclasses.fields(config):
        fields[f.name] = f
        values = [c for c in option_classes(f) if c not in parents] if isinstance(config, type) else [getattr(config, f.name)]
        for value in filter(is_option, values):
            fields |= {f"{f.name}.{name}": inner for name, inner in all_fields(value, (*parents, value)).items()}
    return fields


def tunable_fields(config: Config | type[Config]) -> tuple[str, ...]:
    """Returns the names of the fields that may differ between the population members of one program."""
    return tuple(name for name, f in all_fields(config).items() if f.metadata.get("tunable"))


def value_of(config: Config, name: str) -> Any:
    """Returns the value of a field of a config, or of an option in it."""
    return operator.attrgetter(name)(config)
