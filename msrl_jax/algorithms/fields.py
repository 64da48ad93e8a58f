"""Fields of configs, and options: values that stand for one of several alternatives of a config.

A field has its bounds and a line of text. A value is checked when the object that has it is made. An option is a small frozen
class with the numbers that one alternative needs; a config whose field is a union of options takes one of them, or its text,
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
        """The type of a `tunable` field: given as a number, an array of one, or a schedule; read as a number."""

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
    """A field of a config.

    Args:
      default: its default.
      doc: a line of text: what it is, its unit, usual values.
      low: the smallest value; by default 1 for integers.
      above: a number that values exceed.
      high: the largest value.
      below: a number that exceeds values.
      tunable: whether the members of one program may have different values, and whether it may be a schedule.
      adaptive: whether it is a learning rate that may adapt to the KL divergence of updates.
      once: whether it is read at the start alone, so that it may not be a schedule.

    Returns:
      The field, for a class made with `config`.
    """
    bounds = {"above": above, "at least": low, "at most": high, "below": below}
    about = {"doc": doc, "bounds": {k: v for k, v in bounds.items() if v is not None}}
    about |= {"tunable": tunable, "adaptive": adaptive, "once": once}
    return dataclasses.field(default=default, metadata=about)  # type: ignore[return-value]


def tunable(*, default: Any, doc: str, adaptive: bool = False, once: bool = False, **bounds: float) -> Any:
    """A `field` of a number that the members of one program may have each for themselves: a leaf of the config.

    Its type is `Tunable` or `TunableOrNone`, with which checkers of types accept schedules; `float` or `float | None` if not.
    """
    return field(default=default, doc=doc, tunable=True, adaptive=adaptive, once=once, **bounds)


@dataclass_transform(frozen_default=True, field_specifiers=(field, tunable))
def option(cls: type[T]) -> type[T]:
    """Makes a class one alternative of a field of configs.

    The class lists fields, as a config does, and may have a method `check()`, which raises ValueError if they do not fit each
    other. Its text is `NAME:field=value,...`, where `PerEnv` has the name `per_env`.

    Args:
      cls: the class.

    Returns:
      The class as a frozen dataclass, checked when it is made, and a pytree whose leaves are its tunable numbers.
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
    """Makes a class of fields a pytree, whose leaves are its tunable numbers and those of its options."""
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        f.type = hints[f.name]
    known = dataclasses.fields(cls)
    leaves = [f.name for f in known if f.metadata.get("tunable") or choices(f)]
    static = [f.name for f in known if f.name not in leaves]

    def flatten(made: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(made, n) for n in leaves), tuple(getattr(made, n) for n in static)

    def unflatten(rest: tuple[Any, ...], values: Any) -> Any:
        made = object.__new__(cls)  # not checked: leaves may be anything
        for n, value in (*zip(leaves, values, strict=True), *zip(static, rest, strict=True)):
            object.__setattr__(made, n, value)
        return made

    check_fields(unflatten(tuple(f.default for f in known if f.name in static), [f.default for f in known if f.name in leaves]))
    jax.tree_util.register_pytree_node(cls, flatten, unflatten)


def check_declaration(cls: type, where: str) -> None:
    """Raises TypeError unless every field has a text, and tunable ones are numbers."""
    for name, kind in typing.get_type_hints(cls).items():
        about = getattr(vars(cls).get(name), "metadata", {})
        if typing.get_origin(kind) is not ClassVar and "doc" not in about:
            raise TypeError(f"{where} has the field {name!r} without a default or a text; write field(default=..., doc=...)")
        if about.get("tunable") and float not in (kind, *typing.get_args(kind)):
            raise TypeError(f"{where} has the tunable field {name!r}, which is no float; use field, or float in its type")


def is_option(value: Any) -> bool:
    """Whether a value is an alternative of a field, or the class of one."""
    return hasattr(value, "option") and dataclasses.is_dataclass(value)


def choices(field: dataclasses.Field[Any]) -> list[Any]:
    """The options that a field takes."""
    return [kind for kind in parts_of(field.type) if is_option(kind)]


