"""Places, moves and reads arrays, in one process or in several that run the same program.

An array with a `NamedSharding` is global: it is one array for all processes, and each has the parts on its own devices,
possibly none. NumPy arrays and arrays on a single device are local: every process has its own, with equal contents.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from msrl_jax._compat import ClosedJaxpr, Var, jaxpr_as_fun
from msrl_jax.fragments.graph.host_calls import calls_host, evaluate_with_host
from msrl_jax.fragments.placement import Device
from msrl_jax.fragments.runtime.crossing import Block, MeshCrossing, blocks
from msrl_jax.fragments.runtime.memory import array_bytes
from msrl_jax.fragments.support.random_keys import is_key

Leaves = list[tuple[jax.Array, ...]]
"""The leaves of a state, each with its copies on the placements that keep one."""

LARGE = 2**24
"""Leaves of at least this many bytes are computed where they are kept; smaller ones are not worth a compilation."""

# Maximum bytes that one collective sends to every host.
_AT_ONCE = 2**26


def is_global(x: object) -> bool:
    """Whether an array is on devices that all processes agree on; in a single process, every `jax.Array` is."""
    return isinstance(x, jax.Array) and (jax.process_count() == 1 or isinstance(x.sharding, NamedSharding))


def owners(*shardings: NamedSharding) -> set[int]:
    """Returns the processes that own devices of shardings."""
    return {d.process_index for sharding in shardings for d in sharding.device_set}


def remote_array(aval: Any, sharding: NamedSharding) -> jax.Array:
    """Returns a global array with this shape and dtype, as seen by a process that owns none of its devices."""
    return jax.make_array_from_single_device_arrays(aval.shape, sharding, [], dtype=aval.dtype)


def transfer(arrays: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[jax.Array]:
    """Copies arrays to shardings: `jax.device_put`, also for devices of other processes.

    All processes must call it with equal arguments. Data is exchanged between processes by collectives. The copies may share
    memory with the arrays.
    """
    if jax.process_count() == 1:
        return jax.device_put(list(arrays), list(shardings))
    results: dict[int, jax.Array] = {}
    crossings: dict[tuple[Mesh | AbstractMesh, Mesh | AbstractMesh], list[int]] = {}
    for i, (x, to) in enumerate(zip(arrays, shardings, strict=True)):
        if not is_global(x):
            results[i] = _make_global(x, to)
        elif len(processes := owners(x.sharding, to)) > 1:
            crossings.setdefault((x.sharding.mesh, to.mesh), []).append(i)
        elif jax.process_index() in processes:
            results[i] = jax.device_put(x, to)
        else:
            results[i] = remote_array(x, to)
    for numbers in crossings.values():
        group = [arrays[i] for i in numbers]
        kinds = tuple((x.shape, x.dtype) for x in group)
        cross = crossing(kinds, tuple(x.sharding for x in group), tuple(shardings[i] for i in numbers))
        results |= dict(zip(numbers, cross(group), strict=True))
    return [results[i] for i in range(len(arrays))]


@functools.lru_cache(maxsize=128)
def crossing(
    kinds: tuple[tuple[tuple[int, ...], np.dtype], ...], sources: tuple[NamedSharding, ...], targets: tuple[NamedSharding, ...]
) -> MeshCrossing:
    """Returns the crossing of arrays with these shapes and dtypes; equal ones are compiled once."""
    return MeshCrossing([jax.ShapeDtypeStruct(*kind) for kind in kinds], sources, targets)


def _make_global(x: Any, sharding: NamedSharding) -> jax.Array:
    """Makes a local array global: every process places the parts of its devices."""
    x = x if is_key(x) else np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index], dtype=x.dtype)


def read(arrays: Sequence[jax.Array]) -> list[Any]:
    """Reads arrays to the host of every process: `jax.device_get`, also for devices of other processes.

    All processes must call it with arrays of equal shardings. Data that a process does not have arrives in one collective.
    Typed keys stay JAX arrays.
    """
    # JAX cannot assemble split arrays without elements, so make them on the host.
    readable: list[Any] = [x if x.size or is_key(x) else np.zeros(x.shape, x.dtype) for x in arrays]
    if jax.process_count() == 1:
        return jax.device_get(readable)
    everyone = {*range(jax.process_count())}
    spread = [
        i for i, x in enumerate(readable) if is_global(x) and not (x.is_fully_replicated and owners(x.sharding) == everyone)
    ]
    results = dict(zip(spread, _gather_on_hosts([readable[i] for i in spread]), strict=True)) if spread else {}
    local_arrays = {i: x.addressable_data(0) if is_global(x) else x for i, x in enumerate(readable) if i not in results}
    results |= jax.device_get(local_arrays)
    return [results[i] for i in range(len(readable))]


def _gather_on_hosts(arrays: Sequence[jax.Array]) -> list[Any]:
    """Sends global arrays to every host: each process sends the blocks of which its device has the first copy."""
    me = jax.process_index()
    blocks_by_process: dict[int, list[tuple[int, Block]]] = {p: [] for p in range(jax.process_count())}
    results: list[np.ndarray] = []
    mine: list[np.ndarray] = []
    for number, x in enumerate(arrays):
        data = jax.random.key_data(x) if is_key(x) else x
        results.append(np.empty(data.shape, data.dtype))
        device_blocks = blocks(data.sharding, data.shape)  # pyright: ignore[reportArgumentType]
        local_data = {shard.device: shard.data for shard in data.addressable_shards}
        for block, device in first_holders(device_blocks).items():
            blocks_by_process[device.process_index].append((number, block))
            if device.process_index == me:
                mine.append(np.ascontiguousarray(local_data[device]).reshape(-1).view(np.uint8))
    lengths = {p: sum(_nbytes(results[number], block) for number, block in parts) for p, parts in blocks_by_process.items()}
    gathered = _allgather_bytes(np.concatenate(mine) if mine else np.empty(0, np.uint8), max(lengths.values()))
    for p, parts in blocks_by_process.items():
        start = 0
        for number, block in parts:
            out = results[number]
            stop = start + _nbytes(out, block)
            part = gathered[p, start:stop].view(out.dtype).reshape([high - low for low, high in block])
            out[tuple(slice(*bounds) for bounds in block)] = part
            start = stop
    impls = [jax.random.key_impl(x) if is_key(x) else None for x in arrays]
    return [x if i is None else jax.random.wrap_key_data(jnp.asarray(x), impl=i) for x, i in zip(results, impls, strict=True)]


def first_holders(device_blocks: Mapping[Device, Block]) -> dict[Block, Device]:
    """Returns the first device, by process and number, that has each block."""
    first: dict[Block, Device] = {}
    for device in sorted(device_blocks, key=lambda d: (d.process_index, d.id)):
        first.setdefault(device_blocks[device], device)
    return first


def _nbytes(array: np.ndarray, block: Block) -> int:
    return array.itemsize * int(np.prod([high - low for low, high in block], dtype=np.int64))


def _allgather_bytes(data: np.ndarray, length: int) -> np.ndarray:
    """Returns the bytes of every process, `[processes, length]`; sizes are rounded up, so that few collectives are compiled."""
    parts = [np.empty((jax.process_count(), 0), np.uint8)]
    for start in range(0, length, _AT_ONCE):
        part = data[start : start + _AT_ONCE]
        size = 1 << (min(length - start, _AT_ONCE) - 1).bit_length()
        parts.append(multihost_utils.process_allgather(np.pad(part, (0, size - len(part)))))
    return np.ascontiguousarray(np.concatenate(parts, axis=1)[:, :length])


def put(flat: Sequence[Any], shardings: Sequence[tuple[NamedSharding, ...]], copy: bool) -> Leaves:
    """Copies leaves (NumPy arrays, or on any devices) to where they are kept; no two copies share memory.

    All memory is new if `copy`; otherwise, a leaf that is already in place is not copied.
    """
    targets = [(i, s) for i, copies in enumerate(shardings) for s in copies]
    fresh: list[bool] = []
    visited: set[int] = set()
    for i, s in targets:
        x = flat[i]
        # A transfer may share memory with its source if they share a device, and one array may be several leaves.
        on_host = not is_global(x)
        shared = on_host or bool(x.sharding.device_set & s.device_set)
        fresh.append(shared and (copy or on_host or id(x) in visited or x.sharding != s))
        visited.add(id(x))
    arrays = [flat[i] for i, _ in targets]
    misplaced = [k for k, (_, s) in enumerate(targets) if not is_global(arrays[k]) or arrays[k].sharding != s]
    if misplaced:
        moved = transfer([arrays[k] for k in misplaced], [targets[k][1] for k in misplaced])
        for k, x in zip(misplaced, moved, strict=True):
            arrays[k] = x
    to_copy = [k for k, is_fresh in enumerate(fresh) if is_fresh]
    for k, x in zip(to_copy, _copy_in_place([arrays[k] for k in to_copy]), strict=True):
        arrays[k] = x
    # Copies are made in the background, and the caller may write to memory of NumPy once this returns.
    jax.block_until_ready([arrays[k] for k, (i, _) in enumerate(targets) if not isinstance(flat[i], jax.Array)])
    it = iter(arrays)
    return [tuple(next(it) for _ in copies) for copies in shardings]


def _copy_in_place(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Copies arrays in place; compiles nothing for those of this process: a program for each shape would stay in memory."""
    local = [k for k, x in enumerate(arrays) if x.is_fully_addressable]
    moved = jax.device_put([arrays[k] for k in local], [arrays[k].sharding for k in local], may_alias=False)
    copies = dict(zip(local, moved, strict=True))
    return [copies[k] if k in copies else jax.jit(jnp.copy, out_shardings=x.sharding)(x) for k, x in enumerate(arrays)]


