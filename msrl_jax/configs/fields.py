"""Declarations of fields: a default, bounds and a line of documentation, as plain data.

A field of a config whose type is an option, or a protocol of options, takes one of these options, or its text, such as
`"per_env:0.3"`. A field of an option has a dotted name in the config, such as `exploration.base`.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from msrl_jax.fragments.support.naming import reference
from msrl_jax.fragments.support.text_values import parts_of

T = TypeVar("T")

if TYPE_CHECKING:
    from _typeshed import DataclassInstance as Config

    class Tunable:
        """The type of a `tunable` field: set it to a number, a scalar array or a schedule; it reads as a number."""

        def __get__(self, config: object, owner: Any = None) -> float: ...
        def __set__(self, config: object, value: float | jax.Array | str | Callable[..., Any]) -> None: ...

    class TunableOrNone:
        """The type of a `tunable` field that may be None."""

        def __get__(self, config: object, owner: Any = None) -> float | None: ...
        def __set__(self, config: object, value: float | jax.Array | str | Callable[..., Any] | None) -> None: ...

else:
    Tunable, TunableOrNone, Config = float, float | None, Any


def field(
    *,
    default: T,
    doc: str,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    tunable: bool = False,
    adaptive: bool = False,
    once: bool = False,
) -> T:
    """Declares a field of a config.

    Args:
      default: the default value.
      doc: a line of documentation: the meaning, the unit, usual values.
      low: the smallest value; by default 1 for integers.
      above: an exclusive lower bound.
      high: the largest value.
      below: an exclusive upper bound.
      tunable: whether the population members of one program may have different values; such a field may also be a schedule.
      adaptive: whether it is a learning rate that may adapt to the KL divergence of updates.
      once: whether it is read only at the start, so that it cannot be a schedule.

    Returns:
      The field, for a class made with `config` or `option`.
    """
    bounds = {"above": above, "at least": low, "at most": high, "below": below}
    metadata = {"doc": doc, "bounds": {k: v for k, v in bounds.items() if v is not None}}
    metadata |= {"tunable": tunable, "adaptive": adaptive, "once": once}
    return dataclasses.field(default=default, metadata=metadata)  # type: ignore[return-value]


def tunable(*, default: Any, doc: str, adaptive: bool = False, once: bool = False, **bounds: float) -> Any:
    """Declares a number that may differ between the population members of one program: a leaf of the config.

    Annotate it as `Tunable` or `TunableOrNone`, so that type checkers accept schedules; else as `float` or `float | None`.
    """
    return field(default=default, doc=doc, tunable=True, adaptive=adaptive, once=once, **bounds)


def is_option(value: object) -> bool:
    """Whether a value is an option or the class of an option."""
    return hasattr(value, "option") and dataclasses.is_dataclass(value)


def path_of(kind: Any) -> str | None:
    """How text names the class of an option: NAME, or MODULE:NAME of a custom one; None if no module has that one."""
    name = kind.option if kind.__module__.startswith("msrl_jax.") else reference(kind)
    return name if isinstance(name, str) else None


OPTIONS: dict[type, dict[str, Any]] = {}
"""The options of each protocol that `option(of=...)` has named, by the name of the option."""


def accepted_types(field: dataclasses.Field[Any]) -> list[Any]:
    """Returns the types that a field accepts, among them all options of its protocol."""
    return [c for kind in parts_of(field.type) for c in (OPTIONS[kind].values() if kind in OPTIONS else [kind])]


def option_classes(field: dataclasses.Field[Any]) -> list[Any]:
    """Returns the options that a field accepts."""
    return [kind for kind in accepted_types(field) if is_option(kind)]


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Returns the default of a field; that of a field with options may be text."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    options = option_classes(field) if isinstance(field.default, str) else []
    return options[0].read(field.name, field.default, field) if options else field.default
