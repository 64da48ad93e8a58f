"""Bundles: small arrays of a Move travel as one vector, because the host pays for every array that it transfers.

JAX reads an array that is split over devices to the host if the other placement does not split it so. The program that joins
small arrays gathers them instead, so that the host does not wait for them.
"""

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from msrl_jax._device_memory import is_planned
from msrl_jax.fragments.executables import SMALLER_THAN_A_BYTE, Bundles, Executables, whole
from msrl_jax.fragments.instructions import Move, Value

SMALL = 2**16
"""Arrays of at most this many bytes are joined; more are better sent than copied twice."""


def bundle(i: Move, executables: Executables) -> None:
    """Compiles the programs that join and split the small values of a Move, if there is something to join or to gather.

    As many bytes arrive. Values that cross between processes, or between placements with a common device, travel as they are.

    Args:
      i: the instruction.
      executables: the shardings of its values; receives the bundles.
    """
    devices = {d for v in (i.sources[0], i.results[0]) for d in v.placement.devices}
    if i.processes != {jax.process_index()} or i.shares_devices or any(map(is_planned, devices)):
        return
    at = executables.shardings
    groups: dict[str, list[int]] = {}
    for k, (source, result) in enumerate(zip(i.sources, i.results, strict=True)):
        if _is_plain(source) and source.nbytes <= SMALL and at[result].is_fully_replicated:
            groups.setdefault(source.aval.dtype.name, []).append(k)
    groups = {name: ks for name, ks in groups.items() if len(ks) > 1 or not at[i.sources[ks[0]]].is_fully_replicated}
    if not groups:
        return
    joined = tuple(k for ks in groups.values() for k in ks)
    alone = tuple(k for k in range(len(i.sources)) if k not in joined)
    shapes = tuple(tuple(i.sources[k].aval.shape for k in ks) for ks in groups.values())

    def join(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        rest = iter(arrays)
        return tuple(_joined([next(rest) for _ in group]) for group in shapes)

    def split(*vectors: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(x for vector, group in zip(vectors, shapes, strict=True) for x in _parts(vector, group))

    sent, arriving = whole(i.sources[0]), whole(i.results[0])
    sources, results = ([values[k] for k in joined] for values in (i.sources, i.results))
    out = [sent] * len(groups)
    joining = executables.compile(("join", shapes), join, _specs(sources, at), (), out)
    splitting = None
    if len(joined) > len(groups):
        made = jax.eval_shape(join, *_specs(sources, at))
        vectors = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=arriving) for x in made]
        splitting = executables.compile(("split", shapes), split, vectors, (), [at[v] for v in results])
    shardings = (*(at[i.results[k]] for k in alone), *[arriving] * len(groups))
    executables.bundles[i] = Bundles(alone, joined, joining, splitting, shardings)


def _is_plain(value: Value) -> bool:
    aval = value.aval
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return aval.size > 0 and not is_key and not aval.weak_type and aval.dtype.name not in SMALLER_THAN_A_BYTE


def _specs(values: Sequence[Value], at: Mapping[Value, NamedSharding]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=at[v]) for v in values]


def _joined(arrays: Sequence[jax.Array]) -> jax.Array:
    return arrays[0].copy() if len(arrays) == 1 else jnp.concatenate([x.reshape(-1) for x in arrays])


def _parts(vector: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    if len(shapes) == 1:
        return [vector]
    parts, start = [], 0
    for shape in shapes:
        stop = start + math.prod(shape)
        parts.append(vector[start:stop].reshape(shape))
        start = stop
    return parts
