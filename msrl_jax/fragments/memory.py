"""Places or computes a state where a program keeps it, and counts its memory."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from msrl_jax._compat import ClosedJaxpr, Var, jaxpr_as_fun
from msrl_jax._device_memory import array_bytes, device_memory
from msrl_jax.fragments.placement import Device
from msrl_jax.fragments.processes import is_global, transfer

Leaves = list[tuple[jax.Array, ...]]
"""The leaves of a state, each with its copies on the placements that keep one."""

LARGE = 2**24
"""Leaves of at least this many bytes are computed where they are kept; smaller ones are not worth a compilation."""


def put(flat: Sequence[Any], shardings: Sequence[tuple[NamedSharding, ...]], copy: bool) -> Leaves:
    """Copies leaves to where they are kept.

    Args:
      flat: the leaves, as NumPy arrays or on any devices.
      shardings: shardings of every copy of every leaf.
      copy: whether all memory must be new; if not, a leaf that is already in its place is not copied.

    Returns:
      The copies, no two of which share memory.
    """
    targets = [(i, s) for i, copies in enumerate(shardings) for s in copies]
    fresh: list[bool] = []
    seen: set[int] = set()
    for i, s in targets:
        x = flat[i]
        # A transfer may share memory with its source if they share a device, and one array may be several leaves.
        on_host = not is_global(x)
        shared = on_host or bool(x.sharding.device_set & s.device_set)
        fresh.append(shared and (copy or on_host or id(x) in seen or x.sharding != s))
        seen.add(id(x))
    arrays = [flat[i] for i, _ in targets]
    elsewhere = [k for k, (_, s) in enumerate(targets) if not is_global(arrays[k]) or arrays[k].sharding != s]
    if elsewhere:
        moved = transfer([arrays[k] for k in elsewhere], [targets[k][1] for k in elsewhere])
        for k, x in zip(elsewhere, moved, strict=True):
            arrays[k] = x
    by_mesh: dict[Any, list[int]] = {}
    for k, (_, s) in enumerate(targets):
        if fresh[k]:
            by_mesh.setdefault(s.mesh, []).append(k)
    for ks in by_mesh.values():
        out = [targets[k][1] for k in ks]
        for k, x in zip(ks, _copier(tuple(out))([arrays[k] for k in ks]), strict=True):
            arrays[k] = x
    it = iter(arrays)
    return [tuple(next(it) for _ in copies) for copies in shardings]


@functools.lru_cache(maxsize=128)  # making a new jitted function costs more than copying a small state
def _copier(out: tuple[NamedSharding, ...]) -> Callable[[list[jax.Array]], list[jax.Array]]:
    return jax.jit(lambda xs: [x.copy() for x in xs], out_shardings=list(out))


def constants(init: ClosedJaxpr) -> dict[int, Any]:
    """The leaves of a state that its initializer does not compute, such as NumPy arrays that it returns unchanged.

    Args:
      init: the traced initializer.

    Returns:
      The arrays, by the number of the leaf.
    """
    held = dict(zip(init.jaxpr.constvars, init.consts, strict=True))
    return {i: held[v] for i, v in enumerate(init.jaxpr.outvars) if isinstance(v, Var) and v in held}


def select(init: ClosedJaxpr, args: Sequence[Any], numbers: Iterable[int]) -> list[Any]:
    """Evaluates some leaves of a state; XLA drops computations that only the others need.

    Args:
      init: the traced initializer.
      args: leaves of its arguments.
      numbers: numbers of the wanted leaves.

    Returns:
      The leaves.
    """
    flat = jaxpr_as_fun(init)(*args)
    return [flat[i] for i in numbers]


def compute(
    init: ClosedJaxpr, args: Sequence[Any], shardings: Mapping[int, tuple[NamedSharding, ...]]
) -> dict[int, tuple[jax.Array, ...]]:
    """Computes leaves of a state where they are kept, so that no device holds more than its part.

    Args:
      init: the traced initializer.
      args: leaves of its arguments.
      shardings: shardings of every copy, by the number of the leaf.

    Returns:
      The copies, by the number of the leaf.
    """
    by_mesh: dict[Any, list[tuple[int, NamedSharding]]] = {}
    for i, copies in shardings.items():
        for sharding in copies:
            by_mesh.setdefault(sharding.mesh, []).append((i, sharding))
    found: dict[int, tuple[jax.Array, ...]] = dict.fromkeys(shardings, ())
    for mesh, targets in by_mesh.items():
        arguments = transfer(args, [NamedSharding(mesh, PartitionSpec())] * len(args))
        numbers = [i for i, _ in targets]
        out = [sharding for _, sharding in targets]
        arrays = jax.jit(lambda *xs, numbers=numbers: select(init, xs, numbers), out_shardings=out)(*arguments)
        for i, array in zip(numbers, arrays, strict=True):
            found[i] += (array,)
    return found


def state_bytes(avals: Sequence[Any], shardings: Sequence[tuple[NamedSharding, ...]]) -> dict[Device, int]:
    """Counts the bytes that a state takes on every device.

    Args:
      avals: shapes and dtypes of the leaves.
      shardings: shardings of every copy of every leaf.

    Returns:
      Bytes, by device; those of other processes are left out.
    """
    held: dict[Device, int] = {}
    for aval, copies in zip(avals, shardings, strict=True):
        for sharding in copies:
            part = jax.ShapeDtypeStruct(sharding.shard_shape(aval.shape), aval.dtype)
            for device in sharding.addressable_devices:
                held[device] = held.get(device, 0) + array_bytes(part)
    return held


def check_state_fits(held: Mapping[Device, int], largest: str) -> None:
    """Raises ValueError if a state takes more memory than the devices report.

    Args:
      held: bytes by device.
      largest: which leaf is the largest, for the message.
    """
    hosts = [d for d in held if d.platform == "cpu"]  # they share one memory
    for devices in (hosts, *([d] for d in held if d.platform != "cpu")):
        taken = sum(held[d] for d in devices)
        if devices and taken > (limit := device_memory(devices)):
            raise ValueError(
                f"the state takes {taken:,} bytes of {', '.join(map(str, devices))}, which has {limit:,}; its largest leaf is "
                f"{largest}. Use a smaller capacity, fewer seeds, shorter chunks of a recorded run, or a policy that splits "
                "that leaf over more devices"
            )
