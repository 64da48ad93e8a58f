"""Optional rooms: folders of this package that import the core, and that no module of the core imports.

A room has a file `room.toml` with what it adds: a table for each kind, and in it names with `MODULE:NAME` within the room.

    [algorithms]
    alphazero = "alphazero:AlphaZero"

A `Registry` of that kind then has the name, and imports the module when somebody looks the name up.
"""

import functools
import importlib
import tomllib
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@functools.cache
def rooms() -> Mapping[str, Path]:
    """Returns the table of each room, by the name of its folder."""
    return {file.parent.name: file for file in sorted(Path(__file__).parent.glob("*/room.toml"))}


@functools.cache
def added(kind: str) -> Mapping[str, str]:
    """Returns the entries of a kind in all rooms: `MODULE:NAME` by name. Imports no room."""
    entries = {}
    for room, file in rooms().items():
        for name, place in tomllib.loads(file.read_text(encoding="utf-8")).get(kind, {}).items():
            entries[name] = f"{__package__}.{room}.{place}"
    return entries


class Registry(MutableMapping[str, T]):
    """The entries of a kind by name: those that were put in, and those of rooms, which are imported when they are looked up.

    Args:
      kind: the name of the tables in `room.toml`, such as "algorithms".
      entries: entries of the core, which the registry changes.
    """

    def __init__(self, kind: str, entries: MutableMapping[str, T] | None = None):
        self._entries: MutableMapping[str, T] = {} if entries is None else entries
        self._places = dict(added(kind))

    def __getitem__(self, name: str) -> T:
        if name not in self._entries and name in self._places:
            module, _, attribute = self._places[name].partition(":")
            self._entries[name] = getattr(importlib.import_module(module), attribute)
        return self._entries[name]

    def __setitem__(self, name: str, entry: T) -> None:
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        self._entries.pop(name, None)
        self._places.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter({**self._entries, **self._places})

    def __len__(self) -> int:
        return len({**self._entries, **self._places})
