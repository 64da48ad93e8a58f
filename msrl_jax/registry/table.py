"""The table of all algorithms, by name; the modules of optional rooms are imported when they are looked up."""

from msrl_jax._rooms import Registry, added
from msrl_jax.configs.config import DECLARED

ALGORITHMS: Registry[type] = Registry("algorithms", DECLARED)
"""The configs that `config` made, and those of optional rooms."""


def check_name(config: type) -> None:
    """Raises ValueError if an algorithm has the name of another one in an optional room."""
    place, name = f"{config.__module__}:{config.__qualname__}", str(getattr(config, "name"))  # noqa: B009
    if any(n.lower() == name.lower() and registered_place != place for n, registered_place in added("algorithms").items()):
        raise ValueError(f"an algorithm named {name!r} is registered already; choose another name")
