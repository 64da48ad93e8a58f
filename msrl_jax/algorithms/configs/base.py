"""The base of all configs: keyword-only fields, checked when a config is made."""

import copy
import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from jax.core import Tracer

from msrl_jax.algorithms.configs.checks import check_booleans, check_choice, check_float32

_TUNABLE = "may differ between the members of a program"

Tunable = Annotated[float, _TUNABLE]
"""The type of a field that changes no shape and no branch of the program: the members of a run may have different values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The base of all configs.

    A config inherits fields from small classes such as `OptimizerConfig`. Each class documents its own fields under
    "Attributes:", and may check them in a method `check`. A subclass restates a field to change its default, and documents
    it again only if the text differs. The fields of the last base come first.
    """

    def __post_init__(self):
        for cls in reversed(type(self).__mro__):
            if "check" in cls.__dict__:
                cls.__dict__["check"](self)

    def check(self) -> None:
        """Raises ValueError unless each field fits its type: `bool`, an option of `Literal`, a `Tunable` number of float32."""
        check_float32(self, *tunable_fields(type(self)))
        for field, hint in typing.get_type_hints(type(self)).items():
            if hint is bool:
                check_booleans(self, field)
            elif options := _options(hint):
                check_choice(self, field, options)

    @staticmethod
    def canonical(field: str, value: Any) -> Any:
        """The form in which a config keeps a value of a field, where it takes several forms."""
        return value

    def check_given(self, fields: Collection[str]) -> None:
        """Raises ValueError if the user gave a field that has no effect with the other fields.

        Args:
          fields: the names of the fields that the user gave; the others have their defaults.
        """


def _options(hint: Any) -> tuple[str, ...]:
    """The options of `Literal[...]` or `Literal[...] | None`; empty for other types."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return tuple(option for part in typing.get_args(hint) for option in _options(part))
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


@functools.cache
def tunable_fields(config: type) -> tuple[str, ...]:
    """The names of the fields of a config that are `Tunable`, or `Tunable | None`."""
    hints = typing.get_type_hints(config, include_extras=True)
    kinds = {name: (hint, *typing.get_args(hint)) for name, hint in hints.items()}
    return tuple(name for name, parts in kinds.items() if any(part is Tunable or part == Tunable for part in parts))


def with_traced(config: Any, values: Mapping[str, Any]) -> Any:
    """A config whose `Tunable` fields are traced numbers.

    Args:
      config: the config; its other fields stay.
      values: numbers that are checked already, arrays `[]` float32, by field.

    Returns:
      The config, which is not checked again: numbers of a trace cannot be compared.
    """
    traced = copy.copy(config)
    for name, value in values.items():
        object.__setattr__(traced, name, value)
    return traced


def is_constant(value: Any, number: float) -> bool:
    """Whether a number of a config is this one in the whole program; one of a trace may be another in other members."""
    return not isinstance(value, Tracer) and value == number


def field_docs(config: type) -> dict[str, str]:
    """The text of every documented field of a config, inherited fields included.

    Args:
      config: a dataclass. Its docstring and those of its bases list fields as `name: text` under "Attributes:".

    Returns:
      The text of each field on one line, in the order of the fields.
    """
    texts: dict[str, str] = {}
    for cls in reversed(config.__mro__):
        _, _, attributes = inspect.cleandoc(cls.__dict__.get("__doc__") or "").partition("Attributes:\n")
        _, *parts = re.split(r"^  (\w+): ", attributes, flags=re.MULTILINE)
        texts |= {name: " ".join(text.split()) for name, text in zip(parts[::2], parts[1::2], strict=True)}
    return {field.name: texts[field.name] for field in dataclasses.fields(config) if field.name in texts}
