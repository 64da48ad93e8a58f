"""Values as text: `NAME:key=value,key=value`, whose values are literals, words, or calls: `uniform(0, 1)`, `uniform:0:1`."""

import ast
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from msrl_jax.fragments.support.checks import suggestion


def parts_of(kind: Any) -> tuple[Any, ...]:
    """The members of a union of types; another type alone."""
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def read_literal(text: str) -> Any:
    """Reads a number, None, or several of them between commas, as in Python; anything else is text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text


class Call(NamedTuple):
    """The content of `NAME`, `NAME:ARGUMENTS` or `NAME(ARGUMENTS)`; arguments are literals, words (as strings) and calls."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


def read_call(text: str) -> Call:
    """Parses a name and its arguments, which are written as in a Python call; nothing is evaluated.

    Raises:
      ValueError: if it cannot be parsed, or has an argument twice.
    """
    name, colon, arguments = text.strip().partition(":")
    try:
        node = ast.parse(f"{name}({arguments})" if colon and name.isidentifier() else text.strip(), mode="eval").body
        found = _argument(node)
    except (SyntaxError, RecursionError, MemoryError, ValueError, TypeError) as error:
        fact = f": {error}" if isinstance(error, _Twice) else ""
        raise ValueError(f"cannot read {text!r}{fact}; write NAME or NAME:argument=value,argument=value") from None
    found = Call(found) if isinstance(node, ast.Name) else found
    if not isinstance(found, Call):
        raise ValueError(f"cannot read {text!r}; write NAME or NAME:argument=value,argument=value")
    return found


class _Twice(ValueError):
    pass


def _argument(node: ast.expr) -> Any:
    match node:
        case ast.Name(name):
            return name
        case ast.Call(ast.Name(name)):
            keys = [keyword.arg for keyword in node.keywords if keyword.arg is not None]
            if len(keys) < len(node.keywords):
                raise ValueError("** is not an argument")
            if twice := [key for key in keys if keys.count(key) > 1]:
                raise _Twice(f"{twice[0]} is given twice")
            kwargs = {key: _argument(keyword.value) for key, keyword in zip(keys, node.keywords, strict=True)}
            return Call(name, tuple(map(_argument, node.args)), kwargs)
        case ast.List() | ast.Tuple():
            return tuple(map(_argument, node.elts))
    return ast.literal_eval(node)


def write_call(name: str, kwargs: Mapping[str, str], *, nested: bool = False) -> str:
    """The text that `read_call` parses as this call; arguments are already text."""
    arguments = ",".join(f"{key}={value}" for key, value in kwargs.items())
    if nested:
        return f"{name}({arguments})"
    return f"{name}:{arguments}" if arguments else name


Calls: TypeAlias = Mapping[str, Callable[..., Any]]
"""The functions that text may call, by name."""


def parse_spec(spec: str, *, prefixes: bool = False) -> tuple[str, dict[str, Any]]:
    """Splits `"NAME:key=value,key=value"`; with `prefixes`, also `"jaxmarl:MPE_simple_spread_v3:num_agents=5"`."""
    name, colon, text = spec.partition(":")
    if prefixes and colon and "=" not in (second := text.partition(":")[0]):
        name, colon, text = f"{name}:{second}", *text.partition(":")[1:]
    if not colon:
        return name, {}
    return name, read_values(text, wrong=f"cannot read {text!r} in {spec!r}; write {name}:key=value,key=value")


def read_values(text: str, calls: Calls | None = None, *, wrong: str) -> dict[str, Any]:
    """Parses `"key=value,key=value"`, whose keys may have dots; raises ValueError(`wrong`) if it cannot be parsed.

    Words, which may start with a digit (`scenario=3s_vs_5z`), are strings; so are calls if there are no `calls`.
    """
    found: dict[str, Any] = {}
    for part in filter(str.strip, _split(text)):
        pair = re.fullmatch(r"\s*([^\W\d][\w.]*)\s*=(?!=)(.+)", part, re.DOTALL)
        if pair is None:
            raise ValueError(wrong)
        key, value = pair.groups()
        if key in found:
            raise ValueError(f"{text!r} has {key!r} twice; give it once")
        found[key] = read_value(key, value, calls, wrong=wrong)
    if not found:
        raise ValueError(wrong)
    return found


def _split(text: str) -> list[str]:
    """The parts between commas that are not in quotes or brackets."""
    parts, depth, quote = [""], 0, ""
    for c in text:
        if c == "," and not depth and not quote:
            parts.append("")
            continue
        parts[-1] += c
        if c in "'\"" and quote in ("", c):
            quote = "" if quote else c
        elif not quote:
            depth += (c in "([{") - (c in ")]}")
    return parts


def split_specs(text: str) -> list[str]:
    """The values in `"NAME:key=value,key=value,NAME"`: a comma before `key=` does not separate them."""
    return re.split(r",(?!\s*[^\W\d][\w.]*\s*=)", text)


def read_value(what: str, text: str, calls: Calls | None, *, wrong: str) -> Any:
    """Parses one value, like `read_values`; `what` is its name in messages."""
    text = text.strip()
    try:
        return _built(what, ast.parse(_COLONS.sub(_call, text) if calls else text, mode="eval").body, calls)
    except (SyntaxError, RecursionError, MemoryError, _NotLiteral):  # Python rejects thousands of signs with the third
        if re.fullmatch(r"\d\w*", text):
            return text
        raise ValueError(wrong) from None


class _NotLiteral(ValueError):
    pass


_COLONS = re.compile(r"\b([a-z_]+)((?::[^:,()\s]+)+)")
"""A call without commas, `uniform:0.25:1`."""


def _call(found: re.Match[str]) -> str:
    name, *numbers = found[0].split(":")
    return f"{name}([{', '.join(numbers)}])" if name == "choice" else f"{name}({', '.join(numbers)})"


def _built(what: str, node: ast.expr, calls: Calls | None) -> Any:
    if isinstance(node, ast.Name) or (calls is None and isinstance(node, ast.Attribute | ast.Call)):
        return ast.unparse(node)
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys, values = ([_built(what, x, calls) for x in xs if x] for xs in (node.keys, node.values))
        return dict(zip(keys, values, strict=True))
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.keywords:
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError):
            if calls is None:
                raise _NotLiteral from None
            raise ValueError(f"{what}={ast.unparse(node)} is not a number; use one, or one of {', '.join(calls)}") from None
    assert calls is not None
    if (name := node.func.id) not in calls:
        raise ValueError(f"{what}: there is no {name!r}{suggestion(name, calls)}; use {', '.join(calls)}")
    given = [
        [_built(what, y, calls) for y in x.elts] if isinstance(x, ast.List | ast.Tuple) else _built(what, x, calls)
        for x in node.args
    ]
    try:
        return calls[name](*given)
    except TypeError:
        usage = ", ".join(inspect.signature(calls[name]).parameters)
        raise ValueError(f"{what}={ast.unparse(node)}: write {name}({usage})") from None
