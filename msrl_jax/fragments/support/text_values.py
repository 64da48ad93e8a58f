"""Values as text: `NAME:ARGUMENTS`, or `NAME(ARGUMENTS)`, whose arguments are literals, words and such calls, as in Python.

Numbers may follow each other by colons: `uniform:0:1` is `uniform(0, 1)`. Nothing is evaluated.
"""

import ast
import contextlib
import inspect
import keyword
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from msrl_jax.fragments.support.checks import suggestion


def parts_of(kind: Any) -> tuple[Any, ...]:
    """Returns the members of a union of types; another type alone."""
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

    def __str__(self) -> str:
        arguments = [*map(write_argument, self.args), *(f"{key}={write_argument(x)}" for key, x in self.kwargs.items())]
        return f"{self.name}({', '.join(arguments)})"


def read_call(text: str) -> Call:
    """Parses a name and its arguments; raises ValueError if it cannot be parsed, or has an argument twice."""
    wrong = f"cannot read {text!r}; write NAME or NAME:argument=value,argument=value"
    name, _, arguments = text.strip().partition(":")
    if name.isidentifier() and not keyword.iskeyword(name):
        args, kwargs = _parse_arguments(arguments, wrong)
        return Call(name, tuple(args), kwargs)
    call = _parse_value(text, wrong)
    if not isinstance(call, Call):
        raise ValueError(wrong)
    return call


_NUMBERS = re.compile(r"^[-+.\d][^:,='\"]*(?::[-+.\d][^:,='\"]*)+")
"""Numbers between colons, before other arguments."""


def _parse_arguments(text: str, wrong: str) -> tuple[list[Any], dict[str, Any]]:
    """Parses `"value,key=value"`, whose keys may have dots; raises ValueError(`wrong`) if it cannot be parsed."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for part in filter(str.strip, _split_at_commas(_NUMBERS.sub(lambda match: match[0].replace(":", ","), text))):
        key, value = pair.groups() if (pair := _PAIR.fullmatch(part)) else ("", part)
        if key in kwargs:
            raise ValueError(f"{text!r} has {key!r} twice; give it once")
        if key:
            kwargs[key] = _parse_value(value, wrong)
        elif kwargs:
            raise ValueError(wrong)
        else:
            args.append(_parse_value(value, wrong))
    return args, kwargs


_PAIR = re.compile(r"\s*([^\W\d][\w.]*)\s*=(?!=)(.+)", re.DOTALL)
OWN_CALL = re.compile(r"(?P<path>[^\W\d][\w.]*:[^\W\d]\w*)(?P<arguments>\(.*\))?", re.DOTALL)
"""`MODULE:NAME`, or `MODULE:NAME(ARGUMENTS)`: a custom object."""
_CALL = re.compile(r"([^\W\d]\w*)\((.*)\)", re.DOTALL)
_WORD = re.compile(
    r"\d\w*|[^\W\d][\w.]*:[^\W\d]\w*\(.*\)|[^\W\d][\w./]*(?::[\w./+=-]+)+|(?=.*[*?|[])[\w*?][\w.*?|!\[\] -]*", re.DOTALL
)
"""Words that are not Python: such as `3s_vs_5z`, `per_env:base=0.3`, `MODULE:NAME(...)`, and the pattern `ally_*|medic`."""


def _parse_value(text: str, wrong: str) -> Any:
    """Parses one value: a literal, a word, a call, or several of them in brackets; raises ValueError(`wrong`) if it is none."""
    text = text.strip()
    try:
        return _convert_node(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):  # the last for thousands of signs
        if _WORD.fullmatch(text):
            return text
        if match := _CALL.fullmatch(text):  # whose arguments have words
            with contextlib.suppress(RecursionError):
                args, kwargs = _parse_arguments(match[2], wrong)
                return Call(match[1], tuple(args), kwargs)
        raise ValueError(wrong) from None


def _convert_node(node: ast.expr) -> Any:
    match node:
        case ast.Name() | ast.Attribute():
            return ast.unparse(node)
        case ast.Call(ast.Name(name)):
            kwargs = {argument.arg: _convert_node(argument.value) for argument in node.keywords if argument.arg is not None}
            if len(kwargs) < len(node.keywords):
                raise ValueError("an argument is given twice, or **")
            return Call(name, tuple(map(_convert_node, node.args)), kwargs)
        case ast.List() | ast.Tuple():
            items = map(_convert_node, node.elts)
            return list(items) if isinstance(node, ast.List) else tuple(items)
        case ast.Dict(keys, values) if None not in keys:
            return {_convert_node(key): _convert_node(x) for key, x in zip(keys, values, strict=True) if key is not None}
    return ast.literal_eval(node)


def write_argument(value: Any) -> str:
    """Returns the text of an argument: a literal, a word or a call."""
    is_deferred = isinstance(value, str) and value.isidentifier() and not keyword.iskeyword(value)
    return str(value) if is_deferred or isinstance(value, Call) else repr(value)


def write_call(name: str, kwargs: Mapping[str, str], *, nested: bool = False) -> str:
    """Returns the text that `read_call` parses as this call; arguments are already text."""
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
    form = f"write {name}:key=value,key=value, and quote a value with : or ,"
    return name, read_values(text, wrong=f"cannot read {text!r} in {spec!r}; {form}")


def read_values(text: str, calls: Calls | None = None, *, wrong: str) -> dict[str, Any]:
    """Parses `"key=value,key=value"`, whose keys may have dots; raises ValueError(`wrong`) if it cannot be parsed.

    Calls have the results of the functions in `calls`; if there are none, they are strings, as words are.
    """
    args, values = _parse_arguments(text, wrong)
    if args or not values:
        raise ValueError(wrong)
    return {key: _evaluate_calls(key, value, calls) for key, value in values.items()}


def _split_at_commas(text: str) -> list[str]:
    """Returns the parts between commas that are not in quotes or brackets."""
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
    """Returns the values in `"NAME:key=value,key=value,NAME"`: a comma before `key=` does not separate them."""
    specs: list[str] = []
    for part in _split_at_commas(text):
        if specs and re.match(r"\s*[^\W\d][\w.]*\s*=", part):
            specs[-1] += f",{part}"
        else:
            specs.append(part)
    return specs


def read_value(what: str, text: str, calls: Calls, *, wrong: str) -> Any:
    """Parses one value, like `read_values`; `what` is its name in messages."""
    return _evaluate_calls(what, _parse_value(text, wrong), calls)


def _evaluate_calls(what: str, value: Any, calls: Calls | None) -> Any:
    """Returns a value with the results of calls in it; they are text if there are no `calls`."""
    if isinstance(value, dict):
        return {key: _evaluate_calls(what, x, calls) for key, x in value.items()}
    if calls and isinstance(value, str) and ":" in value:
        value = read_call(value)
    if not isinstance(value, Call):
        return type(value)(_evaluate_calls(what, x, calls) for x in value) if isinstance(value, list | tuple) else value
    if calls is None:
        return str(value)
    if value.name not in calls:
        raise ValueError(f"{what}: there is no {value.name!r}{suggestion(value.name, calls)}; use {', '.join(calls)}")
    args = [_evaluate_calls(what, x, calls) for x in value.args]
    try:
        return calls[value.name](*args, **value.kwargs)
    except TypeError:
        usage = ", ".join(inspect.signature(calls[value.name]).parameters)
        raise ValueError(f"{what}={value}: write {value.name}({usage})") from None
