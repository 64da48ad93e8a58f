"""Writes TOML for config files: flat keys with values. To read it, use `tomllib`."""

import json
import textwrap
from collections.abc import Mapping
from typing import Any

WIDTH = 120


def value(x: Any) -> str:
    """Formats a value as TOML. TOML has no None, so None becomes the text "None", as on the command line."""
    if isinstance(x, bool):
        return str(x).lower()
    if isinstance(x, int | float):
        return repr(x)
    if isinstance(x, Mapping):
        return f"{{{', '.join(f'{name} = {value(part)}' for name, part in x.items())}}}"
    if isinstance(x, list | tuple):
        return f"[{', '.join(map(value, x))}]"
    return json.dumps(str(x), ensure_ascii=False)


def flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens nested tables to dotted keys; a table that describes an object stays one value."""
    found: dict[str, Any] = {}
    for key, x in table.items():
        is_table = isinstance(x, Mapping) and x and [*x] != ["object"]
        found |= {f"{key}.{name}": part for name, part in flat(x).items()} if is_table else {key: x}
    return found


def comment(text: str) -> str:
    """Formats text as the lines of a comment."""
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, WIDTH - 2))


def entry(key: str, x: Any, doc: str = "", *, given: bool = True) -> str:
    """Formats a key as lines, commented out if its value is not given."""
    key = json.dumps(key) if "." in key else key
    return f"{comment(doc)}{'' if given else '#'}{key} = {value(x)}\n"
