"""Writes TOML for config files: flat keys with values. To read it, use `tomllib`."""

import json
import textwrap
from collections.abc import Mapping
from typing import Any

WIDTH = 120


def value(content: object) -> str:
    """Formats a value as TOML. TOML has no None, so None becomes the text "None", as on the command line."""
    if isinstance(content, bool):
        return str(content).lower()
    if isinstance(content, int | float):
        return repr(content)
    if isinstance(content, Mapping):
        return f"{{{', '.join(f'{name} = {value(part)}' for name, part in content.items())}}}"
    if isinstance(content, list | tuple):
        return f"[{', '.join(map(value, content))}]"
    return json.dumps(str(content), ensure_ascii=False)


def flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens nested tables to dotted keys; a table that describes an object stays one value."""
    flat_table: dict[str, Any] = {}
    for key, content in table.items():
        is_table = isinstance(content, Mapping) and content and [*content] != ["object"]
        flat_table |= {f"{key}.{name}": part for name, part in flat(content).items()} if is_table else {key: content}
    return flat_table


def comment(text: str) -> str:
    """Formats text as the lines of a comment."""
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, WIDTH - 2))


def entry(key: str, content: object, doc: str = "", *, is_active: bool = True) -> str:
    """Formats a key as lines, commented out if its value is not given."""
    key = json.dumps(key) if "." in key else key
    return f"{comment(doc)}{'' if is_active else '#'}{key} = {value(content)}\n"
