"""Options: objects that select one of several alternatives in a field of a config.

An option is a small frozen class with the numbers that one alternative needs. Its text is `NAME:field=value,...`, such as
`per_env:0.3`, or `MODULE:CLASS(field=value,...)` for a class outside of this package. A protocol says what an algorithm calls;
its options may be declared in any file.
"""

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, dataclass_transform, overload

from msrl_jax.configs.classes import class_of_fields, fields_of
from msrl_jax.configs.deferred import is_object
from msrl_jax.configs.fields import OPTIONS, field, is_option, option_classes, path_of, tunable
from msrl_jax.fragments.support.checks import shown, suggestion
from msrl_jax.fragments.support.naming import imported, is_path
from msrl_jax.fragments.support.text_values import OWN_CALL, Call, parts_of, read_call, split_specs, write_argument, write_call

T = TypeVar("T")


@overload
@dataclass_transform(frozen_default=True, field_specifiers=(field, tunable))
def option(cls: type[T], /) -> type[T]: ...


@overload
@dataclass_transform(frozen_default=True, field_specifiers=(field, tunable))
def option(*, of: Any) -> Callable[[type[T]], type[T]]: ...


def option(cls: Any = None, /, *, of: Any = ()) -> Any:
    """Makes a class an option: one alternative of a config field.

    The class declares fields, as a config does. It may have a method `check()`, which raises ValueError if they contradict each
    other, and a method `check_config(config)`, which does so if they contradict other fields of the config. Its text is
    `NAME:field=value,...`; for example, `PerEnv` has the name `per_env`, unless it has an attribute `option`, another name.

    Args:
      cls: the class.
      of: a protocol, or a tuple of them; fields with these types accept the option, and so do fields that name its class.

    Returns:
      The class as a frozen dataclass, checked on construction, and a pytree whose leaves are its tunable numbers.

    Raises:
      TypeError: if `of` is not a protocol, or the class lacks one of its methods.
      ValueError: if the protocol has another option of this name, or the name cannot be part of a text.
    """
    if _is_protocol(cls):
        raise TypeError(f"@option({cls.__name__}): write @option(of={cls.__name__}) above your class")
    protocols = of if isinstance(of, tuple) else (of,)
    for protocol in protocols:
        if not _is_protocol(protocol):
            raise TypeError(f"option(of={shown(protocol)}): give a protocol of options, such as QTarget")
    return option_of(cls, ()) if cls is not None else lambda cls: option_of(cls, protocols)


def _is_protocol(value: object) -> bool:
    return getattr(value, "_is_protocol", False)


def option_of(cls: Any, protocols: tuple[type, ...]) -> Any:
    """Makes a class an option, and registers it as one of each protocol."""
    if not isinstance(cls, type):
        raise TypeError(f"option makes a class an option, and {shown(cls)} is not a class")
    for protocol in protocols:
        _check_methods(cls, protocol)
    name = vars(cls).get("option", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower())
    if not isinstance(name, str) or not re.fullmatch("[a-z][a-z0-9_]*", name) or name == "none":
        raise ValueError(f"{cls.__name__}.option={name!r}: use small letters, digits and _, such as 'my_option'")
    new: Any = cls
    new.option, new.read, new.__str__ = name, staticmethod(read_option), lambda self: option_text(self)
    new = class_of_fields(new, f"the option {cls.__name__}")
    for protocol in protocols:
        registered = OPTIONS.setdefault(protocol, {})
        previous = registered.get(name, new)
        # A notebook cell may redefine an option.
        if (previous.__module__, previous.__qualname__) != (new.__module__, new.__qualname__):
            where = f"{protocol.__name__} has the option {name!r} already, {previous.__module__}.{previous.__qualname__}"
            if "__main__" in (previous.__module__, new.__module__):
                where += f"; if it is the same class, pass {cls.__name__}(...) itself, not a text; else"
            raise ValueError(f"{where}; give the class {cls.__name__} another name")
        registered[name] = new
    return new


def _check_methods(cls: type, protocol: type) -> None:
    """Raises TypeError unless a class has the methods of a protocol, with the same number of arguments."""
    for name, method in vars(protocol).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        expected, implementation = inspect.signature(method), getattr(cls, name, None)
        if not callable(implementation):
            raise TypeError(f"the option {cls.__name__} has no method {name}; {protocol.__name__} has {name}{expected}")
        try:
            positional = [n for n, p in expected.parameters.items() if p.kind is not p.KEYWORD_ONLY]
            inspect.signature(implementation).bind(*positional, **{n: n for n in expected.parameters.keys() - {*positional}})
        except TypeError:
            takes = f"the method {name}{inspect.signature(implementation)} of the option {cls.__name__}"
            raise TypeError(f"{takes} does not take the arguments of {protocol.__name__}: {name}{expected}") from None


