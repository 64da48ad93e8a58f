"""Arrays of a program that several processes run: where JAX alone does not place, move or read them.

Every process runs the same program. An array with a `NamedSharding` is global: it is one array for all processes, and each
holds the parts on its own devices, which may be none. NumPy arrays and arrays on a single device are local: every process has
its own, with equal contents.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from msrl_jax.fragments.placement import Device
from msrl_jax.fragments.runtime.crossing import Block, MeshCrossing, blocks

# Bytes that one collective brings to every host.
_AT_ONCE = 2**26


def is_global(x: Any) -> bool:
    """Whether an array is on devices that all processes agree on; in a single process every `jax.Array` is."""
    return isinstance(x, jax.Array) and (jax.process_count() == 1 or isinstance(x.sharding, NamedSharding))


def owners(*shardings: NamedSharding) -> set[int]:
    """The processes that own devices of shardings."""
    return {d.process_index for sharding in shardings for d in sharding.device_set}


def remote(aval: Any, sharding: NamedSharding) -> jax.Array:
    """A global array with this shape and dtype, as it looks to a process that owns none of its devices."""
    return jax.make_array_from_single_device_arrays(aval.shape, sharding, [], dtype=aval.dtype)


def must_wait(devices: Iterable[Device]) -> bool:
    """Whether a program on these devices must end before the next one starts.

    CPU devices run programs in any order. Two programs with collectives between processes could each wait for the other.
    """
    return len({d.process_index for d in devices if d.platform == "cpu"}) > 1


def transfer(arrays: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[jax.Array]:
    """Copies arrays to shardings: `jax.device_put`, also for devices of other processes.

    All processes call it with equal arguments. Data crosses between processes by collectives. The copies may share memory with
    the arrays.
    """
    if jax.process_count() == 1:
        return jax.device_put(list(arrays), list(shardings))
    found: dict[int, jax.Array] = {}
    crossings: dict[Any, list[int]] = {}
    for i, (x, to) in enumerate(zip(arrays, shardings, strict=True)):
        if not is_global(x):
            found[i] = _spread(x, to)
        elif len(processes := owners(x.sharding, to)) > 1:
            crossings.setdefault((x.sharding.mesh, to.mesh), []).append(i)
        elif jax.process_index() in processes:
            found[i] = jax.device_put(x, to)
        else:
            found[i] = remote(x, to)
    for numbers in crossings.values():
        group = [arrays[i] for i in numbers]
        kinds = tuple((x.shape, x.dtype) for x in group)
        cross = crossing(kinds, tuple(x.sharding for x in group), tuple(shardings[i] for i in numbers))
        found |= dict(zip(numbers, cross(group), strict=True))
    return [found[i] for i in range(len(arrays))]


@functools.lru_cache(maxsize=128)
def crossing(
    kinds: tuple[tuple[tuple[int, ...], Any], ...], sources: tuple[NamedSharding, ...], targets: tuple[NamedSharding, ...]
) -> MeshCrossing:
    """The crossing of arrays with these shapes and dtypes; equal ones are compiled once."""
    return MeshCrossing([jax.ShapeDtypeStruct(*kind) for kind in kinds], sources, targets)


def _spread(x: Any, sharding: NamedSharding) -> jax.Array:
    """A local array as a global one: every process places the parts of its own devices."""
    x = x if _is_key(x) else np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index], dtype=x.dtype)


def read(arrays: Sequence[jax.Array]) -> list[Any]:
    """Reads arrays to the host of every process: `jax.device_get`, also for devices of other processes.

    All processes call it with arrays of equal shardings. What a process does not hold comes in one collective. Typed keys stay
    JAX arrays.
    """
    # JAX cannot assemble split arrays without elements: they are made on the host.
    full: list[Any] = [x if x.size or _is_key(x) else np.zeros(x.shape, x.dtype) for x in arrays]
    if jax.process_count() == 1:
        return jax.device_get(full)
    spread = [i for i, x in enumerate(full) if is_global(x) and not _is_everywhere(x)]
    found = dict(zip(spread, _gather([full[i] for i in spread]), strict=True)) if spread else {}
    return [found[i] if i in found else jax.device_get(_copy_here(x)) for i, x in enumerate(full)]


def _copy_here(x: Any) -> Any:
    return x.addressable_data(0) if is_global(x) else x


def _is_everywhere(x: jax.Array) -> bool:
    return x.is_fully_replicated and owners(x.sharding) == {*range(jax.process_count())}  # pyright: ignore[reportArgumentType]


def _gather(arrays: Sequence[jax.Array]) -> list[Any]:
    """Brings global arrays to every host: each process sends the blocks of which its device holds the first copy."""
    me = jax.process_index()
    sent: dict[int, list[tuple[int, Block]]] = {p: [] for p in range(jax.process_count())}
    made: list[np.ndarray] = []
    mine: list[np.ndarray] = []
    for number, x in enumerate(arrays):
        data = jax.random.key_data(x) if _is_key(x) else x
        made.append(np.empty(data.shape, data.dtype))
        held = blocks(data.sharding, data.shape)  # pyright: ignore[reportArgumentType]
        here = {shard.device: shard.data for shard in data.addressable_shards}
        for block, device in first_holders(held).items():
            sent[device.process_index].append((number, block))
            if device.process_index == me:
                mine.append(np.ascontiguousarray(here[device]).reshape(-1).view(np.uint8))
    lengths = {p: sum(_nbytes(made[number], block) for number, block in parts) for p, parts in sent.items()}
    gathered = _allgather_bytes(np.concatenate(mine) if mine else np.empty(0, np.uint8), max(lengths.values()))
    for p, parts in sent.items():
        start = 0
        for number, block in parts:
            out = made[number]
            stop = start + _nbytes(out, block)
            part = gathered[p, start:stop].view(out.dtype).reshape([high - low for low, high in block])
            out[tuple(slice(*bounds) for bounds in block)] = part
            start = stop
    impls = [jax.random.key_impl(x) if _is_key(x) else None for x in arrays]
    return [x if i is None else jax.random.wrap_key_data(jnp.asarray(x), impl=i) for x, i in zip(made, impls, strict=True)]


def first_holders(held: Mapping[Device, Block]) -> dict[Block, Device]:
    """The first device, by process and number, that holds each block."""
    first: dict[Block, Device] = {}
    for device in sorted(held, key=lambda d: (d.process_index, d.id)):
        first.setdefault(held[device], device)
    return first


def _nbytes(array: np.ndarray, block: Block) -> int:
    return array.itemsize * int(np.prod([high - low for low, high in block], dtype=np.int64))


def _allgather_bytes(data: np.ndarray, length: int) -> np.ndarray:
    """The bytes of every process, `[processes, length]`; sizes are rounded up, so that few collectives are compiled."""
    parts = [np.empty((jax.process_count(), 0), np.uint8)]
    for start in range(0, length, _AT_ONCE):
        part = data[start : start + _AT_ONCE]
        size = 1 << (min(length - start, _AT_ONCE) - 1).bit_length()
        parts.append(multihost_utils.process_allgather(np.pad(part, (0, size - len(part)))))
    return np.ascontiguousarray(np.concatenate(parts, axis=1)[:, :length])


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
