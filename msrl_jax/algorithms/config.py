"""Configs: a config is the algorithm, one flat frozen class whose fields carry their bounds and a line of text.

Fields made with `tunable` change no shape and no branch of the program. They are the leaves of a config, which is a pytree, so
the members of one program may have them each for themselves.
"""

import copy
import dataclasses
import difflib
import functools
import math
import numbers
import operator
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, dataclass_transform

import jax
import numpy as np
from jax.core import Tracer

from msrl_jax import _rooms
from msrl_jax.envs.privileged import with_privileged
from msrl_jax.fragments.support.checks import name_of, shown
from msrl_jax.fragments.support.tracebacks import entry

Activation = Literal["tanh", "relu", "elu", "gelu", "silu"]
NetworkKind = Literal["auto", "mlp", "cnn", "impala_cnn", "simba"] | Any  # or a module, or MODULE:NAME of one
CoreKind = Literal["gru", "lstm", "min_gru", "lru", "gtrxl"] | Any  # or a core, or MODULE:NAME of one
# NAME:parameter=value,... too; or an optax.GradientTransformation, or MODULE:NAME of one
OptimizerKind = Literal["adam", "adamw", "rmsprop", "sgd", "lion", "muon"] | Any
Codec = Literal["bfloat16", "uint8", "scaled_uint8"]
Normalization = Literal["minibatch", "batch", "none"]

T = TypeVar("T")


ALGORITHMS: _rooms.Registry[type] = _rooms.Registry("algorithms")
"""The configs of all algorithms, by name; those of optional rooms are imported when they are looked up."""

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

