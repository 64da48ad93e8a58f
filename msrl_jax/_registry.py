"""Entries by name: shared by the registries of algorithms, environments, policies and codecs."""

from collections.abc import Mapping
from typing import TypeVar

from msrl_jax._spelling import suggestion

T = TypeVar("T")


def add(kind: str, table: dict[str, T], name: str, value: T) -> T:
    """Adds an entry.

    Args:
      kind: kind of the entries, for messages.
      table: the entries by name.
      name: the name of the new entry.
      value: the new entry; adding it again changes nothing.

    Returns:
      `value`.

    Raises:
      ValueError: if another entry has the name.
    """
    if table.setdefault(name, value) is not value:
        article = "an" if kind[0] in "aeiou" else "a"
        raise ValueError(f"{article} {kind} named {name!r} is registered already; choose another name")
    return value


def find(kind: str, table: Mapping[str, T], name: str) -> T:
    """Looks up an entry.

    Args:
      kind: kind of the entries, for messages.
      table: the entries by name.
      name: the name; case is ignored.

    Returns:
      The entry.

    Raises:
      TypeError: if the name is no text.
      ValueError: if the name is unknown; suggests the nearest.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of the {kind} is {name!r}; choose from {', '.join(map(repr, sorted(table)))}")
    by_lower = {other.lower(): other for other in table}
    found = name if name in table else by_lower.get(name.lower())
    if found is None:
        raise ValueError(f"unknown {kind} {name!r}{suggestion(name, table)}; choose from {', '.join(sorted(table))}")
    return table[found]
