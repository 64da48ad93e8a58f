"""The memory that arrays take, and the memory that devices and hosts have."""

import contextlib
import contextvars
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

# The memory of a chip, by its kind; only chips that exist report it themselves.
_GIB = {
    "TPU v5 lite": 16, "TPU v5": 95, "TPU v6 lite": 32, "NVIDIA H100 80GB HBM3": 80, "NVIDIA A100-SXM4-80GB": 80,
}


def is_planned(device: Any) -> bool:
    """Whether programs can be compiled for a device, but the device is not there: nothing can be put on it."""
    return type(getattr(device, "client", None)).__name__ == "CompileOnlyPyClient"


_PLANNED_FOR: contextvars.ContextVar[Sequence[Any]] = contextvars.ContextVar("planned_for", default=())


@contextlib.contextmanager
def planning_for(devices: Sequence[Any]) -> Iterator[None]:
    """Checks the sizes of buffers against the memory of these devices instead of that of this machine's.

    Args:
      devices: the devices.
    """
    token = _PLANNED_FOR.set(devices)
    try:
        yield
    finally:
        _PLANNED_FOR.reset(token)


def own_devices() -> Sequence[Any]:
    """The devices of this process, or those that are planned for."""
    return _PLANNED_FOR.get() or jax.local_devices()


def device_memory(devices: Sequence[Any]) -> int | None:
    """The bytes available to arrays that are split evenly over devices.

    Args:
      devices: the devices.

    Returns:
      The smallest memory limit times the number of devices. If a device reports no limit, as CPUs do, the host's memory;
      None for a device that is not there and whose kind is unknown.
    """
    if any(map(is_planned, devices)):
        known = {_GIB.get(d.device_kind, 0) for d in devices}
        return min(known) * 2**30 * len(devices) or None
    own = [d for d in devices if getattr(d, "process_index", 0) == jax.process_index()]  # only these can be asked
    stats = [d.memory_stats() if d.platform != "cpu" else None for d in own]
    limits = [s["bytes_limit"] for s in stats if s and "bytes_limit" in s]
    if limits and len(limits) == len(own):
        return min(limits) * len(devices)
    return host_memory()


def host_memory() -> int:
    """The bytes that this process may use: the machine's memory, or less if its container has less."""
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits_of_container())


def check_fits_host(nbytes: int, what: str, remedy: str) -> None:
    """Raises ValueError if something takes more memory than this process may use, whatever else it holds."""
    if nbytes > (limit := host_memory()):
        raise ValueError(f"{what} takes at least {nbytes:,} bytes of memory, but there are {limit:,} in all. {remedy}")


def tree_bytes(tree: Any) -> int:
    """Bytes of the arrays, or of the shapes and dtypes, in a tree."""
    return sum(map(array_bytes, jax.tree.leaves(tree)))


def _limits_of_container(root: Path = Path("/")) -> list[int]:
    """The memory limits of this process's cgroup and of those around it; empty if there are none."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files: list[Path] = []
    for _, controllers, group in (line.split(":", 2) for line in groups):
        own = Path(group)
        above = [path.relative_to("/") for path in (own, *own.parents)]
        if not controllers:  # version 2
            files += [root / "sys/fs/cgroup" / path / "memory.max" for path in above]
        elif "memory" in controllers.split(","):
            files += [root / "sys/fs/cgroup/memory" / path / "memory.limit_in_bytes" for path in above]
    limits = [file.read_text().strip() for file in files if file.is_file()]
    return [int(limit) for limit in limits if limit != "max"]


def array_bytes(aval: Any) -> int:
    """Bytes of an array, typed PRNG keys included (8 for each threefry key, 16 for each rbg key).

    Args:
      aval: anything that has a shape and a dtype.

    Returns:
      The bytes.
    """
    return math.prod(aval.shape) * aval.dtype.itemsize