def all_fields(config: Any) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a config and of the options in it, by dotted name; of a class, those of all options that it takes."""
    found: dict[str, dataclasses.Field[Any]] = {}
    for f in dataclasses.fields(config):
        found[f.name] = f
        held = choices(f) if isinstance(config, type) else [getattr(config, f.name)]
        for each in filter(is_option, held):
            found |= {f"{f.name}.{name}": inner for name, inner in all_fields(each).items()}
    return found


def tunable_fields(config: Any) -> tuple[str, ...]:
    """The names of the fields of a config that the members of one program may have each for themselves."""
    return tuple(name for name, f in all_fields(config).items() if f.metadata.get("tunable"))


def check_unused(config: Any, names: Collection[str], because: str) -> None:
    """Raises ValueError if a field that has no effect, `because` of something, has another value than its default."""
    for f in dataclasses.fields(config):
        if f.name in names and getattr(config, f.name) != f.default:
            raise ValueError(f"{type(config).__name__}.{f.name} has no effect {because}; leave it out")


def value_of(config: Any, name: str) -> Any:
    """The value of a field of a config, or of an option in it."""
    return operator.attrgetter(name)(config)


@contextlib.contextmanager
def located(place: str, option: Any) -> Iterator[None]:
    """Errors of an option say where it is: `DQN.replay.n_step` in place of `Replay.n_step`."""
    try:
        yield
    except ValueError as error:
        name = getattr(option, "__name__", type(option).__name__)
        raise ValueError(re.sub(rf"^{name}\b", place, str(error))) from None


def text(option: Any, *, whole: bool = False) -> str:
    """The text of an option, without what is default unless the `whole` is wanted."""
    return written(option, whole=whole, nested=False)


def _given(option: Any, *, whole: bool = False) -> dict[str, Any]:
    """The fields of an option that are not their defaults, or all."""
    fields = ((f.name, getattr(option, f.name), f.default) for f in dataclasses.fields(option))
    return {name: x for name, x, usual in fields if whole or type(x) is not type(usual) or x != usual}


def written(value: Any, *, whole: bool = False, nested: bool = True) -> str:
    """The text of an argument of an option, as `read_call` reads it."""
    if is_option(value):
        kwargs = {name: written(x, whole=whole) for name, x in _given(value, whole=whole).items()}
        return write_call(value.option, kwargs, nested=nested and bool(kwargs))
    return write_argument(value)


def read_option(where: str, given: str | Call, field: dataclasses.Field[Any]) -> Any:
    """The option that a text stands for; raises ValueError, with the nearest name, if it is none."""
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
    """What a field of options takes, in words."""
    return "one of " + ", ".join([*(kind.option for kind in choices(field)), *["None"] * (type(None) in parts_of(field.type))])


def check_made(self: Any) -> None:
    """Checks an object of fields that is made; `words.check` checks what stands for something, and the rest of it then."""
    check_fields(self)
    if hasattr(self, "check") and not any(is_deferred(value_of(self, name)) for name in tunable_fields(self)):
        self.check()


def check_fields(self: Any) -> None:
    """Raises ValueError unless every `field` of a dataclass has a value of its type and in its bounds."""
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
        if isinstance(value, list | tuple) and any(tuple in (k, typing.get_origin(k)) for k in kinds):  # lists have no hash
            value = tuple(int(n) if isinstance(n, np.integer) else n for n in value)
            object.__setattr__(self, f.name, value)
        if isinstance(value, Tracer) or (value is None and type(None) in kinds):
            continue
        if f.metadata.get("tunable") and is_deferred(value):
            continue
        if Any in kinds and is_object(value) and not _is_hashable(value) and has_arrays(value):  # such as one of Equinox
            raise TypeError(f"{type(self).__name__}.{f.name}={name_of(value)} {MADE}")
        remedy = _remedy(value, kinds, f.metadata.get("bounds", {}))
        if f.metadata.get("tunable") and isinstance(value, str):
            remedy = f"{remedy}, or a schedule, such as 'linear:0.1'"
        if remedy:
            raise ValueError(f"{type(self).__name__}.{f.name}={shown(value)}: use {remedy}")
        if isinstance(value, numbers.Real) and type(value) not in (bool, int, float):
            # Of NumPy, which computes with few bits, or a fraction, which JSON does not have.
            object.__setattr__(self, f.name, int(value) if isinstance(value, numbers.Integral) else float(value))


def _remedy(value: Any, kinds: tuple[Any, ...], bounds: Mapping[str, float]) -> str | None:
    """What to use in place of a value that does not fit; None if it fits."""
    tests = {"above": operator.gt, "at least": operator.ge, "at most": operator.le, "below": operator.lt}
    within = lambda number: all(tests[relation](number, bound) for relation, bound in bounds.items())  # noqa: E731
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if options := [option for kind in kinds if typing.get_origin(kind) is Literal for option in typing.get_args(kind)]:
        if Any in kinds and (is_deferred(value) or is_object(value)):
            return None if _is_hashable(value) else "tuples in place of lists"
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
    """Whether a number of a config is the same in the whole program, and equal to `number`."""
    return not isinstance(value, Tracer) and value == number


def is_deferred(value: Any) -> bool:
    """Whether a value may stand for something that the program needs: a text with a colon, or a function."""
    return ":" in value if isinstance(value, str) else callable(value)


MADE = "is a module that has its parameters; give a function of a key that makes it: lambda key: ..."


def has_arrays(value: Any) -> bool:
    """Whether a value holds arrays, as a module does that is made."""
    return any(isinstance(x, jax.Array) for x in jax.tree.leaves(value))


def is_object(value: Any) -> bool:
    """Whether the value of a field may be no plain data: a module, a core, a function, or several."""
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
