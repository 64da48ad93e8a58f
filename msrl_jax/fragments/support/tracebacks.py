"""Tracebacks of errors caused by a user's values or functions: without this package's frames, as JAX filters its own.

`JAX_TRACEBACK_FILTERING=off`, or `jax_traceback_filtering` in `jax.config`, shows all frames.
"""

import contextlib
import dis
import functools
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGE = "msrl_jax"
_JAX = ("jax", "jaxlib")
_HIDDEN = (_PACKAGE, *_JAX, "contextlib", "functools", "dataclasses")  # including those between this package's frames
_is_inside = ContextVar(f"{_PACKAGE} is called", default=False)


def entry(target: F) -> F:
    """Makes a function, or the constructor of a class, an entry point: its errors show only the frames of the user's functions.

    An error that is a bug of this package keeps all frames: an assertion, or one that no `raise` statement here raised.
    """
    if isinstance(target, type):
        target.__init__ = entry(target.__init__)
        return target  # type: ignore[return-value]

    @functools.wraps(target)
    def called(*args: Any, **kwargs: Any) -> Any:
        if _is_inside.get():
            return target(*args, **kwargs)
        token = _is_inside.set(True)
        try:
            return target(*args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise  # adds no frame
        finally:
            _is_inside.reset(token)

    return called  # type: ignore[return-value]


def hide_frames(error: Exception) -> None:
    """Removes this package's and JAX's frames from the traceback of an error, unless it is a bug of this package."""
    if not _shows_all() and _is_of_user(error):
        _remove_frames(error)


@contextlib.contextmanager
def with_all_frames() -> Iterator[None]:
    """Within the context, errors keep all frames."""
    token = _is_inside.set(True)
    try:
        yield
    finally:
        _is_inside.reset(token)


def _shows_all() -> bool:
    jax = sys.modules.get("jax")
    mode = jax.config.jax_traceback_filtering if jax else os.environ.get("JAX_TRACEBACK_FILTERING")
    return str(mode).lower() == "off"


def _package_of(traceback: types.TracebackType) -> str:
    return traceback.tb_frame.f_globals.get("__name__", "").partition(".")[0]


def _frames_of(error: BaseException) -> list[types.TracebackType]:
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    return frames


def _is_of_user(error: Exception) -> bool:
    last = [frame for frame in _frames_of(error) if _package_of(frame) not in _JAX][-1]
    if _package_of(last) != _PACKAGE or last.tb_frame.f_globals is globals():  # `called` itself: the arguments do not match
        return True
    return not isinstance(error, AssertionError) and operation(last) == "RAISE_VARARGS"


def operation(traceback: types.TracebackType) -> str:
    """Returns the name of the Python instruction that failed: `RAISE_VARARGS` for a raise statement, `CALL` for a call."""
    return dis.opname[traceback.tb_frame.f_code.co_code[traceback.tb_lasti]]


def _remove_frames(error: BaseException | None) -> None:
    """Removes frames from the traceback of an error, and of the errors that caused it."""
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        traceback = None
        for frame in reversed(_frames_of(error)):
            if _package_of(frame) not in _HIDDEN:
                traceback = types.TracebackType(traceback, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        error.__traceback__ = traceback
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
