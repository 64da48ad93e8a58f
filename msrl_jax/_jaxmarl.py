"""JaxMARL: the names of its environments without its import, and its import, which is long and prints."""

import ast
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import io
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

PREFIX = "jaxmarl:"
"""What stands before JaxMARL's names in the names of this package."""

INSTALL = "pip install 'msrl-jax[marl]'"
_OLDEST = (0, 2)

_PACKAGES: dict[str, str] = dict.fromkeys(("ant_4x2", "halfcheetah_6x1", "hopper_3x1", "humanoid_9|8", "walker2d_2x3"), "brax")
"""Packages that JaxMARL needs for some environments, but does not install."""


def package_of(name: str) -> str | None:
    """The package that an environment needs beside JaxMARL, if it needs one."""
    return "jaxrobotarium" if name.startswith("JaxRobotarium") else _PACKAGES.get(name)


@functools.cache
def all_names() -> tuple[str, ...]:
    """JaxMARL's own names of its environments, read from the code of its registry; none if it is not installed."""
    spec = importlib.util.find_spec("jaxmarl")
    if spec is None or not spec.submodule_search_locations:
        return ()
    file = Path(spec.submodule_search_locations[0], "registration.py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body if file.exists() else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "registered_envs":
            return tuple(ast.literal_eval(node.value))
    return tuple(load().registered_envs)


def names() -> list[str]:
    """The names of the environments that can be made here, with `PREFIX`."""
    return [PREFIX + name for name in all_names() if (p := package_of(name)) is None or importlib.util.find_spec(p)]


def load() -> ModuleType:
    """Imports JaxMARL.

    Returns:
      The package.

    Raises:
      ImportError: if it is not installed, or too old; the message says how to install it.
    """
    needed = f"environments named {PREFIX}... need jaxmarl 0.2 or later"
    try:
        version = importlib.metadata.version("jaxmarl")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"{needed}, which is not installed; install it with: {INSTALL}") from error
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise ImportError(f"{needed}, and {version} is installed; install it with: {INSTALL}")
    with quiet():
        return importlib.import_module("jaxmarl")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """JaxMARL prints while it is imported and traced, and advises against some of its environments.

    One of its modules also replaces the standard streams by those that Python began with, so these are put off too.
    """
    streams, began_with = (sys.stdout, sys.stderr), sys.__stdout__
    sys.stdout = sys.__stdout__ = io.StringIO()  # type: ignore[misc]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        (sys.stdout, sys.stderr), sys.__stdout__ = streams, began_with  # type: ignore[misc]
