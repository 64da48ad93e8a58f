"""Coalescing: small values of a Move travel as one vector, because every transferred array costs host time."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from msrl_jax._compat import ShapedArray
from msrl_jax.fragments.passes.instructions import Move, Value
from msrl_jax.fragments.runtime.executables import SMALLER_THAN_A_BYTE, Coalesced, Executables, Request, replicated_sharding
from msrl_jax.fragments.runtime.memory import is_planned

SMALL = 2**16
"""Arrays of a Move of at most this many bytes are joined; sending larger ones is cheaper than copying them twice."""


def coalesce(i: Move, executables: Executables) -> None:
    """Compiles the programs that join and split the small values of a Move, if several have the same dtype.

    Every transferred array costs host time; the number of bytes does not change. Only replicated values are joined, at the
    source: JAX would read an array that is split over devices to the host if the other placement splits it differently. Values
    that cross between processes, or between placements with a common device, are sent separately.
    """
    devices = {d for v in (i.sources[0], i.results[0]) for d in v.placement.devices}
    if i.processes != {jax.process_index()} or i.shares_devices or any(map(is_planned, devices)):
        return
    shardings = executables.shardings
    groups: dict[str, list[int]] = {}
    for k, (source, result) in enumerate(zip(i.sources, i.results, strict=True)):
        if _is_plain(source) and source.nbytes <= SMALL and shardings[result].is_fully_replicated:
            groups.setdefault(source.aval.dtype.name, []).append(k)
    if not (joinable := [ks for ks in groups.values() if len(ks) > 1]):
        return
    joined = tuple(k for ks in joinable for k in ks)
    separate = tuple(k for k in range(len(i.sources)) if k not in joined)
    shapes = tuple(tuple(i.sources[k].aval.shape for k in ks) for ks in joinable)

    def join(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        remaining = iter(arrays)
        return tuple(jnp.concatenate([next(remaining).reshape(-1) for _ in group]) for group in shapes)

    def split(*vectors: jax.Array) -> tuple[jax.Array, ...]:
        pairs = zip(vectors, shapes, strict=True)
        parts = [(jnp.split(v, np.cumsum([math.prod(shape) for shape in group])[:-1]), group) for v, group in pairs]
        return tuple(x.reshape(shape) for xs, group in parts for x, shape in zip(xs, group, strict=True))

    source_shardings, result_shardings = (
        [replicated_sharding(i.sources[0])] * len(joinable),
        [replicated_sharding(i.results[0])] * len(joinable),
    )
    arrays = [_spec(i.sources[k].aval, shardings[i.sources[k]]) for k in joined]
    vectors = [_spec(x, to) for x, to in zip(jax.eval_shape(join, *arrays), result_shardings, strict=True)]
    executables.coalesced[i] = Coalesced(
        separate,
        joined,
        executables.compile(Request(("join", shapes), join, arrays, (), source_shardings)),
        executables.compile(Request(("split", shapes), split, vectors, (), [shardings[i.results[k]] for k in joined])),
        (*(shardings[i.results[k]] for k in separate), *result_shardings),
    )


def _is_plain(value: Value) -> bool:
    aval = value.aval
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return aval.size > 0 and not is_key and not aval.weak_type and aval.dtype.name not in SMALLER_THAN_A_BYTE


def _spec(kind: ShapedArray | jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding)
