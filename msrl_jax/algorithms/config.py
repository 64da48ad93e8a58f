"""Configs: a config is the algorithm, one frozen class whose fields carry their bounds and a line of text.

Fields made with `tunable` change no shape and no branch of the program. They are the leaves of a config, which is a pytree, so
the members of one program may have them each for themselves. Where a config has alternatives, its field is a union of classes
made with `option`, each with the numbers that it needs. A field of an option has a dotted name, such as `exploration.base`.
"""

import dataclasses
import functools
import os
import sys
import typing
from collections.abc import Callable
from typing import Any, Literal, TypeVar, dataclass_transform

from msrl_jax import _rooms
from msrl_jax.algorithms import fields
from msrl_jax.algorithms.fields import Codec as Codec
from msrl_jax.algorithms.fields import Tunable as Tunable
from msrl_jax.algorithms.fields import TunableOrNone as TunableOrNone
from msrl_jax.algorithms.fields import all_fields, is_deferred, value_of
from msrl_jax.algorithms.fields import field as field
from msrl_jax.algorithms.fields import tunable as tunable
from msrl_jax.envs.privileged import with_privileged
from msrl_jax.fragments.support.tracebacks import entry

Activation = Literal["tanh", "relu", "elu", "gelu", "silu"]
NetworkKind = Literal["auto", "mlp", "cnn", "impala_cnn", "simba"] | Any  # or a module, or MODULE:NAME of one
CoreKind = Literal["gru", "lstm", "min_gru", "lru", "gtrxl"] | Any  # or a core, or MODULE:NAME of one
# NAME:parameter=value,... too; or an optax.GradientTransformation, or MODULE:NAME of one
OptimizerKind = Literal["adam", "adamw", "rmsprop", "sgd", "lion", "muon"] | Any
Normalization = Literal["minibatch", "batch", "none"]

T = TypeVar("T")


ALGORITHMS: _rooms.Registry[type] = _rooms.Registry("algorithms")
"""The configs of all algorithms, by name; those of optional rooms are imported when they are looked up."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field, tunable))
def config(
    name: str,
    *,
    many_agents: bool | None = False,
    offline: bool = False,
    privileged: bool = False,
) -> Callable[[type[T]], type[T]]:
    """Makes a class the config of an algorithm, and registers the algorithm.

    The class lists fields, and has a method `build(env) -> Agent`. It may have a method `check()`, which raises ValueError if
    fields do not fit each other.

    Args:
      name: the name of the algorithm, such as `"ppo"`.
      many_agents: whether its environments are `MultiAgentEnvironment`s; None if they can be.
      offline: whether it learns from data alone, with no steps of environments.
      privileged: whether its critics see an environment's `privileged_state`; `build` then gets `with_privileged(env)`.

    Returns:
      A decorator. The class becomes a frozen dataclass with keyword arguments, checked when it is made, and a pytree; `name`,
      `many_agents`, `offline` and `privileged` become attributes of it.
    """
    if not isinstance(name, str) or not name.replace("_", "a").isalnum():
        raise ValueError(f"config({name!r}): give a name of letters, digits and _, such as @config('my_ppo')")

    def make(cls: Any) -> Any:
        _check_declaration(cls)
        cls.__post_init__ = fields.check_made
        cls.build = _of_plain_fields(cls.build)
        new: Any = entry(dataclasses.dataclass(frozen=True, kw_only=True)(cls))
        new.name, new.many_agents, new.offline, new.privileged = name, many_agents, offline, privileged
        fields.register(new)
        is_of_room = _rooms.added("algorithms").get(name) == f"{new.__module__}:{new.__qualname__}"
        alike = [] if is_of_room else [ALGORITHMS[n] for n in ALGORITHMS if n.lower() == name.lower()]
        if any(before is not None and _place(before) != _place(new) for before in alike):
            raise ValueError(f"an algorithm named {name!r} is registered already; choose another name")
        ALGORITHMS[name] = new  # a cell of a notebook may define it again
        return new

    return make


def _place(cls: type) -> tuple[str, str]:
    """The file and the name of a class: a program and the module of the same file, which may be imported too, are one place."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return os.path.realpath(file) if file else cls.__module__, cls.__qualname__


def variant(base: type[T], name: str, algorithm: str, doc: str, **defaults: Any) -> type[T]:
    """Makes the config of an algorithm that is another one with other defaults; it is no subclass of `base`."""
    parent: Any = base
    parts: dict[str, Any] = {k: v for k, v in vars(base).items() if not k.startswith("__")}
    for f in dataclasses.fields(parent):
        parts[f.name] = dataclasses.field(default=defaults.pop(f.name, f.default), metadata=f.metadata)
    assert not defaults, f"{base.__name__} has no field {', '.join(defaults)}"
    about = {"__doc__": doc, "__module__": base.__module__, "__annotations__": base.__annotations__}
    new: Any = type(name, (), parts | about)
    return config(algorithm, many_agents=parent.many_agents, offline=parent.offline, privileged=parent.privileged)(new)


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
    fields.check_declaration(cls, where)


def _of_plain_fields(build: Callable[..., Any]) -> Callable[..., Any]:
    """The method `build` of a config: no text in place of an object, no schedule of a number; with what critics alone see."""

    @functools.wraps(build)
    def built(self: Any, env: Any) -> Any:
        for name, f in all_fields(self).items():
            value = value_of(self, name)
            may_be_word = f.metadata.get("tunable") or (Any in typing.get_args(f.type) and isinstance(value, str))
            if may_be_word and is_deferred(value):
                where = f"{type(self).__name__}.{name}={value!r}"
                raise ValueError(f"{where} stands for something: msrl_jax.algorithms.build(config, env) puts that in its place")
        return build(self, with_privileged(env) if self.privileged else env)

    return built
