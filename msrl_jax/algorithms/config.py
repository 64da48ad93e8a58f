"""Configs: a config is the algorithm, one flat frozen class whose fields carry their bounds and a line of text.

Fields made with `tunable` change no shape and no branch of the program. They are the leaves of a config, which is a pytree, so
the members of one program may have them each for themselves.
"""

import copy
import dataclasses
import importlib
import math
import numbers
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol, TypeVar, dataclass_transform

import jax
import numpy as np
from jax.core import Tracer

from msrl_jax._spelling import nearest, suggestion

Activation = Literal["tanh", "relu", "elu", "gelu", "silu"]
NetworkKind = Literal["auto", "mlp", "cnn"]
Codec = Literal["bfloat16", "uint8", "scaled_uint8"]

T = TypeVar("T")


class Config(Protocol):
    """What an algorithm is: a class made with `config`.

    Attributes:
      name: the name of the algorithm in texts.
      many_agents: whether it trains several agents.
      offline: whether it learns from data alone, with no steps of environments.
    """

    name: ClassVar[str]
    many_agents: ClassVar[bool]
    offline: ClassVar[bool]

    def build(self, env: Any) -> Any:
        """Builds the `Agent` for one environment; raises TypeError or ValueError if they do not fit."""
        ...


ALGORITHMS: dict[str, type] = {}
"""The configs of all algorithms, by name."""


def field(
    *,
    default: T,
    doc: str,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    tunable: bool = False,
) -> T:
    """A field of a config.

    Args:
      default: its default.
      doc: a line of text: what it is, its unit, usual values.
      low: the smallest value; by default 1 for integers.
      above: a number that values exceed.
      high: the largest value.
      below: a number that exceeds values.
      tunable: whether the members of one program may have different values.

    Returns:
      The field, for a class made with `config`.
    """
    bounds = {"above": above, "at least": low, "at most": high, "below": below}
    about = {"doc": doc, "bounds": {k: v for k, v in bounds.items() if v is not None}, "tunable": tunable}
    return dataclasses.field(default=default, metadata=about)  # type: ignore[return-value]


def tunable(
    *,
    default: T,
    doc: str,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
) -> T:
    """A `field` of a number that the members of one program may have each for themselves: a leaf of the config."""
    return field(default=default, doc=doc, low=low, above=above, high=high, below=below, tunable=True)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field, tunable))
