"""Converts MODULE:NAME to an object, and an object to MODULE:NAME.

Importing a module runs its code, and so does calling what it contains. A name is therefore imported only

    if the user chose it         that is, typed it. A name in a folder, a file or a message of another process needs trust,
                                 `trust=True` or `--trust`: see `check_trust`
    outside the standard library whose modules are never imported for a name
    if it is of the right kind   which is checked before it is called: an object or a class of that kind, or a function whose
                                 return annotation is of that kind
"""

import contextlib
import functools
import importlib
import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msrl_jax.fragments.support.checks import suggestion


class TrustError(ValueError):
    """A folder, a file or another process names custom code, which you have not allowed to run."""


FOLDERS: list[str] = []
"""The working directories that `imported` has searched, for processes that this one starts; they come last there."""


def check_trust(where: str, names: Mapping[str, object], trust: bool) -> None:
    """Raises TrustError if `where` names custom code (`names`, by argument), unless it is trusted."""
    if names and trust is not True:  # trust="no" does not count
        arguments = ", ".join(f"{name}={text!r}" for name, text in names.items())
        raise TrustError(
            f"{where} names code to run, {arguments}; if you trust its author, pass trust=True (--trust on the command line), "
            f"or pass {' and '.join(names)} again yourself, as train and Result.load allow"
        )


def is_path(text: object) -> bool:
    """Whether a string has the form MODULE:NAME."""
    module, colon, name = text.partition(":") if isinstance(text, str) else ("", "", "")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), *name.split(".")])


def check_no_file(kind: str, path: str) -> None:
    """Raises ValueError, with the correct name, if FILE.py or FILE.py:NAME is given instead of MODULE:NAME."""
    file, _, name = path.partition(":")
    if file.endswith(".py"):
        module, folder = ".".join(Path(file).with_suffix("").parts), ""
        if not all(part.isidentifier() for part in module.split(".")):
            module, folder = Path(file).stem, f", in the folder {Path(file).parent} or where Python looks"
        raise ValueError(f"{kind} {path!r} is a file; write {module}:{name or 'NAME'}{folder}")


def imported(kind: str, path: str, what: str, fits: Callable[[Any], bool], *, is_made: bool = False) -> Any:
    """Imports the object that MODULE:NAME names; modules are also looked up in the working directory.

    Args:
      kind: its purpose, for messages: "policy".
      path: MODULE:NAME.
      what: what it must be, for messages: "a class with a method layout(devices, sizes)".
      fits: whether an object is that.
      is_made: whether it may be a function whose annotation says that it makes one.

    Raises:
      ValueError: if the object does not exist, if it does not fit, if it is in the standard library, or if MODULE is a file.
    """
    check_no_file(kind, path)
    module, _, name = path.partition(":")
    if not is_path(path):
        raise ValueError(f"{kind} {path!r}: give MODULE:NAME of {what}")
    _check_not_standard(kind, path, module, what)
    working_directory = os.getcwd()
    sys.path.insert(0, working_directory)  # for a console script, this entry is its own folder
    try:
        module_object = importlib.import_module(module)
        if working_directory not in FOLDERS:
            FOLDERS.append(working_directory)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"{kind} {path!r}: {error}; give MODULE:NAME of {what}, from {working_directory} or where Python looks"
        ) from None
    finally:
        sys.path.remove(working_directory)
    if not hasattr(module_object, name):
        public_names = [key for key in vars(module_object) if not key.startswith("_")]
        hint = suggestion(name, public_names)
        raise ValueError(f"{kind} {path!r}: module {module!r} has no attribute {name!r}{hint}; give MODULE:NAME of {what}")
    value = getattr(module_object, name)
    if isinstance(value, type) or inspect.isroutine(value):
        _check_not_standard(kind, path, str(value.__module__), what)
    if not fits(value):
        callee, remedy = _underlying_callable(value), "give MODULE:NAME of one"
        if is_made and inspect.isroutine(callee) and _return_annotation(callee) is None:
            function_name = callee.__name__ if callee.__name__.isidentifier() else name
            remedy = f"annotate what it returns: def {function_name}(...) -> ..., a class that its module has"
        raise ValueError(f"{kind} {path!r} is not {what}; {remedy}")
    return value


def _check_not_standard(kind: str, path: str, module: str, what: str) -> None:
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise ValueError(
            f"{kind} {path!r} is in Python's standard library; give MODULE:NAME of {what}, and rename your file if it has "
            "the name of a standard module"
        )


def makes(value: Any, fits: Callable[[type], bool]) -> bool:
    """Whether calling a value makes an object of a class that fits: the class itself, or a function with such an annotation."""
    callee = _underlying_callable(value)
    if isinstance(callee, type):
        return fits(callee)
    annotation = _return_annotation(callee)
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = [typing.get_origin(kind) or kind for kind in (typing.get_args(annotation) if is_union else (annotation,))]
    return all(isinstance(kind, type) and kind is not type(None) and fits(kind) for kind in kinds)


def paths() -> str:
    """Returns a `PYTHONPATH` for child processes that finds what this one finds; Python's option `-P` excludes its
    directory.
    """
    entries = [path for path in sys.path if path]
    if "" in sys.path:
        with contextlib.suppress(FileNotFoundError):
            entries.insert(0, os.getcwd())
    return os.pathsep.join([*entries, *FOLDERS])


def _underlying_callable(value: Any) -> Any:
    """Returns the class or function that calling an object runs: that of a `partial`, or a method `__call__`."""
    while isinstance(value, functools.partial):
        value = value.func
    is_object = callable(value) and not isinstance(value, type) and not inspect.isroutine(inspect.unwrap(value))
    return type(value).__call__ if is_object else value


def _return_annotation(callee: Any) -> Any:
    """Returns the return annotation of a function; None if there is none, or if its module lacks that name."""
    function: Any = inspect.unwrap(callee)
    annotations = getattr(function, "__annotations__", {})
    with contextlib.suppress(Exception):  # a string annotation may be any expression
        hints = types.SimpleNamespace(__annotations__={"return": annotations["return"]})  # ignore those of arguments
        return typing.get_type_hints(hints, getattr(function, "__globals__", {}))["return"]
    return None


def reference(value: object) -> str | dict[str, str]:
    """How files refer to an object: MODULE:NAME, if `imported` finds it by that; otherwise its repr, under "object"."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module != "__main__" and name and getattr(sys.modules.get(str(module)), name, None) is value:
        return f"{module}:{name}"
    return {"object": " ".join(re.sub(r" at 0x[0-9a-f]+", "", repr(value)).split())}