OF_RUNS = {
    "algo", "actors_at", "env", "policy", "total_steps", "seed", "seeds", "devices", "out", "resume", "chunk", "eval_episodes",
    "eval_every", "checkpoint_every", "keep_checkpoints", "time_limit", "guard", "record", "env_params", "pbt", "rank_by",
    "callbacks", "progress", "trust",
}  # fmt: skip
"""The arguments of `msrl.train`, which no field can have the name of."""


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


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field, tunable))
def config(
    name: str,
    *,
    many_agents: bool | None = False,
    offline: bool = False,
    privileged: bool = False,
    needs: Mapping[str, str] | None = None,
) -> Callable[[type[T]], type[T]]:
    """Makes a class the config of an algorithm, and registers the algorithm.

    The class lists fields, and has a method `build(env) -> Agent`. It may have the methods `check()`, which raises ValueError
    if fields do not fit each other, and `check_given(names)`, which does so if a field was given that has no effect.

    Args:
      name: the name of the algorithm, such as `"ppo"`.
      many_agents: whether its environments are `MultiAgentEnvironment`s; None if they can be.
      offline: whether it learns from data alone, with no steps of environments.
      privileged: whether its critics see an environment's `privileged_state`; `build` then gets `with_privileged(env)`.
      needs: with which values of another field some fields have an effect: `{"distribution=c51|qr": "num_atoms"}` refuses a
        `num_atoms` that is given with another `distribution`, `{"core!=none": "burn_in"}` a `burn_in` that is given without a
        core. Names of several fields are separated by spaces.

    Returns:
      A decorator. The class becomes a frozen dataclass with keyword arguments, checked when it is made, and a pytree; `name`,
      `many_agents`, `offline`, `privileged` and `needs`, by field, become attributes of it.
    """
    if not isinstance(name, str) or not name.replace("_", "a").isalnum():
        raise ValueError(f"config({name!r}): give a name of letters, digits and _, such as @config('my_ppo')")

    def make(cls: Any) -> Any:
        _check_declaration(cls)
        cls.__post_init__ = _check
        cls.build = _of_plain_fields(cls.build)
        new: Any = entry(dataclasses.dataclass(frozen=True, kw_only=True)(cls))
        new.name, new.many_agents, new.offline, new.privileged = name, many_agents, offline, privileged
        new.needs = {field: need for need, fields in (needs or {}).items() for field in fields.split()}
        leaves, known = tunable_fields(new), [f.name for f in dataclasses.fields(new)]
        static = [n for n in known if n not in leaves]
        if unknown := {*new.needs, *(need.partition("=")[0].rstrip("!") for need in new.needs.values())}.difference(known):
            raise TypeError(f"the config {new.__name__} has no field {min(unknown)!r}, which needs={needs} name")

        def flatten(config: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            return tuple(getattr(config, n) for n in leaves), tuple(getattr(config, n) for n in static)

        def unflatten(rest: tuple[Any, ...], values: Any) -> Any:
            made = object.__new__(new)  # not checked: leaves may be anything
            for n, value in (*zip(leaves, values, strict=True), *zip(static, rest, strict=True)):
                object.__setattr__(made, n, value)
            return made

        defaults = {f.name: f.default for f in dataclasses.fields(new)}
        check_fields(unflatten(tuple(map(defaults.get, static)), map(defaults.get, leaves)))
        is_of_room = _rooms.added("algorithms").get(name) == f"{new.__module__}:{new.__qualname__}"
        alike = [] if is_of_room else [ALGORITHMS[n] for n in ALGORITHMS if n.lower() == name.lower()]
        if any(before is not None and _place(before) != _place(new) for before in alike):
            raise ValueError(f"an algorithm named {name!r} is registered already; choose another name")
        jax.tree_util.register_pytree_node(new, flatten, unflatten)
        ALGORITHMS[name] = new  # a cell of a notebook may define it again
        return new

    return make


def _place(cls: type) -> tuple[str, str]:
    """The file and the name of a class: a program and the module of the same file, which may be imported too, are one place."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return os.path.realpath(file) if file else cls.__module__, cls.__qualname__


def tunable_fields(config: type) -> tuple[str, ...]:
    """The names of the fields of a config that the members of one program may have each for themselves."""
    return tuple(f.name for f in dataclasses.fields(config) if f.metadata.get("tunable"))


def variant(base: type[T], name: str, algorithm: str, doc: str, **defaults: Any) -> type[T]:
    """Makes the config of an algorithm that is another one with other defaults; it is no subclass of `base`."""
    parent: Any = base
    parts: dict[str, Any] = {k: v for k, v in vars(base).items() if not k.startswith("__")}
    for f in dataclasses.fields(parent):
        parts[f.name] = dataclasses.field(default=defaults.pop(f.name, f.default), metadata=f.metadata)
    assert not defaults, f"{base.__name__} has no field {', '.join(defaults)}"
    about = {"__doc__": doc, "__module__": base.__module__, "__annotations__": base.__annotations__}
    new: Any = type(name, (), parts | about)
    made = config(algorithm, many_agents=parent.many_agents, offline=parent.offline, privileged=parent.privileged)(new)
    made.needs = parent.needs
    return made


def _check_declaration(cls: type) -> None:
    """Raises TypeError unless a class can be made a config."""
    where = f"the config {cls.__name__}"
    if not callable(getattr(cls, "build", None)):
        raise TypeError(f"{where} has no method build(env) -> Agent; give it one")
    if parents := [base.__name__ for base in cls.__mro__[1:] if "many_agents" in vars(base)]:
        fact = f"{where} inherits from the config {parents[0]}, and configs are not subclassed"
        raise TypeError(f"{fact}; list its fields, and pass those of {parents[0]} on: {parents[0]}(name=self.name).build(env)")
    if "__post_init__" in vars(cls):
        raise TypeError(f"{where} has a __post_init__, which would not run; name it check, which runs when a config is made")
    for name, kind in typing.get_type_hints(cls).items():
        about = getattr(vars(cls).get(name), "metadata", {})
        if name in OF_RUNS:
            raise TypeError(f"{where} has the field {name!r}, but that is an argument of msrl.train; give it another name")
        if typing.get_origin(kind) is not ClassVar and "doc" not in about:
            raise TypeError(f"{where} has the field {name!r} without a default or a text; write field(default=..., doc=...)")
        if about.get("tunable") and float not in (kind, *typing.get_args(kind)):
            raise TypeError(f"{where} has the tunable field {name!r}, which is no float; use field, or float in its type")


def _check(self: Any) -> None:
    """Checks a config that is made; `words.check` checks what stands for something, and the rest of it then."""
    check_fields(self)
    if hasattr(self, "check") and not any(is_word(getattr(self, name)) for name in tunable_fields(type(self))):
        self.check()


def with_traced(config: Any, values: Mapping[str, Any]) -> Any:
    """A config in which some fields are numbers of a trace, which stand for numbers that were checked before."""
    traced = copy.copy(config)
    for name, value in values.items():
        object.__setattr__(traced, name, value)
    return traced


def _of_plain_fields(build: Callable[..., Any]) -> Callable[..., Any]:
    """The method `build` of a config: no text in place of an object, no schedule of a number; with what critics alone see."""

    @functools.wraps(build)
    def built(self: Any, env: Any) -> Any:
        hints = typing.get_type_hints(type(self))
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            may_be_word = f.metadata.get("tunable") or (Any in typing.get_args(hints[f.name]) and isinstance(value, str))
            if may_be_word and is_word(value):
                where = f"{type(self).__name__}.{f.name}={value!r}"
                raise ValueError(f"{where} stands for something: msrl_jax.algorithms.build(config, env) puts that in its place")
        return build(self, with_privileged(env) if self.privileged else env)

    return built


def check_fields(self: Any) -> None:
    """Raises ValueError unless every `field` of a dataclass has a value of its type and in its bounds."""
    hints = typing.get_type_hints(type(self))
    for f in dataclasses.fields(self):
        value, kind = getattr(self, f.name), hints[f.name]
        if isinstance(value, np.ndarray | jax.Array | np.bool_) and value.ndim == 0 and not isinstance(value, Tracer):
            value = value.item()
            object.__setattr__(self, f.name, value)
        kinds = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
        if isinstance(value, list | tuple) and any(tuple in (k, typing.get_origin(k)) for k in kinds):  # lists have no hash
            value = tuple(int(n) if isinstance(n, np.integer) else n for n in value)
            object.__setattr__(self, f.name, value)
        if isinstance(value, Tracer) or (value is None and type(None) in kinds):
            continue
        if f.metadata.get("tunable") and is_word(value):
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
        if Any in kinds and (is_word(value) or is_object(value)):
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


def is_word(value: Any) -> bool:
    """Whether a value may stand for something that the program needs: a text with a colon, or a function."""
    return ":" in value if isinstance(value, str) else callable(value)


MADE = "is a module that has its parameters; give a function of a key that makes it: lambda key: ..."


def has_arrays(value: Any) -> bool:
    """Whether a value holds arrays, as a module does that is made."""
    return any(isinstance(x, jax.Array) for x in jax.tree.leaves(value))


def is_object(value: Any) -> bool:
    """Whether the value of a field may be no plain data: a module, a core, a function, or several."""
    several = isinstance(value, tuple) and (hasattr(value, "_fields") or all(map(callable, value)))
    return callable(value) or hasattr(value, "apply") or hasattr(value, "step") or several


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