def config(name: str, *, many_agents: bool = False, offline: bool = False) -> Callable[[type[T]], type[T]]:
    """Makes a class the config of an algorithm, and registers the algorithm.

    The class lists fields, and has a method `build(env) -> Agent`. It may have the methods `check()`, which raises ValueError
    if fields do not fit each other, and `check_given(names)`, which does so if a field was given that has no effect.

    Args:
      name: the name of the algorithm, such as `"ppo"`.
      many_agents: whether its environments are `MultiAgentEnvironment`s.
      offline: whether it learns from data alone, with no steps of environments.

    Returns:
      A decorator. The class becomes a frozen dataclass with keyword arguments, checked when it is made, and a pytree.
    """

    if not isinstance(name, str) or not name.replace("_", "a").isalnum():
        raise ValueError(f"config({name!r}): give a name of letters, digits and _, such as @config('my_ppo')")

    def make(cls: type[T]) -> type[T]:
        vars_of: Any = cls
        _check_declaration(vars_of)
        vars_of.__post_init__ = _check
        new: Any = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        new.name, new.many_agents, new.offline = name, many_agents, offline
        leaves = tunable_fields(new)
        static = [f.name for f in dataclasses.fields(new) if f.name not in leaves]

        def flatten(config: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            return tuple(getattr(config, n) for n in leaves), tuple(getattr(config, n) for n in static)

        def unflatten(rest: tuple[Any, ...], values: Any) -> Any:
            made = object.__new__(new)  # not checked: leaves may be anything
            for n, value in (*zip(leaves, values, strict=True), *zip(static, rest, strict=True)):
                object.__setattr__(made, n, value)
            return made

        defaults = {f.name: f.default for f in dataclasses.fields(new)}
        _check_fields(unflatten(tuple(map(defaults.get, static)), map(defaults.get, leaves)))
        before = {n.lower(): c for n, c in ALGORITHMS.items()}.get(name.lower())
        if before is not None and (before.__module__, before.__qualname__) != (new.__module__, new.__qualname__):
            raise ValueError(f"an algorithm named {name!r} is registered already; choose another name")
        jax.tree_util.register_pytree_node(new, flatten, unflatten)
        ALGORITHMS[name] = new  # a cell of a notebook may define it again
        return new

    return make


def _check_declaration(cls: type) -> None:
    """Raises TypeError unless a class can be made a config."""
    where = f"the config {cls.__name__}"
    if not callable(getattr(cls, "build", None)):
        raise TypeError(f"{where} has no method build(env) -> Agent; give it one")
    if "__post_init__" in vars(cls):
        raise TypeError(f"{where} has a __post_init__, which would not run; name it check, which runs when a config is made")
    for name, kind in typing.get_type_hints(cls).items():
        about = getattr(vars(cls).get(name), "metadata", {})
        if typing.get_origin(kind) is not ClassVar and name not in Config.__annotations__ and "doc" not in about:
            raise TypeError(f"{where} has the field {name!r} without a default or a text; write field(default=..., doc=...)")
        if about.get("tunable") and float not in (kind, *typing.get_args(kind)):
            raise TypeError(f"{where} has the tunable field {name!r}, which is no float; use field, or float in its type")


def variant(base: type[T], name: str, algorithm: str, doc: str, **defaults: Any) -> type[T]:
    """Makes the config of an algorithm that is another one with other defaults.

    Args:
      base: the config of the other one.
      name: the name of the new class.
      algorithm: the name of the new algorithm.
      doc: its docstring.
      **defaults: the fields whose defaults differ, and their defaults.

    Returns:
      The config, which is no subclass of `base`.
    """
    parent: Any = base
    parts: dict[str, Any] = {k: v for k, v in vars(base).items() if not k.startswith("__")}
    for f in dataclasses.fields(parent):
        parts[f.name] = dataclasses.field(default=defaults.pop(f.name, f.default), metadata=f.metadata)
    assert not defaults, f"{base.__name__} has no field {', '.join(defaults)}"
    about = {"__doc__": doc, "__module__": base.__module__, "__annotations__": base.__annotations__}
    new: Any = type(name, (), parts | about)
    return config(algorithm, many_agents=parent.many_agents, offline=parent.offline)(new)


def names() -> list[str]:
    """The names of all algorithms."""
    return sorted(ALGORITHMS)


def get(algorithm: str | type) -> type:
    """Looks up the config of an algorithm.

    Args:
      algorithm: its name; `MODULE:CLASS` of a config that is defined elsewhere; or the config.

    Returns:
      The config, a class.

    Raises:
      TypeError: if it is neither.
      ValueError: on an unknown name; the message suggests the nearest one.
    """
    if isinstance(algorithm, type) and hasattr(algorithm, "build") and hasattr(algorithm, "many_agents"):
        if "many_agents" not in vars(algorithm):
            base = next(c.__name__ for c in algorithm.__mro__ if "many_agents" in vars(c))
            raise TypeError(
                f"{algorithm.__name__} is a subclass of the config {base}, and no config itself; decorate it with "
                "algorithms.config, under a name of its own"
            )
        return algorithm
    if not isinstance(algorithm, str):
        raise TypeError(f"the algorithm is {algorithm!r}; give a config such as PPO(), or a name: {', '.join(names())}")
    module, colon, name = algorithm.partition(":")
    if colon:
        here = os.getcwd()
        sys.path.insert(0, here)  # a console script has its own folder there
        try:
            return get(getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError) as error:
            remedy = "give MODULE:CLASS of a class made with algorithms.config"
            raise ValueError(f"algorithm {algorithm!r}: {error}; {remedy}") from None
        finally:
            sys.path.remove(here)
    found = {n.lower(): n for n in ALGORITHMS}.get(algorithm.lower())
    if found is None:
        raise ValueError(f"unknown algorithm {algorithm!r}{suggestion(algorithm, names())}; choose from {', '.join(names())}")
    return ALGORITHMS[found]


def make(algorithm: Any, overrides: Mapping[str, Any]) -> Any:
    """Makes the config of a run.

    Args:
      algorithm: what `get` takes, or a config whose fields are the defaults.
      overrides: fields to replace.

    Returns:
      The config.

    Raises:
      ValueError: on an unknown algorithm or field (the message suggests the nearest one), on an invalid value, and on a field
        that has no effect with the other fields.
    """
    given = dataclasses.is_dataclass(algorithm) and not isinstance(algorithm, type)
    source: Any = type(algorithm) if given else algorithm
    kind: Any = get(source)
    base: Any = algorithm if given else kind()
    known = [f.name for f in dataclasses.fields(base)]
    for name in overrides:
        if name not in known:
            near = suggestion(name, known)
            raise ValueError(f"{type(base).__name__} has no field {name!r}{near}; its fields are {', '.join(known)}")
    new: Any = dataclasses.replace(base, **overrides)
    if hasattr(new, "check_given"):
        new.check_given(overrides)
    return new


def tunable_fields(config: type) -> tuple[str, ...]:
    """The names of the fields of a config that the members of one program may have each for themselves."""
    return tuple(f.name for f in dataclasses.fields(config) if f.metadata.get("tunable"))


def field_docs(config: type) -> dict[str, str]:
    """The line of text of every field of a config."""
    return {f.name: f.metadata["doc"] for f in dataclasses.fields(config)}


def with_traced(config: Any, values: Mapping[str, Any]) -> Any:
    """A config in which some fields are numbers of a trace, which stand for numbers that were checked before."""
    traced = copy.copy(config)
    for name, value in values.items():
        object.__setattr__(traced, name, value)
    return traced


def is_constant(value: Any, number: float) -> bool:
    """Whether a number of a config is the same in the whole program, and equal to `number`."""
    return not isinstance(value, Tracer) and value == number


def _check(self: Any) -> None:
    """Checks a config that is made."""
    _check_fields(self)
    if hasattr(self, "check"):
        self.check()


def _check_fields(self: Any) -> None:
    """Raises ValueError unless every field has a value of its type and in its bounds."""
    hints = typing.get_type_hints(type(self))
    for f in dataclasses.fields(self):
        value, kind = getattr(self, f.name), hints[f.name]
        if isinstance(value, np.ndarray | jax.Array | np.bool_) and value.ndim == 0 and not isinstance(value, Tracer):
            value = value.item()
            object.__setattr__(self, f.name, value)
        kinds = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
        if isinstance(value, Tracer) or (value is None and type(None) in kinds):
            continue
        if remedy := _remedy(value, kinds, f.metadata.get("bounds", {})):
            raise ValueError(f"{type(self).__name__}.{f.name}={value!r}: use {remedy}")


def _remedy(value: Any, kinds: tuple[Any, ...], bounds: Mapping[str, float]) -> str | None:
    """What to use in place of a value that does not fit; None if it fits."""
    options = [option for kind in kinds if typing.get_origin(kind) is Literal for option in typing.get_args(kind)]
    if options:
        near = nearest(str(value), options) if value not in options else None
        return None if value in options else repr(near) if near else f"one of {sorted(options)}"
    if bool in kinds:
        return None if isinstance(value, bool) else "True or False"
    wanted = " and ".join(f"{relation} {bound:g}" for relation, bound in bounds.items())
    if float in kinds:
        try:
            number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
        except OverflowError:
            number = math.inf
        if not (math.isfinite(number) and _within(number, bounds)):
            several = ", or give the list to msrl.train: a member for each" if isinstance(value, list | tuple) else ""
            return f"a finite number {wanted}".rstrip() + several
        held = number == 0 or 1.2e-38 <= abs(number) <= 3.4e38
        return None if held else "a number that float32 holds, 0 or from 1.2e-38 to 3.4e38"
    if int in kinds:
        bounds = bounds if bounds else {"at least": 1}
        wanted = " and ".join(f"{relation} {bound:.0f}" for relation, bound in bounds.items())
        fits = isinstance(value, numbers.Integral) and not isinstance(value, bool) and _within(int(value), bounds)
        return None if fits else f"an integer of {wanted}"
    if any(typing.get_args(kind)[:1] == (int,) for kind in kinds):
        fits = isinstance(value, tuple) and value and all(type(n) is int and n >= 1 for n in value)
        return None if fits else "a tuple of positive integers, such as (64, 64)"
    return None


def _within(number: float, bounds: Mapping[str, float]) -> bool:
    tests = {"above": number.__gt__, "at least": number.__ge__, "at most": number.__le__, "below": number.__lt__}
    return all(tests[relation](bound) for relation, bound in bounds.items())
