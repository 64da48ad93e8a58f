"""Packages whose `__init__` runs only when somebody needs it.

The `__init__` of a suite of environments imports all of them, with what they need to draw themselves. Modules of single
environments need none of it.
"""

import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterable
from types import ModuleType
from typing import Any

_lock = threading.RLock()


class _PutOff(ModuleType):
    """A package whose `__init__` runs at the first use of a name that is no module of the package."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # what Python and its tools ask of any module
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name)
        if importlib.util.find_spec(f"{self.__name__}.{name}"):
            return importlib.import_module(f"{self.__name__}.{name}")
        _run(self)
        return getattr(self, name)

    def __dir__(self) -> list[str]:
        _run(self)
        return dir(self)


def _run(package: ModuleType) -> None:
    with _lock:
        if type(package) is _PutOff:
            package.__class__ = ModuleType  # pyright: ignore[reportAttributeAccessIssue]
            assert package.__spec__ is not None and package.__spec__.loader is not None
            try:
                package.__spec__.loader.exec_module(package)
            except BaseException:
                package.__class__ = _PutOff
                raise


def put_off_packages(modules: Iterable[str]) -> None:
    """Puts off the packages above modules, but those that are imported already.

    Args:
      modules: names of modules, with dots.
    """
    packages = {".".join(parts[:n]) for parts in (module.split(".") for module in modules) for n in range(1, len(parts))}
    for name in sorted(packages - set(sys.modules)):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        module.__class__ = _PutOff
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
