"""Names with parameters as text: `NAME:key=value,key=value`."""

import ast
import re
from typing import Any


def parse_spec(spec: str, *, prefixes: bool = False) -> tuple[str, dict[str, Any]]:
    """Splits `"NAME:key=value,key=value"` into the name and the arguments.

    Args:
      spec: a name, and optionally a colon and keyword arguments. Values are Python literals, or bare words, which may be calls:
        `trajectory_codec=frame_stack(4)`. Words may begin with a digit: `scenario=3s_vs_5z`.
      prefixes: whether a name may have a prefix, which is followed by a colon: `jaxmarl:MPE_simple_spread_v3:num_agents=5`.

    Returns:
      The name and the arguments.

    Raises:
      ValueError: if the text after the colon cannot be read, or gives a key twice.
    """
    name, colon, text = spec.partition(":")
    if prefixes and colon and "=" not in (second := text.partition(":")[0]):
        name, colon, text = f"{name}:{second}", *text.partition(":")[1:]
    if not colon:
        return name, {}
    try:
        call = ast.parse(f"_({_WORD.sub(_quoted, text)})", mode="eval").body
        assert isinstance(call, ast.Call) and not call.args
        values = [(str(k.arg), _literal(k.value)) for k in call.keywords]
    except (SyntaxError, ValueError, AssertionError):
        raise ValueError(f"cannot read {text!r} in {spec!r}; write {name}:key=value,key=value") from None
    keys = [key for key, _ in values]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"{spec!r} gives {twice[0]!r} twice; give it once")
    return name, dict(values)


_WORD = re.compile(r"((?:^|,)\s*\w+\s*=\s*)(\d\w*[a-zA-Z]\w*)(?=\s*(?:,|$))")
"""A key, and its value that begins with a digit and has a letter."""


def _quoted(found: re.Match[str]) -> str:
    """The key and its value, in quotes unless it is a number such as 1e5."""
    key, word = found.groups()
    try:
        ast.literal_eval(word)
    except (SyntaxError, ValueError):
        word = repr(word)
    return key + word


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_literal(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    words = isinstance(node, ast.Name | ast.Attribute | ast.Call)
    return ast.unparse(node) if words else ast.literal_eval(node)
