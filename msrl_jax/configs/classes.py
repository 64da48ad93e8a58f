"""Makes classes of fields: frozen dataclasses that are checked on construction, and pytrees of their tunable numbers."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any, ClassVar

import jax

from msrl_jax.configs.checking import check_fields
from msrl_jax.configs.deferred import is_deferred
from msrl_jax.configs.fields import default_of, is_option, option_classes
from msrl_jax.fragments.support.tracebacks import entry


def fields_of(value: Any, *, full: bool = False) -> dict[str, Any]:
    """Returns the fields of a frozen dataclass that differ from their defaults, or all fields if `full`."""
    fields = {}
    for f in dataclasses.fields(value):
        x, default = getattr(value, f.name), default_of(f)
        if f.repr and (full or type(x) is not type(default) or x != default):
            fields[f.name] = x
    return fields


def short_repr(self: Any) -> str:
    """Returns the repr of a frozen dataclass, without fields that have their default values."""
    return f"{type(self).__name__}({', '.join(f'{name}={x!r}' for name, x in fields_of(self).items())})"


def class_of_fields(cls: Any, where: str, **dataclass_arguments: bool) -> Any:
    """Makes a class a frozen dataclass that is checked on construction, and a pytree whose leaves are its tunable numbers.

    Args:
      cls: the class, which declares fields, and may have a method `check()` for fields that contradict each other.
      where: what to call the class in messages.
      **dataclass_arguments: arguments of `dataclasses.dataclass`.

    Returns:
      The class. The leaves of its options are leaves too.
    """
    _check_declaration(cls, where)
    cls.__post_init__, cls.__repr__ = _check_construction, vars(cls).get("__repr__", short_repr)
    new_class: Any = entry(dataclasses.dataclass(frozen=True, repr=False, **dataclass_arguments)(cls))
    hints = typing.get_type_hints(new_class)
    for f in dataclasses.fields(new_class):
        f.type = hints[f.name]
    fields = dataclasses.fields(new_class)
    tunable = [f.name for f in fields if f.metadata.get("tunable")]

    def flatten(self: Any) -> tuple[tuple[Any, ...], Any]:
        values = {f.name: getattr(self, f.name) for f in fields}
        children = {n: x for n, x in values.items() if n in tunable or is_option(x)}
        return tuple(children.values()), (tuple(children), tuple((n, x) for n, x in values.items() if n not in children))

    def unflatten(aux_data: Any, values: Any) -> Any:
        self = object.__new__(new_class)  # unchecked, because JAX puts arbitrary objects into leaves
        names, static = aux_data
        for n, value in (*zip(names, values, strict=True), *static):
            object.__setattr__(self, n, value)
        return self

    check_fields(unflatten(((), tuple((f.name, f.default) for f in fields)), ()))
    jax.tree_util.register_pytree_node(new_class, flatten, unflatten)
    return new_class


def _check_declaration(cls: type, where: str) -> None:
    """Raises TypeError unless every field is documented, and tunable fields are numbers."""
    for name, kind in typing.get_type_hints(cls).items():
        inherited = getattr(cls, "__dataclass_fields__", {}).get(name)
        metadata = getattr(vars(cls).get(name, inherited), "metadata", {})
        if typing.get_origin(kind) is not ClassVar and "doc" not in metadata:
            raise TypeError(f"{where} has the field {name!r} without a default or a text; write field(default=..., doc=...)")
        if metadata.get("tunable") and float not in (kind, *typing.get_args(kind)):
            raise TypeError(f"{where} has the tunable field {name!r}, which is not a float; use field, or float in its type")


def _check_construction(self: Any) -> None:
    """Checks an object of fields on construction; if it has schedules, `resolve.check` calls its `check` later."""
    check_fields(self)
    if not any(map(is_deferred, jax.tree.leaves(self, is_leaf=is_deferred))):
        check_together(self)


def check_together(self: Any) -> None:
    """Raises ValueError if fields of an object contradict each other or, for a config, one of its options."""
    if hasattr(self, "check"):
        self.check()
    for option in () if is_option(self) else _options_of(self):
        if hasattr(option, "check_config"):
            option.check_config(self)


def _options_of(self: Any) -> Iterator[Any]:
    """Yields the values of fields with options, at any depth."""
    for value in (getattr(self, f.name) for f in dataclasses.fields(self) if option_classes(f)):
        yield value
        yield from _options_of(value) if is_option(value) else ()
