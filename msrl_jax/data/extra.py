"""Imports of optional packages."""

import importlib
from types import ModuleType


def require(module: str, what: str) -> ModuleType:
    """Imports a package of the extra `data`.

    Args:
      module: name of the module.
      what: name of the format that needs it, for the message.

    Returns:
      The module.

    Raises:
      ImportError: if it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{what} needs the package {package!r}; install it with: pip install 'msrl-jax[data]'") from error
