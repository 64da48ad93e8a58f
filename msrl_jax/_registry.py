"""Entries by name: shared by the registries of algorithms, environments, policies and codecs."""

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from msrl_jax._spelling import suggestion

T = TypeVar("T")


def add(kind: str, table: dict[str, T], name: str, value: T) -> T:
    """Adds an entry of a kind, and returns it; raises ValueError if another entry has the name."""
    if table.setdefault(name, value) is not value:
        article = "an" if kind[0] in "aeiou" else "a"
        raise ValueError(f"{article} {kind} named {name!r} is registered already; choose another name")
    return value


def find(kind: str, table: Mapping[str, T], name: str) -> T:
    """Looks up an entry of a kind, in any case; raises ValueError, which suggests the nearest, if the name is unknown."""
    if not isinstance(name, str):
        raise TypeError(f"the name of the {kind} is {name!r}; choose from {', '.join(map(repr, sorted(table)))}")
    by_lower = {other.lower(): other for other in table}
    found = name if name in table else by_lower.get(name.lower())
    if found is None:
        raise ValueError(f"unknown {kind} {name!r}{suggestion(name, table)}; choose from {', '.join(sorted(table))}")
    return table[found]


def imported(kind: str, path: str, what: str) -> Any:
    """The object that `MODULE:CLASS` names; modules are looked for in the working directory too."""
    module, _, name = path.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)  # a console script has its own folder there
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{kind} {path!r}: {error}; give MODULE:CLASS of {what}") from None
    finally:
        sys.path.remove(here)
