"""gymnax's environments without the import of all of gymnax.

`import gymnax` imports every environment, and some of those import pyplot, pandas and scipy to draw themselves. So its packages
are put off: each is there, but its `__init__` runs at the first use of a name that it makes. Modules of environments use no
such name. For everybody else `import gymnax` gives the whole of it, as ever.
"""

import ast
import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from msrl_jax._put_off import put_off_packages

_REGISTRY = "gymnax.registration"


def put_off() -> None:
    """Makes the import of modules of gymnax quick, unless gymnax is imported already."""
    if "gymnax" in sys.modules:
        return
    put_off_packages(module for module, _ in _table().values())


@functools.cache
def _table() -> dict[str, tuple[str, str]]:
    """Module and class of each environment of gymnax by its name, read from the code of its registry.

    Returns:
      The table; empty if the code has another form, so that all of gymnax must be imported.
    """
    spec = importlib.util.find_spec("gymnax")
    assert spec is not None and spec.submodule_search_locations, "gymnax is a dependency of this package"
    body = ast.parse(Path(spec.submodule_search_locations[0], "registration.py").read_text(encoding="utf-8")).body
    imports = [(node.module, alias.name) for node in body if isinstance(node, ast.ImportFrom) for alias in node.names]
    modules = {name: f"{package}.{name}" for package, name in imports}
    for node in body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_builtins" and isinstance(node.value, ast.Dict):
            names = [ast.literal_eval(key) for key in node.value.keys if key]
            paths = [ast.unparse(value).split(".") for value in node.value.values]
            if all(len(path) == 2 and path[0] in modules for path in paths):
                return {name: (modules[module], cls) for name, (module, cls) in zip(names, paths, strict=True)}
    return {}


def names() -> list[str]:
    """The names of gymnax's environments, and of those that were registered with it."""
    known = [] if _REGISTRY in sys.modules else list(_table())
    return known or list(importlib.import_module(_REGISTRY).registered_envs)


def make(name: str, **arguments: Any) -> tuple[Any, Any]:
    """Builds an environment of gymnax; imports only its module, unless gymnax is imported already.

    Args:
      name: one of `names`.
      **arguments: arguments of its constructor.

    Returns:
      The environment and its parameters.
    """
    if _REGISTRY in sys.modules or name not in _table():
        return importlib.import_module(_REGISTRY).make(name, **arguments)
    put_off()
    module, cls = _table()[name]
    env = getattr(importlib.import_module(module), cls)(**arguments)
    return env, env.default_params