def read_option(where: str, value: Any, field: dataclasses.Field[Any]) -> Any:
    """Returns the value of a field with options, parsed if it is text; raises ValueError if it is none of them.

    If the field accepts `Any`, custom objects and their MODULE:NAME are returned as they are.
    """
    if Any in parts_of(field.type) and _is_custom(value, field):
        return value
    value = parse_option(where, value, field) if isinstance(value, str | Call) else value
    if type(value) in option_classes(field) or (value is None and type(None) in parts_of(field.type)):
        return value
    if any(isinstance(value, kind) for kind in option_classes(field)):
        raise ValueError(f"{where}={shown(value)}: the class {type(value).__name__} is not an option; decorate it with option")
    if is_option(value) and isinstance(value, type):
        raise ValueError(f"{where}={value.__name__} is a class; give an object, such as {value.__name__}()")
    if isinstance(value, list | tuple):
        raise ValueError(f"{where}={shown(value)}: give one option, or use msrl.sweep, which tries several")
    raise ValueError(f"{where}={shown(value)}: use {_names(field)}")


def _is_custom(value: object, field: dataclasses.Field[Any]) -> bool:
    if isinstance(value, str):
        return is_path(value) and value.partition(":")[0] not in [kind.option for kind in option_classes(field)]
    return is_object(value) and not is_option(value)


def option_text(option: Any, *, full: bool = False) -> str:
    """Returns the text of an option, without default values unless `full`."""
    return write_value(option, full=full, nested=False)


def write_value(value: Any, *, full: bool = False, nested: bool = True) -> str:
    """Returns the text of an argument of an option, in the form that `read_call` parses."""
    if is_option(value):
        name = path_of(type(value)) or value.option
        kwargs = {name: write_value(x, full=full) for name, x in fields_of(value, full=full).items()}
        return write_call(name, kwargs, nested=":" in name or (nested and bool(kwargs)))
    return write_argument(value)


def parse_option(where: str, value: str | Call, field: dataclasses.Field[Any]) -> Any:
    """Parses the text of an option; raises ValueError, which suggests the nearest name, if it is invalid."""
    if value in ("None", "none") and type(None) in parts_of(field.type):
        return None
    options = {kind.option: kind for kind in option_classes(field)}
    if custom_class := import_custom_class(where, value, field):
        value = str(value).partition(":")[2]
    names = [re.split("[:(]", part)[0].strip() for part in split_specs(str(value))]
    if len(names) > 1 and options.keys() >= {*names}:
        fact = f"{where}={shown(str(value))} has {len(names)} options"
        raise ValueError(f"{fact}; give one, or use msrl.sweep, which tries several")
    try:
        call = read_call(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if (kind := custom_class or options.get(call.name)) is None:
        raise ValueError(f"{where}={shown(str(value))}: use {_names(field)}{suggestion(call.name, options)}")
    try:
        inspect.signature(kind).bind(*call.args, **call.kwargs)
    except TypeError:
        defaults = {f.name: write_value(f.default) for f in dataclasses.fields(kind)}
        near = "".join(suggestion(name, defaults) for name in sorted(call.kwargs.keys() - defaults))
        arguments = ", ".join(f"{name}={x}" for name, x in defaults.items()) or "nothing"
        raise ValueError(f"{where}: {call.name} takes {arguments}{near}") from None
    with located(where, kind):
        return kind(*call.args, **call.kwargs)


def import_custom_class(where: str, value: str | Call, field: dataclasses.Field[Any]) -> Any:
    """Imports the class in `MODULE:CLASS` or `MODULE:CLASS(field=value,...)`; None if the text is not of this form."""
    match = OWN_CALL.fullmatch(value.strip()) if isinstance(value, str) else None
    protocols = [kind.__name__ for kind in parts_of(field.type) if kind in OPTIONS]
    if match is None or not protocols or match["path"].partition(":")[0] in [kind.option for kind in option_classes(field)]:
        return None
    description = f"a class made with option(of={protocols[0]})"
    return imported(
        where, match["path"], description, lambda candidate: any(candidate is kind for kind in option_classes(field))
    )


def _names(field: dataclasses.Field[Any]) -> str:
    """Lists the options of a field, for messages."""
    words = {type(None): "None", Any: "your own object, or MODULE:NAME of one"}
    kinds, names = parts_of(field.type), [kind.option for kind in option_classes(field)]
    custom_forms = [] if Any in kinds else ["MODULE:CLASS of your own" for kind in kinds if kind in OPTIONS]
    return "one of " + ", ".join([*names, *custom_forms, *(word for kind, word in words.items() if kind in kinds)])


@contextlib.contextmanager
def located(place: str, option: Any) -> Iterator[None]:
    """Adds the place to the errors of an option: `DQN.replay.n_step` instead of `Replay.n_step`."""
    try:
        yield
    except ValueError as error:
        name = getattr(option, "__name__", type(option).__name__)
        raise ValueError(re.sub(rf"^{name}\b", place, str(error))) from None
