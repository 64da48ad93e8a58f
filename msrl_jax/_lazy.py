"""Names of a package that are imported at their first use (PEP 562), so that a command that needs no JAX does not import it."""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def listed(stub: str) -> dict[str, tuple[str, str]]:
    """Reads the imports of a stub file.

    Args:
      stub: path of the file, which consists of lines `from MODULE import NAME as NAME`.

    Returns:
      The module and the name in it, by the name in the package.
    """
    body = ast.parse(Path(stub).read_text(encoding="utf-8")).body
    lines = [node for node in body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: (str(node.module), alias.name) for node in lines for alias in node.names}


def names_of(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Makes `__getattr__`, `__dir__` and `__all__` of a package from the stub next to it.

    Args:
      package: name of the package.
      file: path of its `__init__.py`.

    Returns:
      The three of them.
    """
    table = listed(f"{file}i")

    def find(name: str) -> Any:
        if name not in table:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        module, inner = table[name]
        if module == package:
            return importlib.import_module(f"{package}.{inner}")
        return getattr(importlib.import_module(module), inner)

    return find, lambda: sorted({*vars(sys.modules[package]), *table}), sorted(table)
