"""Environments by name: `make`, `register`, `names`."""

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax

from msrl_jax._rooms import Registry
from msrl_jax.envs.base import Environment
from msrl_jax.envs.mazes import PointMaze
from msrl_jax.envs.suites import catalog
from msrl_jax.fragments.support import checks, naming
from msrl_jax.fragments.support.checks import shown, suggestion
from msrl_jax.fragments.support.text_values import parse_spec
from msrl_jax.fragments.support.tracebacks import entry

_factories: Registry[Callable[..., Environment]] = Registry("environments", {"PointMaze": PointMaze})


@entry
def register(name: str, factory: Callable[..., Environment]) -> None:
    """Registers an environment for `make`, `train` and the command line.

    Args:
      name: the name for `make`.
      factory: a function or class that takes the keyword arguments of `make` and returns an environment.

    Raises:
      TypeError: if the factory cannot be called.
      ValueError: if the name is taken.
    """
    if not callable(factory):
        raise TypeError(f"register({name!r}): {shown(factory)} cannot be called; pass a class or a function")
    checks.add("environment", dict.fromkeys(names()), name, factory)
    _factories[name] = factory


@entry
def make(name: str, **params: Any) -> Environment:
    """Builds an environment.

    Args:
      name: a registered name; one of gymnax (`"CartPole-v1"`, `"Breakout-MinAtar"`); one of a suite after its prefix
        (`"brax:halfcheetah"`, `"jaxmarl:MPE_simple_spread_v3"`); or a class or function after its module
        (`"my_module:MyEnv"`), which is also looked up in the working directory. `names` lists all but the last. A class needs
        `reset` and `step`; a function needs a return annotation that is an environment. Parameters may follow:
        `"CartPole-v1:max_steps_in_episode=100"`.
      **params: arguments of the registered factory, class or function; for gymnax, fields of the environment's `EnvParams`
        (`max_steps_in_episode=100`) and arguments of its constructor; for a suite, see `make` in its adapter.

    Returns:
      The environment; a `MultiAgentEnvironment` if it has several agents.

    Raises:
      TypeError: if the name is not a string.
      ImportError: if a suite is needed and not installed; the message says how to install it.
      ValueError: if the environment is unknown, if the name in a module is not an environment, or if the
        environment lacks such a parameter.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of the environment is {shown(name)}; use one, such as 'CartPole-v1'; envs.names() lists all")
    if name not in _factories:
        name, in_name = parse_spec(name, prefixes=True)
        params = in_name | params
    if name in _factories:
        return _call_factory(name, _factories[name], params)
    if suite := catalog.suite_of(name):
        suite.check_installed()
        with _built(name, params):
            adapter = importlib.import_module(f"msrl_jax.envs.suites.{suite.prefix}_env")
            return adapter.make(name.partition(":")[2], **params)
    if ":" in name:
        return _from_module(name, params)
    if name not in catalog.gymnax_names():
        naming.check_no_file("environment", name)
        raise ValueError(
            f"unknown environment {name!r}{suggestion(name, names())}; envs.names() lists all, envs.register adds one"
        )
    with _built(name, params):
        from msrl_jax.envs.suites import gymnax_env

        return gymnax_env.make(name, **params)


@contextlib.contextmanager
def _built(name: str, params: dict[str, Any]) -> Iterator[None]:
    """Names the environment and its parameters in errors that do not; suites may transfer their constants."""
    try:
        with jax.transfer_guard("allow"):
            yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        if not params or (isinstance(error, ValueError) and name.rpartition(":")[2] in str(error)):
            raise
        raise ValueError(f"{name} cannot be made with {params}: {error}") from error


def is_custom(name: str) -> bool:
    """Whether `make` runs custom code for a name: a class or function of a module, or one that a suite's parameter names."""
    if name in _factories:
        return False
    name, params = parse_spec(name, prefixes=True)
    suite = catalog.suite_of(name)
    return ":" in name and name not in _factories and (suite is None or any(key in suite.code for key in _keys(params)))


def _keys(value: object) -> Iterator[Any]:
    """Yields the keys of dicts in a value, at any depth."""
    if isinstance(value, dict):
        yield from value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ():
        yield from _keys(item)


def _from_module(name: str, params: dict[str, Any]) -> Environment:
    """Makes an environment by a class or a function of a module, `MODULE:NAME`."""
    module, _, attribute = name.partition(":")
    if module in names():
        raise ValueError(f"cannot read {attribute!r} in {name!r}; write parameters as {module}:key=value,key=value")
    near = suggestion(module, catalog.SUITES)
    description = (
        f"an environment: a class with reset and step, or a function that returns one{near and f', or use a suite{near}'}"
    )
    return _call_factory(name, naming.imported("environment", name, description, _is_made, is_made=True), params)


def _call_factory(name: str, factory: Callable[..., Environment], params: dict[str, Any]) -> Environment:
    """Calls a factory; raises ValueError if it does not take these parameters."""
    signature = inspect.signature(factory)
    try:
        signature.bind(**params)
    except TypeError as error:
        names_known = ", ".join(signature.parameters) or "none"
        raise ValueError(f"environment {name!r}: {error}; its parameters are: {names_known}") from None
    return factory(**params)


def _is_made(value: object) -> bool:
    """Whether a value is an environment, which has two functions or, if simulated on the host, makes its own copies."""
    return naming.makes(
        value,
        lambda kind: (
            all(callable(getattr(kind, f, None)) for f in ("reset", "step"))
            or (callable(getattr(kind, "vectorize", None)) and hasattr(kind, "on_host"))
        ),
    )


def names() -> list[str]:
    """Returns the names of all environments: registered ones, those of gymnax, and those of installed suites."""
    return [*_factories, *catalog.names()]
