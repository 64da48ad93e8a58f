"""A run on several processes (`jax.distributed`): which one writes, what they agree on, and what happens if one dies.

Every process runs the same program with the same arguments. Only process 0 shows progress and writes files. The processes
agree between chunks on everything that depends on a clock or a signal. In a single process, every function here is the
identity or a constant.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from msrl_jax.fragments.runtime.transfer import read

Tree = TypeVar("Tree")

HEARTBEAT = 15  # seconds without a heartbeat after which a process counts as dead

_LOST = re.compile(r"gloo|nccl|rccl|coordination|heartbeat|connection (reset|closed|refused)|distributed service", re.I)
_TEXT = 64


class ProcessError(RuntimeError):
    """Another process of the run failed or ended."""


def is_first() -> bool:
    """Returns whether this process shows progress and writes files."""
    return jax.process_index() == 0


def gathered(text: str) -> list[str]:
    """Gathers a short text from every process, ordered by process index; all processes must call it."""
    if jax.process_count() == 1:
        return [text]
    data = text.encode()
    assert len(data) <= _TEXT
    rows = multihost_utils.process_allgather(np.frombuffer(data.ljust(_TEXT, b"\0"), np.uint8))
    return [bytes(row).rstrip(b"\0").decode() for row in np.asarray(rows)]


def agreed(value: float) -> float:
    """Returns the number that process 0 passes; all processes must call it."""
    return float(gathered(repr(float(value)))[0])


def to_hosts(tree: Tree) -> Tree:
    """Returns a state that every process can read by itself; all processes must call it."""
    if jax.process_count() == 1:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, read(leaves))


@contextlib.contextmanager
def together(step: str) -> Iterator[None]:
    """Fails a step on all processes if it fails on one. Collectives inside must be in the same order on all processes."""
    try:
        yield
    except BaseException as error:
        if not is_loss(error):
            gathered(type(error).__name__[:_TEXT])
        raise
    failed = [(i, name) for i, name in enumerate(gathered("")) if name]
    if failed:
        number, name = failed[0]
        raise ProcessError(f"{step} failed on process {number} of {jax.process_count()} ({name}); see its message")


def is_loss(error: BaseException) -> bool:
    """Returns whether an error says that a collective failed, which is the first sign of a dead process."""
    is_of_jax = isinstance(error, jax.errors.JaxRuntimeError | ValueError)
    return jax.process_count() > 1 and is_of_jax and _LOST.search(str(error)) is not None


@contextlib.contextmanager
def in_words() -> Iterator[None]:
    """Converts an error of a collective to a ProcessError."""
    try:
        yield
    except Exception as error:
        if not is_loss(error):
            raise
        reason = " ".join(str(error).split())[:160]
        raise ProcessError(
            f"another process of this run ended, so process {jax.process_index()} of {jax.process_count()} stops too. Start "
            f"all of them again, with --resume to continue from the newest checkpoint ({reason})"
        ) from error


def start(address: str | None = None, number: int | None = None, index: int | None = None) -> None:
    """Joins the processes of a run; call it before JAX starts."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:  # bind to this address only: by default, JAX listens on all interfaces
        jax.distributed.initialize(
            address,
            number,
            index,
            coordinator_bind_address=address,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=60,
        )
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"the processes of the run cannot be joined: {reason}. --distributed needs a cluster that JAX knows (SLURM, Open "
            "MPI, GKE, a TPU pod); on one machine use --processes"
        ) from error
