"""Paths, files that are written whole or not at all, and untrusted JSON."""

import contextlib
import itertools
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msrl_jax.fragments.support.checks import shown


def as_path(name: str, value: object) -> Path:
    """Converts a string or path-like object to a path; raises TypeError for anything else, ValueError if it is empty."""
    if value == "":
        raise ValueError(f"{name}='' is not a path; pass one, or omit it")
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name}={shown(value)}: use a path as a string or a pathlib.Path, or omit it")
    return Path(value)


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Adds the file's name to operating-system errors that lack it, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path next to a file, renamed to it at the end, so that a reader sees either the whole file or none."""
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")  # unique to this writer
    try:
        with writing(path):
            yield partial
            os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == os.fspath(partial):
            error.filename = os.fspath(path)
        raise


_DEEPEST = 100  # maximum nesting depth of JSON


def parse_json(text: str | bytes) -> Any:
    """Parses untrusted JSON; raises ValueError if it is invalid or nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [value]
    for _ in range(_DEEPEST):
        inner = (
            container.values() if isinstance(container, dict) else container
            for container in level
            if isinstance(container, dict | list)
        )
        if not (level := list(itertools.chain.from_iterable(inner))):
            return value
    raise ValueError("it is nested too deeply")
