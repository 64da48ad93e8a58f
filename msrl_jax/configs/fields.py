"""Fields of configs, and options: objects that select one of several alternatives in a config.

A field has bounds and a line of documentation. Its value is checked when the object is constructed. An option is a small frozen
class with the numbers that one alternative needs. A config field that is a union of options takes one of them, or its text,
such as `"per_env:0.3"`. A field of an option has a dotted name in the config, such as `exploration.base`.
"""

import contextlib
import dataclasses
import difflib
import inspect
import math
import numbers
import operator
import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, dataclass_transform

import jax
import numpy as np
from jax.core import Tracer

from msrl_jax.fragments.support.checks import name_of, shown, suggestion
from msrl_jax.fragments.support.text_values import Call, parts_of, read_call, write_argument, write_call
from msrl_jax.fragments.support.tracebacks import entry

Codec = Literal["bfloat16", "uint8", "scaled_uint8"]

T = TypeVar("T")

if TYPE_CHECKING:

    class Tunable:
        """The type of a `tunable` field: set it to a number, a scalar array or a schedule; it reads as a number."""

        def __get__(self, config: object, owner: Any = None) -> float: ...
        def __set__(self, config: object, value: float | jax.Array | str | Callable[..., Any]) -> None: ...

    class TunableOrNone:
        """The type of a `tunable` field that may be None."""

        def __get__(self, config: object, owner: Any = None) -> float | None: ...
        def __set__(self, config: object, value: float | jax.Array | str | Callable[..., Any] | None) -> None: ...

