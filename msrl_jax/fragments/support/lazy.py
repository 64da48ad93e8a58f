"""Names of a package that are imported on first use (PEP 562), so that a command that needs no JAX does not import it."""

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def names_of(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Makes `__getattr__`, `__dir__` and `__all__` of a package from `from MODULE import NAME as NAME` in its stub."""
    lines = re.findall(r"^from (\S+) import (\w+)", Path(f"{file}i").read_text(encoding="utf-8"), re.MULTILINE)
    modules = {name: module for module, name in lines}

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        if modules[name] == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(modules[name]), name)

    return find, lambda: sorted({*vars(sys.modules[package]), *modules}), sorted(modules)
