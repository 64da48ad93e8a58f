"""Reads the parameters of a function from its source: to import its module may import JAX, which takes seconds."""

import __future__

import ast
import copy
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ABOVE = Path(__file__).parents[2]


class _Names(dict[str, Any]):
    """The names of a module of this package, as far as annotations and defaults of parameters need them.

    Constants, aliases of types and names of the standard library have their values; others are empty classes.
    """

    def __init__(self, module: str):
        file = _file_of(module)
        assert file is not None, module
        self.body = ast.parse(file.read_text("utf-8")).body

    def __missing__(self, name: str) -> Any:
        for node in self.body:
            if isinstance(node, ast.ImportFrom):
                originals = {alias.asname or alias.name: alias.name for alias in node.names}
                if name in originals:
                    return _imported_value(str(node.module), originals[name])
            if isinstance(node, ast.Import) and name in [alias.name for alias in node.names]:
                return importlib.import_module(name) if name in sys.stdlib_module_names else _Unknown(name, (), {})
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if name in [target.id for target in targets if isinstance(target, ast.Name)]:
                    return eval(compile(ast.Expression(node.value), name, "eval"), {}, self)
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return _Unknown(name, (), {})
        raise KeyError(name)  # a builtin


_names_of = functools.cache(_Names)


def _file_of(module: str) -> Path | None:
    base = _ABOVE.joinpath(*module.split("."))
    return next(
        (path for path in (base / "__init__.pyi", base / "__init__.py", base.with_suffix(".py")) if path.exists()), None
    )


def _imported_value(module: str, name: str) -> Any:
    if module.partition(".")[0] in sys.stdlib_module_names:
        return getattr(importlib.import_module(module), name)
    is_ours = _file_of(module) is not None and _file_of(f"{module}.{name}") is None
    return _names_of(module)[name] if is_ours else _Unknown(name, (), {})


class _Unknown(type):
    """The type of what stands for a class or a module that is not imported."""

    def __getattr__(cls, name: str) -> "_Unknown":
        if name.startswith("_"):
            raise AttributeError(name)
        return _Unknown(name, (), {})


@functools.cache
def of_source(place: str) -> Callable[..., None]:
    """Returns a function with the signature and the docstring of `MODULE:NAME`, or `MODULE:CLASS.NAME`, that does nothing."""
    module, _, path = place.partition(":")
    names = _names_of(module)
    body, (*classes, name) = names.body, path.split(".")
    for class_name in classes:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == class_name)
    function = copy.copy(next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == name))
    function.body, function.decorator_list = function.body[:1], []  # the docstring
    exec(compile(ast.Module([function], []), place, "exec", __future__.annotations.compiler_flag), {}, names)
    stub = names.pop(name)
    stub.__signature__ = inspect.signature(stub, globals={}, locals=names, eval_str=True)
    return stub