def initialize(
    init: ClosedJaxpr,
    args: Sequence[Any],
    shardings: Sequence[tuple[NamedSharding, ...]],
    registers: Sequence[int],
    evaluate: Callable[..., Any],
) -> Leaves:
    """Evaluates the initializer of a state; returns its leaves where they are kept, then copies of those in `registers`.

    `evaluate(jitted, *args)` compiles and calls a jitted function.

    Small leaves are computed on one device. Arrays that the initializer returns unchanged, such as NumPy arrays, are not part
    of a program. Large leaves are computed where they are kept, so that no device needs more memory than for its part.
    """
    captured, count = dict(zip(init.jaxpr.constvars, init.consts, strict=True)), len(init.out_avals)
    flat: dict[int, Any] = {i: captured[v] for i, v in enumerate(init.jaxpr.outvars) if isinstance(v, Var) and v in captured}
    with_host = calls_host(init.jaxpr)
    computed = [i for i in range(count) if i not in flat]
    large = [i for i in computed if not with_host and i not in registers and array_bytes(init.out_avals[i]) >= LARGE]
    small = [i for i in computed if i not in large]
    if with_host:
        values = evaluate_with_host(init, args)
        flat |= {i: values[i] for i in small}
    else:
        flat |= dict(zip(small, evaluate(jax.jit(lambda *xs: _select_leaves(init, xs, small)), *args), strict=True))
    to = [*(shardings[i] for i in flat), *shardings[count:]]
    placed = put([*flat.values(), *(flat[i] for i in registers)], to, copy=True)
    leaves = _compute_in_place(init, args, {i: shardings[i] for i in large}, evaluate) | dict(zip(flat, placed, strict=False))
    return [*(leaves[i] for i in range(count)), *placed[len(flat) :]]


