"""Bundles: small arrays of a Move travel as one vector, because the host pays for every array that it transfers.

JAX reads an array that is split over devices to the host if the other placement does not split it so. The program that joins
small arrays gathers them, so the host does not wait for these.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from msrl_jax._device_memory import is_planned
from msrl_jax.fragments.passes.instructions import Move, Value
from msrl_jax.fragments.runtime.executables import SMALLER_THAN_A_BYTE, Bundles, Executables, whole

SMALL = 2**16
"""Arrays of at most this many bytes are joined; more are better sent than copied twice."""


def bundle(i: Move, executables: Executables) -> None:
    """Compiles the programs that join and split the small values of a Move, if some have the same dtype.

    As many bytes arrive. Only values that arrive whole on each device are joined. Values that cross between processes, or
    between placements with a common device, travel as they are.

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
    several = [ks for ks in groups.values() if len(ks) > 1]
    if not several:
        return
    joined = tuple(k for ks in several for k in ks)
    alone = tuple(k for k in range(len(i.sources)) if k not in joined)
    shapes = tuple(tuple(i.sources[k].aval.shape for k in ks) for ks in several)

    def join(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        rest = iter(arrays)
        return tuple(jnp.concatenate([next(rest).reshape(-1) for _ in group]) for group in shapes)

    def split(*vectors: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(x for vector, group in zip(vectors, shapes, strict=True) for x in _parts(vector, group))

    sent, arriving = [whole(i.sources[0])] * len(several), [whole(i.results[0])] * len(several)
    arrays = [_spec(i.sources[k].aval, at[i.sources[k]]) for k in joined]
    vectors = [_spec(x, to) for x, to in zip(jax.eval_shape(join, *arrays), arriving, strict=True)]
    executables.bundles[i] = Bundles(
        alone, joined,
        executables.compile(("join", shapes), join, arrays, (), sent),
        executables.compile(("split", shapes), split, vectors, (), [at[i.results[k]] for k in joined]),
        (*(at[i.results[k]] for k in alone), *arriving),
    )  # fmt: skip


def _is_plain(value: Value) -> bool:
    aval = value.aval
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return aval.size > 0 and not is_key and not aval.weak_type and aval.dtype.name not in SMALLER_THAN_A_BYTE


def _spec(kind: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding)


def _parts(vector: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    parts, start = [], 0
    for shape in shapes:
        stop = start + math.prod(shape)
        parts.append(vector[start:stop].reshape(shape))
        start = stop
    return parts
