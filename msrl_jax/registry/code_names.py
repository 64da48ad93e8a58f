"""Finds the code that a config in a folder or a file refers to, as plain data, before you decide to trust and run it."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from msrl_jax.agents.optimizers import NAMED
from msrl_jax.configs.fields import is_option
from msrl_jax.fragments.support.naming import is_path
from msrl_jax.fragments.support.text_values import Call, read_call, split_specs
from msrl_jax.registry import files
from msrl_jax.registry.team_text import read_algorithm, split_team


def is_custom_algorithm(algorithm: str) -> bool:
    """Whether a text names an algorithm in a file or a module, whose code `algorithms.get` runs."""
    return files.is_file(algorithm) or ":" in algorithm


def code_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """Returns the fields of a config that name a file or a module, with that name; values may be sequences, as in a sweep."""
    pairs = ((name, text) for name, value in fields.items() for text in texts(value) if _names_code(name, text))
    return dict(pairs)


def texts(value: Any) -> Iterator[str]:
    """Yields all texts in plain data, and the parts of each text that may be separate values."""
    if is_option(value):
        value = str(value)
    if isinstance(value, str):
        parts = split_specs(value)
        yield from dict.fromkeys([value, *parts, *itertools.chain.from_iterable(part.split() for part in parts)])
        with contextlib.suppress(ValueError):  # arguments of an option
            yield from itertools.chain.from_iterable(map(texts, _arguments(read_call(value))))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts(item)
            yield from texts(f"{key}={item}")  # the text of a team
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts(item)


def _arguments(call: Call) -> Iterator[Any]:
    for argument in (*call.args, *call.kwargs.values()):
        yield from _arguments(argument) if isinstance(argument, Call) else [argument]


def _names_code(field: str, text: str) -> bool:
    if field == "teams":
        with contextlib.suppress(ValueError):  # an invalid text names no code
            algorithm, fields, _ = read_algorithm(*split_team(text))
            return is_custom_algorithm(algorithm) or bool(code_of(fields))
        return False
    if field == "data" or not is_path(text.partition("(")[0]):  # data sets hold no code
        return False
    return field != "optimizer" or text.partition(":")[0] not in NAMED
