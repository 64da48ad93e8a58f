"""Observations of several parts: nested dicts and tuples of arrays, and the names that the arrays have in files.

The name of an array is its path: `obs/position` is the entry `position` of a dict, and `obs/0` the first entry of a tuple.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from msrl_jax.envs import Dict, Space, Tuple

NESTED = ("obs", "next_obs")
"""The fields of a data set that may have parts."""


def named(value: Any, name: str) -> dict[str, Any]:
    """Names the parts of a value.

    Args:
      value: nested dicts and tuples, or something else, which is the only part.
      name: the name of the value.

    Returns:
      The parts by their paths, which begin with `name`.

    Raises:
      ValueError: if there is no part, or if a name of a part cannot be one in a path.
    """
    if not isinstance(value, Mapping | tuple):
        return {name: value}
    if not value:
        raise ValueError(f"{name} is an empty {type(value).__name__}, which data sets cannot hold; give it a part")
    found: dict[str, Any] = {}
    for key, part in sorted(value.items()) if isinstance(value, Mapping) else enumerate(value):
        if isinstance(value, Mapping) and (not isinstance(key, str) or not key or "/" in key or key.isdigit()):
            raise ValueError(
                f"{name} has a part with the name {key!r}, which data sets cannot hold, as its path would be that of another "
                "part; name it by text that has no '/' and is no number"
            )
        found |= named(part, f"{name}/{key}")
    return found


def nested(arrays: Mapping[str, Any], name: str) -> Any:
    """Puts parts together: the inverse of `named`.

    Args:
      arrays: the parts by their paths; others are ignored.
      name: the name of the value.

    Returns:
      The value.

    Raises:
      ValueError: if a tuple lacks a part.
    """
    if name in arrays:
        return arrays[name]
    keys = sorted({path[len(name) + 1 :].partition("/")[0] for path in arrays if path.startswith(f"{name}/")})
    if not all(key.isdigit() for key in keys):
        return {key: nested(arrays, f"{name}/{key}") for key in keys}
    if lacking := [str(i) for i in range(len(keys)) if str(i) not in keys]:
        raise ValueError(f"{name} has the parts {', '.join(keys)} of a tuple, but not {name}/{lacking[0]}; add it")
    return tuple(nested(arrays, f"{name}/{i}") for i in range(len(keys)))


def fields_of(paths: Iterable[str]) -> dict[str, None]:
    """The fields that paths lead into, in the order in which they come."""
    return dict.fromkeys(path.partition("/")[0] if path.startswith(tuple(f"{f}/" for f in NESTED)) else path for path in paths)


def spaces_of(space: Space, name: str) -> dict[str, Space]:
    """The spaces of the parts of a value by their paths, as `named` has them."""

    def by_part(space: Space) -> Any:
        if isinstance(space, Dict):
            return {key: by_part(part) for key, part in space.spaces.items()}
        return tuple(map(by_part, space.spaces)) if isinstance(space, Tuple) else space

    return named(by_part(space), name)
