"""Work in another thread, such as a compilation by XLA, which leaves Python's lock to others."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_NAME = "msrl-jax in the background"


def in_background(work: Callable[[], T]) -> Callable[[], T]:
    """Starts work in a thread of its own.

    Args:
      work: what to do. Settings of JAX that are contexts, such as `jax.enable_x64`, do not reach it, so it must not trace.

    Returns:
      A function that waits for the work and returns its result, or raises its error.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, name=_NAME).start()
    except RuntimeError:  # Python ends, and starts no more threads
        run()
    return future.result


def is_busy() -> bool:
    """Whether a thread works in the background; Python waits for it before the process ends."""
    return any(thread.name == _NAME for thread in threading.enumerate())