else:
    Tunable, TunableOrNone = float, float | None


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
      The field, for a class made with `config`.
    """
    bounds = {"above": above, "at least": low, "at most": high, "below": below}
    about = {"doc": doc, "bounds": {k: v for k, v in bounds.items() if v is not None}}
    about |= {"tunable": tunable, "adaptive": adaptive, "once": once}
    return dataclasses.field(default=default, metadata=about)  # type: ignore[return-value]


def tunable(*, default: Any, doc: str, adaptive: bool = False, once: bool = False, **bounds: float) -> Any:
    """Declares a number that may differ between the population members of one program: a leaf of the config.

    Annotate it as `Tunable` or `TunableOrNone`, so that type checkers accept schedules; else as `float` or `float | None`.
    """
    return field(default=default, doc=doc, tunable=True, adaptive=adaptive, once=once, **bounds)


@dataclass_transform(frozen_default=True, field_specifiers=(field, tunable))
def option(cls: type[T]) -> type[T]:
    """Makes a class an option: one alternative of a config field.

    The class declares fields, as a config does, and may have a method `check()`, which raises ValueError if they contradict
    each other. Its text is `NAME:field=value,...`; for example, `PerEnv` has the name `per_env`.

    Args:
      cls: the class.

    Returns:
      The class as a frozen dataclass, checked on construction, and a pytree whose leaves are its tunable numbers.
    """
    made: Any = cls
    check_declaration(cls, f"the option {cls.__name__}")
    made.__post_init__ = check_made
    made.option = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
    made.__str__ = lambda self: text(self)
    made.__repr__ = lambda self: f"{cls.__name__}({', '.join(f'{name}={x!r}' for name, x in _given(self).items())})"
    new: Any = entry(dataclasses.dataclass(frozen=True, repr=False)(made))
    register(new)
    return new


def register(cls: Any) -> None:
    """Registers a class of fields as a pytree; its leaves are its tunable numbers and those of its options."""
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        f.type = hints[f.name]
    known = dataclasses.fields(cls)
    leaves = [f.name for f in known if f.metadata.get("tunable") or choices(f)]
    static = [f.name for f in known if f.name not in leaves]

    def flatten(made: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(made, n) for n in leaves), tuple(getattr(made, n) for n in static)

    def unflatten(rest: tuple[Any, ...], values: Any) -> Any:
        made = object.__new__(cls)  # unchecked, because JAX puts arbitrary objects into leaves
        for n, value in (*zip(leaves, values, strict=True), *zip(static, rest, strict=True)):
            object.__setattr__(made, n, value)
        return made

    check_fields(unflatten(tuple(f.default for f in known if f.name in static), [f.default for f in known if f.name in leaves]))
    jax.tree_util.register_pytree_node(cls, flatten, unflatten)


def check_declaration(cls: type, where: str) -> None:
    """Raises TypeError unless every field is documented, and tunable fields are numbers."""
    for name, kind in typing.get_type_hints(cls).items():
        about = getattr(vars(cls).get(name), "metadata", {})
        if typing.get_origin(kind) is not ClassVar and "doc" not in about:
            raise TypeError(f"{where} has the field {name!r} without a default or a text; write field(default=..., doc=...)")
        if about.get("tunable") and float not in (kind, *typing.get_args(kind)):
            raise TypeError(f"{where} has the tunable field {name!r}, which is not a float; use field, or float in its type")


def is_option(value: Any) -> bool:
    """Whether a value is an option or the class of an option."""
    return hasattr(value, "option") and dataclasses.is_dataclass(value)


def choices(field: dataclasses.Field[Any]) -> list[Any]:
    """Returns the options that a field accepts."""
    return [kind for kind in parts_of(field.type) if is_option(kind)]


def all_fields(config: Any) -> dict[str, dataclasses.Field[Any]]:
    """Returns the fields of a config and its options, by dotted name; for a class, those of all options that it accepts."""
    found: dict[str, dataclasses.Field[Any]] = {}
    for f in dataclasses.fields(config):
        found[f.name] = f
        held = choices(f) if isinstance(config, type) else [getattr(config, f.name)]
        for each in filter(is_option, held):
            found |= {f"{f.name}.{name}": inner for name, inner in all_fields(each).items()}
    return found


def tunable_fields(config: Any) -> tuple[str, ...]:
    """Returns the names of the fields that may differ between the population members of one program."""
    return tuple(name for name, f in all_fields(config).items() if f.metadata.get("tunable"))


def check_unused(config: Any, names: Collection[str], because: str) -> None:
    """Raises ValueError if a field that has no effect differs from its default; `because` completes the message."""
    for f in dataclasses.fields(config):
        if f.name in names and getattr(config, f.name) != f.default:
            raise ValueError(f"{type(config).__name__}.{f.name} has no effect {because}; leave it out")


def value_of(config: Any, name: str) -> Any:
    """Returns the value of a field of a config, or of an option in it."""
    return operator.attrgetter(name)(config)


@contextlib.contextmanager
def located(place: str, option: Any) -> Iterator[None]:
    """Adds the place to the errors of an option: `DQN.replay.n_step` instead of `Replay.n_step`."""
    try:
        yield
    except ValueError as error:
        name = getattr(option, "__name__", type(option).__name__)
        raise ValueError(re.sub(rf"^{name}\b", place, str(error))) from None


def text(option: Any, *, whole: bool = False) -> str:
    """Returns the text of an option, without default values unless `whole`."""
    return written(option, whole=whole, nested=False)


def _given(option: Any, *, whole: bool = False) -> dict[str, Any]:
    """Returns the fields of an option that differ from their defaults, or all fields if `whole`."""
    fields = ((f.name, getattr(option, f.name), f.default) for f in dataclasses.fields(option))
    return {name: x for name, x, usual in fields if whole or type(x) is not type(usual) or x != usual}


def written(value: Any, *, whole: bool = False, nested: bool = True) -> str:
    """Returns the text of an argument of an option, in the form that `read_call` parses."""
    if is_option(value):
        kwargs = {name: written(x, whole=whole) for name, x in _given(value, whole=whole).items()}
        return write_call(value.option, kwargs, nested=nested and bool(kwargs))
    return write_argument(value)


def read_option(where: str, given: str | Call, field: dataclasses.Field[Any]) -> Any:
    """Parses the text of an option; raises ValueError, which suggests the nearest name, if it is invalid."""
    if given == "None" and type(None) in parts_of(field.type):
        return None
    try:
        call = read_call(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    known = {kind.option: kind for kind in choices(field)}
    if (kind := known.get(call.name)) is None:
        raise ValueError(f"{where}={shown(str(given))}: use {_names(field)}{suggestion(call.name, known)}")
    try:
        inspect.signature(kind).bind(*call.args, **call.kwargs)
    except TypeError:
        known = {f.name: written(f.default) for f in dataclasses.fields(kind)}
        near = "".join(suggestion(name, known) for name in sorted(call.kwargs.keys() - known))
        taken = ", ".join(f"{name}={x}" for name, x in known.items()) or "nothing"
        raise ValueError(f"{where}: {call.name} takes {taken}{near}") from None
    with located(where, kind):
        return kind(*call.args, **call.kwargs)


def _names(field: dataclasses.Field[Any]) -> str:
    """Lists the options of a field, for messages."""
    return "one of " + ", ".join([*(kind.option for kind in choices(field)), *["None"] * (type(None) in parts_of(field.type))])


def check_made(self: Any) -> None:
    """Checks an object of fields on construction; if it has schedules, `resolve.check` calls its `check` later."""
    check_fields(self)
    if hasattr(self, "check") and not any(is_deferred(value_of(self, name)) for name in tunable_fields(self)):
        self.check()


def check_fields(self: Any) -> None:
    """Raises ValueError unless every `field` of a dataclass has a value of its type and within its bounds."""
    for f in dataclasses.fields(self):
        value, kinds = getattr(self, f.name), parts_of(f.type)
        if isinstance(value, np.ndarray | jax.Array | np.bool_) and value.ndim == 0 and not isinstance(value, Tracer):
            value = value.item()
            object.__setattr__(self, f.name, value)
        if int in kinds and float not in kinds and isinstance(value, float) and value.is_integer():  # such as 1e5
            value = int(value)
            object.__setattr__(self, f.name, value)
        if options := choices(f):
            where = f"{type(self).__name__}.{f.name}"
            value = read_option(where, value, f) if isinstance(value, str | Call) else value
            if not isinstance(value, (*options, *[type(None)] * (type(None) in kinds))):
                raise ValueError(f"{where}={shown(value)}: use {_names(f)}")
            object.__setattr__(self, f.name, value)
            continue
        if isinstance(value, list | tuple) and any(tuple in (k, typing.get_origin(k)) for k in kinds):  # lists are not hashable
            value = tuple(int(n) if isinstance(n, np.integer) else n for n in value)
            object.__setattr__(self, f.name, value)
        if isinstance(value, Tracer) or (value is None and type(None) in kinds):
            continue
        if f.metadata.get("tunable") and is_deferred(value):
            continue
        if Any in kinds and is_object(value) and not _is_hashable(value) and has_arrays(value):  # such as an Equinox module
            raise TypeError(f"{type(self).__name__}.{f.name}={name_of(value)} {MADE}")
        remedy = _remedy(value, kinds, f.metadata.get("bounds", {}))
        if f.metadata.get("tunable") and isinstance(value, str):
            remedy = f"{remedy}, or a schedule, such as 'linear:0.1'"
        if remedy:
            raise ValueError(f"{type(self).__name__}.{f.name}={shown(value)}: use {remedy}")
        if isinstance(value, numbers.Real) and type(value) not in (bool, int, float):
            # Convert NumPy scalars, which compute at low precision, and fractions, which JSON does not support.
            object.__setattr__(self, f.name, int(value) if isinstance(value, numbers.Integral) else float(value))


def _remedy(value: Any, kinds: tuple[Any, ...], bounds: Mapping[str, float]) -> str | None:
    """Says what to use instead of an invalid value; None if the value is valid."""
    tests = {"above": operator.gt, "at least": operator.ge, "at most": operator.le, "below": operator.lt}
    within = lambda number: all(tests[relation](number, bound) for relation, bound in bounds.items())  # noqa: E731
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if options := [option for kind in kinds if typing.get_origin(kind) is Literal for option in typing.get_args(kind)]:
        if Any in kinds and (is_deferred(value) or is_object(value)):
            return None if _is_hashable(value) else "tuples instead of lists"
        near = difflib.get_close_matches(str(value).lower(), options, n=1)
        own = ", your own object, or MODULE:NAME of one" if Any in kinds else ""
        return None if value in options else repr(near[0]) if near else f"one of {sorted(options)}{own}"
    if bool in kinds:
        return None if isinstance(value, bool) else "True or False"
    if float in kinds:
        try:
            number = float(value) if is_number else math.nan
        except OverflowError:
            number = math.inf
        if not (math.isfinite(number) and within(number)):
            wanted = " and ".join(f"{relation} {bound:g}" for relation, bound in bounds.items())
            several = ", or give the list to msrl.train: a member for each" if isinstance(value, list | tuple) else ""
            return f"a finite number {wanted}".rstrip() + several
        held = number == 0 or 1.2e-38 <= abs(number) <= 3.4e38
        return None if held else "a number that float32 holds, 0 or from 1.2e-38 to 3.4e38"
    if int in kinds:
        bounds = bounds or {"at least": 1}
        wanted = " and ".join(f"{relation} {bound:.0f}" for relation, bound in bounds.items())
        return None if is_number and isinstance(value, numbers.Integral) and within(value) else f"an integer of {wanted}"
    if any(typing.get_args(kind)[:1] == (int,) for kind in kinds):
        fits = isinstance(value, tuple) and value and all(type(n) is int and n >= 1 for n in value)
        return None if fits else "a tuple of positive integers, such as (64, 64)"
    return None


def is_constant(value: Any, number: float) -> bool:
    """Whether a number of a config is constant in the whole program and equal to `number`."""
    return not isinstance(value, Tracer) and value == number


def is_deferred(value: Any) -> bool:
    """Whether a value may refer to something that `build` resolves: a text with a colon, or a function."""
    return ":" in value if isinstance(value, str) else callable(value)


MADE = "is a module that has its parameters; give a function of a key that makes it: lambda key: ..."


def has_arrays(value: Any) -> bool:
    """Whether a value holds arrays, as an initialized module does."""
    return any(isinstance(x, jax.Array) for x in jax.tree.leaves(value))


def is_object(value: Any) -> bool:
    """Whether the value of a field may be an object instead of plain data: a module, a core, a function, or several."""
    if is_option(value):
        return any(is_object(getattr(value, f.name)) for f in dataclasses.fields(value))
    several = isinstance(value, tuple) and (hasattr(value, "_fields") or all(map(callable, value)))
    return callable(value) or hasattr(value, "apply") or hasattr(value, "step") or several


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
