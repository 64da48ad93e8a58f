"""Loads algorithms from files by path: `my_ppo.py`, or `my_ppo.py:PPO` if a file has several configs."""

import hashlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from msrl_jax.fragments.support.checks import suggestion
from msrl_jax.registry.table import ALGORITHMS

_LOADED: dict[str, tuple[bytes, ModuleType]] = {}
"""The text and the module of each file that was loaded by its path."""


def is_file(algorithm: str) -> bool:
    """Whether a text is the path of an algorithm's file."""
    return _parts(algorithm) is not None


def _parts(algorithm: str) -> re.Match[str] | None:
    return re.fullmatch(r"(?P<file>.+\.py)(:(?P<config>\w+))?", algorithm, re.DOTALL)


def load(algorithm: str) -> type:
    """Loads the config in a file. The file runs as a module once, and again if it has changed since.

    Raises:
      ValueError: if the file does not exist or fails to run, and unless it has exactly one config, or the named one.
    """
    match = _parts(algorithm)
    assert match is not None
    path, name = os.path.abspath(os.path.expanduser(match["file"])), match["config"]
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        cause = "the file does not exist" if isinstance(error, FileNotFoundError) else error.strerror
        raise ValueError(f"the algorithm {path} cannot be read: {cause}; give the path of a file with a config") from None
    kinds = configs(_module(path, text))
    if not kinds:
        raise ValueError(f"{path} has no config; decorate a class with a method build with msrl_jax.algorithms.config")
    if name is None and len(kinds) > 1:
        raise ValueError(f"{path} has the configs {', '.join(kinds)}; say which: {match['file']}:{next(iter(kinds))}")
    if name is not None and name not in kinds:
        raise ValueError(f"{path} has no config {name!r}{suggestion(name, kinds)}; it has {', '.join(kinds)}")
    return kinds[name or next(iter(kinds))]


def newest(config: type) -> type:
    """Returns a config as its file has it now, if `load` has loaded it; otherwise the config."""
    path = file_of(config.__module__)
    return load(f"{path}:{config.__qualname__}") if path in _LOADED else config


def configs(module: ModuleType) -> dict[str, Any]:
    """Returns the configs that a module itself defines, by class name."""
    classes = (c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__)
    return {c.__name__: c for c in classes if "multi_agent" in vars(c) and hasattr(c, "build")}


def _module(path: str, text: bytes) -> ModuleType:
    """Returns the module of a file: one that is already loaded, unless this module loaded it and the file has changed."""
    name = _name(path)
    previous = sys.modules.get(name)
    if previous is not None and _LOADED.get(path, (text, previous)) == (text, previous):
        return previous
    spec = importlib.util.spec_from_loader(name, SourceFileLoader(name, path))
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    previous_configs = {} if previous is None else {config.name: config for config in configs(previous).values()}
    for former_name in previous_configs:  # its class may have another name now
        ALGORITHMS.pop(former_name, None)
    sys.path.insert(0, os.path.dirname(path))  # so that the file can import modules in its folder
    try:
        exec(compile(text, path, "exec"), vars(module))
    except Exception as error:
        sys.modules.pop(name) if previous is None else sys.modules.update({name: previous})
        ALGORITHMS.update(previous_configs)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = error.lineno if isinstance(error, SyntaxError) and error.filename == path else lines[-1] if lines else "?"
        cause = error.msg if isinstance(error, SyntaxError) else error
        raise ValueError(f"{path}, line {line}: {type(error).__name__}: {cause}; correct the file") from error
    finally:
        sys.path.remove(os.path.dirname(path))
    _LOADED[path] = text, module
    return module


def _name(path: str) -> str:
    """Returns the module name for a file: the name that `import` would use, unless that is another module."""
    stem = Path(path).stem
    if stem in sys.modules:
        is_other = file_of(stem) != path
    else:
        spec = importlib.util.find_spec(stem) if stem.isidentifier() else None
        is_other = not stem.isidentifier() or (spec is not None and spec.origin not in (None, path))
    return stem if not is_other else re.sub(r"\W", "_", stem) + "_" + hashlib.sha256(path.encode()).hexdigest()[:8]


def file_of(module: str) -> str:
    """Returns the file of a module; an empty string if the module is not loaded or has no file."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return os.path.abspath(file) if file else ""


def reference(config: type) -> str:
    """Returns a reference for `algorithms.get`: PATH:CLASS, valid in any folder, for a user's file; else MODULE:CLASS."""
    module = config.__module__
    file = file_of(module) if module != "__main__" and "." not in module else ""
    is_custom = is_file(file) and "site-packages" not in file
    return f"{file if is_custom else module}:{config.__qualname__}"


def saved(about: Mapping[str, Any]) -> str:
    """Returns a reference to the algorithm of a saved run; if its file is gone, looks in the working directory."""
    if about["class"].startswith("msrl_jax."):
        return about["algorithm"]
    match = _parts(about["class"])
    if match and not os.path.exists(match["file"]) and os.path.exists(local_file := os.path.basename(match["file"])):
        return f"{local_file}:{match['config']}"
    return about["class"]
