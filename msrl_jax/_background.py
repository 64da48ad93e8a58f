"""Work in another thread, such as a compilation by XLA, which leaves Python's lock to others."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T]) -> Callable[[], T]:
    """Starts work in a thread of its own.

    Args:
      work: what to do. Settings of JAX that are contexts, such as `jax.enable_x64`, do not reach it, so it must not trace.

    Returns:
      A function that waits for the work and returns its result, or raises its error.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="msrl-jax")
    result = pool.submit(work).result
    pool.shutdown(wait=False)
    return result
