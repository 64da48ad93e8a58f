"""Configs: a config is the algorithm, a frozen class whose fields have bounds and a line of documentation.

A config is a pytree. Its leaves are the fields made with `tunable`, which change neither shapes nor branches of the program, so
each population member of one program may have its own values. A field with alternatives is a union of classes made with
`option`, each with the numbers that it needs. A field of an option has a dotted name, such as `exploration.base`.
"""

import dataclasses
import functools
import os
import sys
import typing
from collections.abc import Callable
from typing import Any, Literal, TypeVar, dataclass_transform

import jax

from msrl_jax.configs.classes import class_of_fields
from msrl_jax.configs.deferred import is_deferred
from msrl_jax.configs.fields import Tunable as Tunable
from msrl_jax.configs.fields import TunableOrNone as TunableOrNone
from msrl_jax.configs.fields import field as field
from msrl_jax.configs.fields import option_classes
from msrl_jax.configs.fields import tunable as tunable
from msrl_jax.envs.privileged import with_privileged

Activation = Literal["tanh", "relu", "elu", "gelu", "silu"]
NetworkKind = Literal["auto", "mlp", "cnn", "impala_cnn", "simba"] | Any  # or a module, or its MODULE:NAME
# also NAME:parameter=value,...; or an optax.GradientTransformation, or its MODULE:NAME
OptimizerKind = Literal["adam", "adamw", "rmsprop", "sgd", "lion", "muon"] | Any
Normalization = Literal["minibatch", "batch", "none"]
CodecName = Literal["bfloat16", "uint8", "scaled_uint8"]
Actions = Literal["discrete", "integers", "bounded", "unbounded"]  # the last two are of floats
ALL_ACTIONS: tuple[Actions, ...] = typing.get_args(Actions)

T = TypeVar("T")


DECLARED: dict[str, type] = {}
"""The configs whose modules have been imported, by the name of the algorithm."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field, tunable))
def config(
    name: str,
    *,
    multi_agent: bool | None = False,
    offline: bool = False,
    privileged: bool = False,
    actions: tuple[Actions, ...] = (),
) -> Callable[[type[T]], type[T]]:
    """Makes a class the config of an algorithm, and registers the algorithm.

    The class declares fields and has a method `build(env) -> Agent`. It may have a method `check()`, which raises ValueError if
    fields contradict each other.

    Args:
      name: the name of the algorithm, such as `"ppo"`.
      multi_agent: whether its environments are `MultiAgentEnvironment`s; None if both kinds are supported.
      offline: whether it is an offline RL algorithm, which takes no environment steps during training.
      privileged: whether its critics see an environment's `privileged_state`; `build` then gets `with_privileged(env)`.
      actions: the kinds of action spaces for which messages of other algorithms recommend it.

    Returns:
      A decorator. The class becomes a pytree and a frozen dataclass with keyword arguments, checked on construction; the
      arguments become its attributes.
    """
    if not isinstance(name, str) or not name.replace("_", "a").isalnum():
        raise ValueError(f"config({name!r}): give a name of letters, digits and _, such as @config('my_ppo')")

    def make(cls: Any) -> Any:
        where = f"the config {cls.__name__}"
        _check_class(cls, where)
        cls.build = _check_resolved(cls.build)
        new = class_of_fields(cls, where, kw_only=True)
        new.name, new.multi_agent, new.offline, new.privileged, new.actions = name, multi_agent, offline, privileged, actions
        new.declared_in = _place(new)  # found now: the module of a file that fails to run is forgotten
        same_name = [previous for n, previous in DECLARED.items() if n.lower() == name.lower()]
        if any(previous is not None and vars(previous)["declared_in"] != new.declared_in for previous in same_name):
            raise ValueError(f"an algorithm named {name!r} is registered already; choose another name")
        DECLARED[name] = new  # a notebook cell may redefine it
        return new

    return make


def _place(cls: type) -> tuple[str, str]:
    """Returns the file and the name of a class: the same for a program and for the module imported from the same file."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return os.path.realpath(file) if file else cls.__module__, cls.__qualname__


def variant(base: type[T], name: str, algorithm: str, doc: str, **defaults: Any) -> type[T]:
    """Makes the config of an algorithm that differs from `base` only in its defaults; it does not subclass `base`."""
    parent: Any = base
    parts: dict[str, Any] = {k: v for k, v in vars(base).items() if not k.startswith("__")}
    parts["build"] = parent.build.__wrapped__  # `config` wraps it
    for f in dataclasses.fields(parent):
        parts[f.name] = dataclasses.field(default=defaults.pop(f.name, f.default), metadata=f.metadata)
    assert not defaults, f"{base.__name__} has no field {', '.join(defaults)}"
    about = {"__doc__": doc, "__module__": base.__module__, "__annotations__": base.__annotations__}
    new: Any = type(name, (), parts | about)
    attributes = {attribute: getattr(parent, attribute) for attribute in ("multi_agent", "offline", "privileged", "actions")}
    return config(algorithm, **attributes)(new)


def _check_class(cls: type, where: str) -> None:
    """Raises TypeError unless `config` can make the class a config."""
    if not callable(getattr(cls, "build", None)):
        raise TypeError(f"{where} has no method build(env) -> Agent; give it one")
    if parents := [base.__name__ for base in cls.__mro__[1:] if "multi_agent" in vars(base)]:
        fact = f"{where} inherits from the config {parents[0]}, and configs are not subclassed"
        raise TypeError(f"{fact}; list its fields, and pass those of {parents[0]} on: {parents[0]}(name=self.name).build(env)")
    if "__post_init__" in vars(cls):
        raise TypeError(f"{where} has a __post_init__, which would not run; name it check, which runs when a config is made")


def _check_resolved(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `build`: rejects texts that stand for objects and schedules; adds the privileged state that critics need."""

    @functools.wraps(build)
    def build_checked(self: Any, env: Any) -> Any:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            is_word = isinstance(value, str) and Any in typing.get_args(f.type)
            is_number = f.metadata.get("tunable") or option_classes(f)
            words = jax.tree.leaves(value, is_leaf=is_deferred) if is_number else [value] * is_word
            if any(map(is_deferred, words)):
                where = f"{type(self).__name__}.{f.name}={value!r}"
                raise ValueError(f"{where} is not resolved yet; call msrl_jax.algorithms.build(config, env), which resolves it")
        return build(self, with_privileged(env) if self.privileged else env)

    return build_checked
