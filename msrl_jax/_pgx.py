"""Pgx's games without the import of all of pgx, which also brings what draws them."""

import ast
import functools
import importlib
import importlib.util
from pathlib import Path
from typing import Any

from msrl_jax._put_off import put_off_packages

PREFIX = "pgx:"
"""What stands before pgx's names in the names of this package."""


@functools.cache
def all_names() -> tuple[str, ...]:
    """Pgx's own names of its environments, read from its code; none if it is not installed."""
    spec = importlib.util.find_spec("pgx")
    if spec is None or not spec.submodule_search_locations:
        return ()
    code = Path(spec.submodule_search_locations[0], "core.py").read_text(encoding="utf-8")
    for node in ast.parse(code).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EnvId" and isinstance(node.value, ast.Subscript):
            return ast.literal_eval(node.value.slice)
    return ()


def games() -> tuple[str, ...]:
    """Pgx's names of its games of two players."""
    others = ("2048", "bridge_bidding", "sparrow_mahjong")
    return tuple(name for name in all_names() if name not in others and not name.startswith("minatar-"))


def make(name: str) -> Any:
    """Builds a game of pgx; imports only its module, unless pgx is imported already."""
    put_off_packages(["pgx.core"])
    return importlib.import_module("pgx.core").make(name)
