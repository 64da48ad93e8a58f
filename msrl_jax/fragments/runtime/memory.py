"""The memory that states and programs need, and that devices and the host have; what cannot fit is rejected."""

import contextlib
import contextvars
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from msrl_jax._compat import Jaxpr, ShapedArray, Var, sub_jaxprs
from msrl_jax.fragments.graph.marker import is_fragment
from msrl_jax.fragments.placement import Device

# The memory of a chip in GiB, by its kind; planned devices do not report it.
_GIB = {"TPU v5 lite": 16, "TPU v5": 95, "TPU v6 lite": 32, "NVIDIA H100 80GB HBM3": 80, "NVIDIA A100-SXM4-80GB": 80}


def is_planned(device: object) -> bool:
    """Whether a device is only planned: programs can be compiled for it, but no array can be put on it."""
    return type(getattr(device, "client", None)).__name__ == "CompileOnlyPyClient"


_PLANNED_FOR: contextvars.ContextVar[Sequence[Any]] = contextvars.ContextVar("planned_for", default=())


@contextlib.contextmanager
def planning_for(devices: Sequence[Any]) -> Iterator[None]:
    """Checks the sizes of buffers against the memory of these devices instead of this machine's."""
    token = _PLANNED_FOR.set(devices)
    try:
        yield
    finally:
        _PLANNED_FOR.reset(token)


def own_devices() -> Sequence[Any]:
    """Returns the devices of this process, or the planned ones."""
    return _PLANNED_FOR.get() or jax.local_devices()


def device_memory(devices: Sequence[Any]) -> int | None:
    """Returns the bytes available to arrays that are split evenly over devices: the smallest memory times the number of
    devices.

    If a device reports no limit, like CPUs, the host's memory; None for a planned device of unknown kind.
    """
    if any(map(is_planned, devices)):
        gibibytes = {_GIB.get(d.device_kind, 0) for d in devices}
        return min(gibibytes) * 2**30 * len(devices) or None
    local_devices = [d for d in devices if getattr(d, "process_index", 0) == jax.process_index()]  # only these can be queried
    stats = [d.memory_stats() if d.platform != "cpu" else None for d in local_devices]
    limits = [s["bytes_limit"] for s in stats if s and "bytes_limit" in s]
    if limits and len(limits) == len(local_devices):
        return min(limits) * len(devices)
    return host_memory()


def host_memory() -> int:
    """Returns the bytes that this process may use: the machine's memory, or less if its container has less."""
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits_of_container())


def check_fits_host(nbytes: int, what: str, remedy: str) -> None:
    """Raises ValueError if something needs more memory than this process may use, whatever else it holds."""
    if nbytes > (limit := host_memory()):
        raise ValueError(f"{what} takes at least {nbytes:,} bytes of memory, but there are {limit:,} in total. {remedy}")


def tree_bytes(tree: Any) -> int:
    """Bytes of the arrays, or of the shapes and dtypes, in a tree."""
    return sum(map(array_bytes, jax.tree.leaves(tree)))


def _limits_of_container(root: Path = Path("/")) -> list[int]:
    """Returns the memory limits of this process's cgroup and of those around it; empty if there are none."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files: list[Path] = []
    for _, controllers, group in (line.split(":", 2) for line in groups):
        group_path = Path(group)
        above = [path.relative_to("/") for path in (group_path, *group_path.parents)]
        if not controllers:  # version 2
            files += [root / "sys/fs/cgroup" / path / "memory.max" for path in above]
        elif "memory" in controllers.split(","):
            files += [root / "sys/fs/cgroup/memory" / path / "memory.limit_in_bytes" for path in above]
    limits = [file.read_text().strip() for file in files if file.is_file()]
    return [int(limit) for limit in limits if limit != "max"]


def array_bytes(aval: Any) -> int:
    """Returns the bytes of anything with a shape and a dtype, including typed PRNG keys (8 per threefry key, 16 per rbg
    key).
    """
    return math.prod(aval.shape) * aval.dtype.itemsize


def lacking_memory(nbytes: Mapping[Device, int]) -> tuple[list[Device], int, int] | None:
    """Returns the devices whose common memory is exceeded, the bytes taken and the limit; None if there are none."""
    for devices in sharing_memory(nbytes):
        total, limit = sum(nbytes[d] for d in devices), device_memory(devices)
        if limit is not None and total > limit:
            return devices, total, limit
    return None


def sharing_memory(devices: Iterable[Device]) -> list[list[Device]]:
    """Groups devices by memory: the CPU devices of this process share that of the host."""
    devices = list(devices)
    host = [d for d in devices if d.platform == "cpu" and getattr(d, "process_index", 0) == jax.process_index()]
    return [*([host] if host else []), *([d] for d in devices if d.platform != "cpu")]


def program_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes that a program needs on each of its devices: arguments, results and temporary arrays."""
    memory = compiled.memory_analysis()
    total = sum(getattr(memory, f"{kind}_size_in_bytes", 0) for kind in ("argument", "output", "temp"))
    return total - getattr(memory, "alias_size_in_bytes", 0)