def _compute_in_place(
    init: ClosedJaxpr, args: Sequence[Any], shardings: Mapping[int, tuple[NamedSharding, ...]], evaluate: Callable[..., Any]
) -> dict[int, tuple[jax.Array, ...]]:
    by_mesh: dict[Mesh | AbstractMesh, list[tuple[int, NamedSharding]]] = {}
    for i, copies in shardings.items():
        for sharding in copies:
            by_mesh.setdefault(sharding.mesh, []).append((i, sharding))
    leaves: dict[int, tuple[jax.Array, ...]] = dict.fromkeys(shardings, ())
    for mesh, targets in by_mesh.items():
        arguments = transfer(args, [NamedSharding(mesh, PartitionSpec())] * len(args))
        numbers, out = [i for i, _ in targets], [sharding for _, sharding in targets]
        arrays = evaluate(
            jax.jit(lambda *xs, numbers=numbers: _select_leaves(init, xs, numbers), out_shardings=out), *arguments
        )
        for i, array in zip(numbers, arrays, strict=True):
            leaves[i] += (array,)
    return leaves


def _select_leaves(init: ClosedJaxpr, args: Sequence[Any], numbers: Iterable[int]) -> list[Any]:
    """Some leaves of a state; XLA drops computations that only the others need."""
    flat = jaxpr_as_fun(init)(*args)
    return [flat[i] for i in numbers]
