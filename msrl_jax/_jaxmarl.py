"""JaxMARL's environments without the import of all of JaxMARL, which takes seconds and prints."""

import ast
import contextlib
import functools
import importlib
import importlib.util
import io
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from msrl_jax._put_off import put_off_packages

PREFIX = "jaxmarl:"
"""What stands before JaxMARL's names in the names of this package."""

_PACKAGES: dict[str, str] = dict.fromkeys(("ant_4x2", "halfcheetah_6x1", "hopper_3x1", "humanoid_9|8", "walker2d_2x3"), "brax")
"""Packages that JaxMARL needs for some environments, but does not install."""


_NEED_OBJECTS = ("LearnedPolicyEnemySMAX",)
"""Environments that take objects, here a policy and its parameters, and so can be made from Python alone."""


def package_of(name: str) -> str | None:
    """The package that an environment needs beside JaxMARL, if it needs one."""
    return "jaxrobotarium" if name.startswith("JaxRobotarium") else _PACKAGES.get(name)


def _file(module: str) -> Path | None:
    """The file of a module of JaxMARL, which is not imported; None if there is none."""
    spec = importlib.util.find_spec("jaxmarl")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], *module.split(".")[1:])
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


@functools.cache
def _body(module: str) -> list[ast.stmt]:
    """The code of a module of JaxMARL; nothing if there is none."""
    file = _file(module)
    return ast.parse(file.read_text(encoding="utf-8")).body if file else []


@functools.cache
def all_names() -> tuple[str, ...]:
    """JaxMARL's own names of its environments, read from the code of its registry; none if it is not installed."""
    for node in _body("jaxmarl.registration"):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "registered_envs":
            return tuple(ast.literal_eval(node.value))
    return tuple(load().registered_envs) if importlib.util.find_spec("jaxmarl") else ()


def available() -> tuple[str, ...]:
    """JaxMARL's own names of the environments that a name suffices to make here."""
    missing = {name for name in all_names() if (p := package_of(name)) and importlib.util.find_spec(p) is None}
    return tuple(name for name in all_names() if name not in {*missing, *_NEED_OBJECTS})


@functools.cache
def _table() -> dict[str, tuple[str, str]]:
    """Module and class (or function) of each environment by its name, as in `if env_id == NAME: env = CLASS(...)` of JaxMARL.

    Returns:
      The table. It lacks environments that the code makes in another form, so that all of JaxMARL must be imported.
    """
    found: dict[str, tuple[str, str]] = {}
    for node in (node for statement in _body("jaxmarl.registration") for node in ast.walk(statement)):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Compare) and ast.unparse(node.test.left) == "env_id":
            made, name = node.body[0], node.test.comparators[0]
            if isinstance(made, ast.Assign) and isinstance(made.value, ast.Call) and isinstance(name, ast.Constant):
                place = _defined("jaxmarl.environments", ast.unparse(made.value.func))
                found |= {str(name.value): place} if place else {}
    return found


def _defined(module: str, name: str) -> tuple[str, str] | None:
    """The module that defines a name, and the name there; packages import names from their modules. None if not found."""
    file = _file(module)
    if file is None or file.name != "__init__.py":
        return (module, name) if file else None
    for statement in (part for node in _body(module) for part in (node.body if isinstance(node, ast.Try) else [node])):
        if isinstance(statement, ast.ImportFrom) and statement.level == 1:
            for alias in statement.names:
                if name == (alias.asname or alias.name):
                    return _defined(f"{module}.{statement.module}", alias.name)
    return None


def make(name: str, **arguments: Any) -> Any:
    """Builds an environment of JaxMARL; imports only its module, unless JaxMARL is imported already.

    Args:
      name: one of `all_names`.
      **arguments: arguments of its constructor.

    Returns:
      The environment.
    """
    if "jaxmarl.registration" in sys.modules or name not in _table():
        return load().make(name, **arguments)
    put_off()
    module, found = _table()[name]
    return getattr(importlib.import_module(module), found)(**arguments)


def put_off() -> None:
    """Makes the import of modules of JaxMARL quick, unless JaxMARL is imported already."""
    if "jaxmarl" not in sys.modules:
        put_off_packages(module for module, _ in _table().values())


def load() -> ModuleType:
    """Imports all of JaxMARL."""
    with quiet():
        return importlib.import_module("jaxmarl.registration")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """JaxMARL prints while it is imported, and advises against some of its environments.

    One of its modules also replaces the standard streams by those that Python began with, so these are put off too.
    """
    streams, began_with = (sys.stdout, sys.stderr), sys.__stdout__
    sys.stdout = sys.__stdout__ = io.StringIO()  # type: ignore[misc]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.filterwarnings("ignore", "Brax System", UserWarning)
            yield
    finally:
        (sys.stdout, sys.stderr), sys.__stdout__ = streams, began_with  # type: ignore[misc]