def temporary_bytes(jaxpr: Jaxpr, cache: dict[int, int] | None = None) -> int:
    """Estimates the bytes that a jaxpr needs in addition to its arguments: the peak if nothing is fused."""
    cache = {} if cache is None else cache
    if id(jaxpr) in cache:
        return cache[id(jaxpr)]
    last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if isinstance(v, Var)}
    last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if isinstance(v, Var)}
    live: dict[Var, int] = {}
    total = peak = 0
    for i, eqn in enumerate(jaxpr.eqns):
        outputs = {v: array_bytes(v.aval) for v in eqn.outvars if isinstance(v.aval, ShapedArray)}
        live |= outputs
        total += sum(outputs.values())
        peak = max(peak, total + max((temporary_bytes(sub, cache) for sub in sub_jaxprs(eqn)), default=0))
        unused = {v for v in (*eqn.invars, *eqn.outvars) if isinstance(v, Var) and last.get(v, i) <= i}
        total -= sum(live.pop(v, 0) for v in unused)
    cache[id(jaxpr)] = peak
    return peak


def largest_array(jaxpr: Jaxpr) -> str:
    """Describes the largest array that a jaxpr computes: its bytes, dtype and shape, its operation and its fragment."""
    visited: set[int] = set()

    def visit(jaxpr: Jaxpr, fragment: str) -> Iterator[tuple[int, str]]:
        eqns = () if id(jaxpr) in visited else jaxpr.eqns
        visited.add(id(jaxpr))
        for eqn in eqns:
            for sub in sub_jaxprs(eqn):
                yield from visit(sub, f" in {eqn.params['name']!r}" if is_fragment(eqn) else fragment)
            for aval in (v.aval for v in eqn.outvars):
                if isinstance(aval, ShapedArray):
                    yield array_bytes(aval), f"{aval.dtype}{list(aval.shape)} of {eqn.primitive.name}{fragment}"

    nbytes, name = max(visit(jaxpr, ""), key=lambda entry: entry[0], default=(0, "none"))
    return f"{name} ({nbytes:,} bytes)"


def check_program_fits(compiled: jax.stages.Compiled, what: str, remedy: str) -> None:
    """Rejects a program that needs more memory than its devices have in total, whatever else they hold."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    nbytes = program_bytes(compiled)
    if excess := lacking_memory({d: nbytes for s in shardings for d in s.device_set}):
        devices, total, limit = excess
        have = "have" if len(devices) > 1 else "has"
        raise ValueError(
            f"{what} takes {total:,} bytes of {', '.join(map(str, devices))}, which {have} {limit:,} in all. {remedy}"
        )


class MemoryCheck:
    """Checks each program once with `check_program_fits`."""

    def __init__(self, remedy: Callable[[], str]):
        self._remedy, self._fitting = remedy, set[jax.stages.Compiled]()

    def __call__(self, compiled: jax.stages.Compiled, what: str) -> None:
        """Raises ValueError if the program `what` does not fit."""
        if compiled not in self._fitting:
            check_program_fits(compiled, what, self._remedy())
            self._fitting.add(compiled)
