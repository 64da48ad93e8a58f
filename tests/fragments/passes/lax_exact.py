"""Operations of `jax.lax` whose results are the same bits however an array is split.

Each case is a function of `Inputs` and of the dimension `d` along which it works. The first word of its name is the operation
in `jax.lax`; the rest tells cases of one operation apart.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.fragments.passes.lax_inputs import BEYOND, LAST, ROWS, dims, moved, scatter_rows, window

_BITS = ("bitwise_and", "bitwise_or", "bitwise_xor", "mulhi", "shift_left", "shift_right_arithmetic", "shift_right_logical")
_BITS_OF_ONE = ("bitwise_not", "clz", "population_count")
_PADS = (
    *((1, 2, 0), (1, -1, 0), (-1, 1, 0), (-1, -2, 0), (-3, 2, 0), (1, 2, 1), (1, 2, 5), (-1, -2, 1), (-1, -2, 2), (-2, 2, 1)),
    *((2, -2, 1), (-1, 0, 2), (0, -3, 1), (0, 0, 3), (-1, -2, 5)),
)


def _starts(s, d, j):
    """Start indices: the j-th of `n` along `d`, 0 along the other."""
    return [s.n[j] if a == d else jnp.int32(0) for a in range(2)]


def _part(x, d, size):
    return lax.slice_in_dim(x, 0, min(size, x.shape[d]), axis=d)


def _update(size, at):
    return lambda s, d: lax.dynamic_update_slice(s.y, 9 + _part(s.y, d, size), _starts(s, d, at))


def _read(size, at):
    return lambda s, d: lax.dynamic_slice(s.y, _starts(s, d, at), _part(s.y, d, size).shape)


def _pad(low_high, value):
    pads = lambda d: [low_high if a == d else (0, 0, 0) for a in range(2)]
    return lambda s, d: lax.pad(s.y, s.y[0, 0] if value is None else jnp.float32(value), pads(d))


def _indexed(method, **options):
    """Rows along `d` by indices of which some are beyond the end."""

    def f(s, d):
        y, rows = jnp.moveaxis(s.y, d, 0), jnp.moveaxis(s.k, d, 0)[:, 0]
        ref = y.at[rows]
        return ref.get(**options) if method == "get" else getattr(ref, method)(y * 2 + 1, **options)

    return f


def _set(s, d):
    y = jnp.moveaxis(s.y, d, 0)
    rows = jnp.argsort(jnp.moveaxis(s.y, d, 0)[:, 0]) * 2 - 1  # each once; the first and the second half are beyond
    return y.at[rows].set(y + 1, mode="drop"), y.at[s.n[BEYOND]].set(7.0), y.at[s.n[LAST]].set(8.0)


def _raw_gather(mode):
    def f(s, d):
        y, rows = jnp.moveaxis(s.y, d, 0), jnp.moveaxis(s.k, d, 0)[:, :1]
        dims = lax.GatherDimensionNumbers((1,), (0,), (0,))
        return lax.gather(y, rows, dims, (1, y.shape[1]), mode=mode)

    return f


def _write_all(s, d):
    """Writes one place after the other, and beyond the end."""
    write = lambda i, c: lax.dynamic_update_index_in_dim(c, lax.index_in_dim(c, 0, d) + 1, i, d)
    return lax.fori_loop(0, s.y.shape[d] + 3, write, s.y)


def _split(s, d):
    size = s.x.shape[d]
    return lax.split(s.x, (1, size - 1), axis=d) if size > 1 else s.x


def _write_one(s, d, j):
    return lax.dynamic_update_index_in_dim(s.x, lax.index_in_dim(s.y, 0, d, keepdims=False), s.n[j], d)


EXACT = {
    **{n: lambda s, d, n=n: getattr(lax, n)(s.i, s.k % 32) for n in _BITS},
    **{n: lambda s, d, n=n: getattr(lax, n)(s.i) for n in _BITS_OF_ONE},
    **{f"{n} b": lambda s, d, n=n: getattr(lax, n)(s.x > 0, s.i > 0) for n in _BITS[:3]},
    "argmax": lambda s, d: (lax.argmax(s.x, d, jnp.int32), lax.argmax(s.y, d, jnp.int32), lax.argmax(s.i, d, jnp.int32)),
    "argmin": lambda s, d: (lax.argmin(s.x, d, jnp.int32), lax.argmin(s.y, d, jnp.int32), lax.argmin(s.i, d, jnp.int32)),
    "associative_scan max": lambda s, d: lax.associative_scan(jnp.maximum, s.x, axis=d),
    "associative_scan reverse": lambda s, d: lax.associative_scan(jnp.minimum, s.i, axis=d, reverse=True),
    "bitcast_convert_type": lambda s, d: (lax.bitcast_convert_type(s.y, jnp.int32), lax.bitcast_convert_type(s.y, jnp.int8)),
    "broadcast": lambda s, d: lax.broadcast(s.x, (2, 3)),
    "broadcast_in_dim": lambda s, d: lax.broadcast_in_dim(s.x, (s.x.shape[0], 2, s.x.shape[1]), (0, 2)),
    "broadcast_to_rank": lambda s, d: lax.broadcast_to_rank(s.x, 4),
    "broadcasted_iota": lambda s, d: lax.broadcasted_iota(jnp.int32, s.x.shape, d) + s.i,
    "clamp": lambda s, d: (lax.clamp(np.float32(-0.5), s.x, np.float32(0.5)), lax.clamp(s.x, s.y, abs(s.y) + 1)),
    "collapse": lambda s, d: lax.collapse(s.x, 0, 2),
    "concatenate": lambda s, d: (lax.concatenate([s.x, s.y], d), lax.concatenate([_part(s.x, d, 1), s.y, _part(s.x, d, 2)], d)),
    "cond": lambda s, d: lax.cond(s.n[0] < 0, lambda v: lax.reduce_max(v, (d,)), lambda v: lax.reduce_min(v, (d,)), s.x),
    "convert_element_type": lambda s, d: (lax.convert_element_type(s.y, jnp.bfloat16), s.i.astype(jnp.int8), s.x != 0),
    "cummax": lambda s, d: (lax.cummax(s.x, d), lax.cummax(s.x, d, reverse=True), lax.cummax(s.i, d)),
    "cummin": lambda s, d: (lax.cummin(s.x, d), lax.cummin(s.x, d, reverse=True), lax.cummin(s.i, d)),
    "cumsum int": lambda s, d: (lax.cumsum(s.i, d), lax.cumsum(s.i, d, reverse=True)),
    "cumprod int": lambda s, d: (lax.cumprod(s.i, d), lax.cumprod(s.i, d, reverse=True)),
    "dynamic_index_in_dim": lambda s, d: [lax.dynamic_index_in_dim(s.x, s.n[j], d) for j in range(6)],
    "dynamic_slice_in_dim": lambda s, d: [lax.dynamic_slice_in_dim(s.x, s.n[j], 2, d) for j in range(6)],
    "dynamic_update_index_in_dim": lambda s, d: [_write_one(s, d, j) for j in range(6)],
    "dynamic_update_slice_in_dim": lambda s, d: lax.dynamic_update_slice_in_dim(s.x, _part(s.y, d, 3), s.n[BEYOND], d),
    **{f"dynamic_slice {size} {j}": _read(size, j) for size in (1, 2, 3, 99) for j in range(6)},
    **{f"dynamic_update_slice {size} {j}": _update(size, j) for size in (1, 2, 3, 99) for j in range(6)},
    "expand_dims": lambda s, d: lax.expand_dims(s.x, (0, 2)),
    "fori_loop": _write_all,
    "full_like": lambda s, d: lax.full_like(s.x, 2.5) + s.y,
    **{f"gather {mode}": _raw_gather(mode) for mode in ("clip", "fill")},
    "gather along": lambda s, d: jnp.take_along_axis(s.y, s.k % s.y.shape[d], d),
    "gather get": _indexed("get", mode="fill", fill_value=7),
    "index_in_dim": lambda s, d: (lax.index_in_dim(s.x, 0, d), lax.index_in_dim(s.x, -1, d)),
    "index_take": lambda s, d: lax.index_take(s.y, (jnp.moveaxis(s.k, d, 0)[:, 0] % s.y.shape[d],), (d,)),
    "iota": lambda s, d: lax.iota(jnp.int32, s.x.shape[d]) + jnp.moveaxis(s.i, d, -1),
    "map": lambda s, d: lax.map(jnp.max, jnp.moveaxis(s.x, d, 0)),
    "optimization_barrier": lambda s, d: lax.optimization_barrier((s.x, s.i)),
    **{f"pad {p} {v}": _pad(p, v) for p in _PADS for v in (0, 5, None)},
    "pad odd": lambda s, d: [lax.pad(s.x[1:, 1:], np.float32(v), [(0, 1, 0)] * 2) for v in (0, 3)],
    "reduce max": lambda s, d: lax.reduce(s.x, np.float32(-np.inf), lax.max, (d,)),
    "reduce own": lambda s, d: lax.reduce(s.i, np.int32(0), lambda a, b: jnp.where(abs(a) > abs(b), a, b), (d,)),
    "reduce int": lambda s, d: [lax.reduce(s.i, np.int32(v), op, (d,)) for op, v in ((lax.mul, 1), (lax.add, 0))],
    "reduce pair": lambda s, d: lax.reduce(
        (s.y, s.i), (np.float32(-np.inf), np.int32(0)), lambda a, b: (lax.max(a[0], b[0]), a[1] ^ b[1]), (d,)
    ),
    **{
        f"reduce_{n} x": lambda s, d, n=n: [getattr(lax, f"reduce_{n}")(s.x, a) for a in ((d,), (0, 1))] for n in ("max", "min")
    },
    **{
        f"reduce_{n} i": lambda s, d, n=n: [getattr(lax, f"reduce_{n}")(s.i, a) for a in ((d,), (0, 1))]
        for n in ("max", "min", "sum", "prod", "xor", "or", "and")
    },
    **{
        f"reduce_{n} b": lambda s, d, n=n: [getattr(lax, f"reduce_{n}")(s.x > 0, a) for a in ((d,), (0, 1))]
        for n in ("max", "min", "xor", "or", "and")
    },
    **{
        f"reduce_{n} part": lambda s, d, n=n: getattr(lax, f"reduce_{n}")(lax.slice_in_dim(s.x, 1, None, axis=d), (d,))
        for n in ("max", "min")
    },
    **{
        f"reduce_{n} bf16": lambda s, d, n=n: getattr(lax, f"reduce_{n}")(s.x.astype(jnp.bfloat16), (d,))
        for n in ("max", "min")
    },
    **{
        f"reduce_window shrunk {v}": window(lax.max, -np.inf, *v)
        for v in ((2, 1, (-1, 1), 2), (3, 2, (-1, 2), 3), (2, 1, (-1, 2)))
    },
    "reduce_precision": lambda s, d: lax.reduce_precision(s.x, 5, 3),
    **{
        f"reduce_window {n} {v}": window(op, v0, *v)
        for n, op, v0 in (("max", lax.max, -np.inf), ("min", lax.min, np.inf))
        for v in (
            (2,),
            (3,),
            (3, 2),
            (3, 3),
            (2, 2, "VALID"),
            (3, 1, "VALID"),
            (3, 1, "SAME", 2),
            (2, 1, "SAME", 1, 2),
            (1, 2),
            (2, 4),
        )
    },
    "reshape": lambda s, d: (
        lax.reshape(s.x, (s.x.size,)),
        lax.reshape(s.x, (2, s.x.size // 2)),
        lax.reshape(s.x, s.x.shape[::-1]),
    ),
    "rev": lambda s, d: (lax.rev(s.x, (d,)), lax.rev(s.x, (0, 1)), lax.rev(lax.slice_in_dim(s.x, 1, None, axis=d), (d,))),
    "scan max": lambda s, d: lax.scan(
        lambda c, r: (jnp.maximum(c, r), r.max()), jnp.moveaxis(s.x, d, 0)[0], jnp.moveaxis(s.x, d, 0)
    ),
    "scatter": _set,
    "scatter clip": lambda s, d: lax.scatter(
        jnp.moveaxis(s.y, d, 0), s.n[3:, None][:1], jnp.ones((1, s.y.shape[1 - d])), ROWS, mode="clip"
    ),
    **{f"scatter_{n} {m}": scatter_rows(f"scatter_{n}", mode=m) for n in ("max", "min") for m in ("clip", "drop")},
    "scatter_max nan": lambda s, d: jnp.moveaxis(s.y, d, 0).at[jnp.moveaxis(s.k, d, 0)[:, 0] % 3].max(jnp.moveaxis(s.x, d, 0)),
    "scatter_min nan": lambda s, d: jnp.moveaxis(s.y, d, 0).at[jnp.moveaxis(s.k, d, 0)[:, 0] % 3].min(jnp.moveaxis(s.x, d, 0)),
    "scatter_apply": lambda s, d: s.y.at[(slice(None),) * d + (np.array([0, 2]),)].apply(jnp.negative),
    "select": lambda s, d: lax.select(s.i > 0, s.x, s.y),
    "select_n": lambda s, d: lax.select_n(s.k % 3, s.x, s.y, -s.x),
    "slice": lambda s, d: lax.slice(s.x, dims(d, 1, 0), dims(d, s.x.shape[d], s.x.shape[1 - d]), dims(d, 2, 1)),
    "slice_in_dim": lambda s, d: [
        lax.slice_in_dim(s.x, a, b, c, d) for a, b, c in ((1, None, 1), (0, -1, 1), (0, None, 3), (2, 3, 1))
    ],
    "sort": lambda s, d: (
        lax.sort(s.x, dimension=d),
        lax.sort((s.i % 5, s.x), dimension=d, num_keys=2),
        lax.sort((s.k % 3, s.y), dimension=d),
    ),
    "sort_key_val": lambda s, d: lax.sort_key_val(s.i, s.x, d),
    "sort part": lambda s, d: jnp.argsort(lax.slice_in_dim(s.x, 1, None, axis=d), d),
    "split": _split,
    "squeeze": lambda s, d: lax.squeeze(s.x[:, None], (1,)),
    "stack": lambda s, d: lax.stack([s.x, s.y], axis=d),
    "switch": lambda s, d: lax.switch(s.n[2], [lambda v: lax.cummax(v, d), lambda v: v], s.x),
    "tile": lambda s, d: lax.tile(s.x, dims(d, 2, 1)),
    "top_k": moved(lambda x: lax.top_k(x, min(3, x.shape[-1]))),
    "top_k y": moved(lambda x: lax.top_k(x, min(2, x.shape[-1])), "y"),
    "transpose": lambda s, d: lax.transpose(s.x, (1, 0)),
    "unstack": lambda s, d: lax.unstack(s.x, axis=d),
    "while_loop": lambda s, d: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.roll(c[1], 1, d)), (0, s.x)),
    "with_sharding_constraint": lambda s, d: s.x,
    "reduce_or any": lambda s, d: (jnp.isnan(s.x).any(d), jnp.isnan(s.x).all(d), jnp.isnan(s.x).any()),
    "approx_max_k": moved(lambda x: lax.approx_max_k(x, min(2, x.shape[-1]))[0], "y"),
    "approx_min_k": moved(lambda x: lax.approx_min_k(x, min(2, x.shape[-1]))[0], "y"),
    "rng_bit_generator": lambda s, d: (
        lax.rng_bit_generator(jnp.arange(4, dtype=jnp.uint32), s.x.shape)[1] + s.i.astype(jnp.uint32)
    ),
    "rng_bit_generator keys": lambda s, d: jax.vmap(lambda i: jax.random.bits(jax.random.fold_in(jax.random.key(0), i), (3,)))(
        jnp.moveaxis(s.i, d, 0)[:, 0]
    ),
    "rng_bit_generator split": lambda s, d: jax.random.bits(jax.random.key(s.i[0, 0]), s.x.shape) ^ s.i.astype(jnp.uint32),
    "rng_bit_generator permutation": lambda s, d: jax.random.permutation(jax.random.key(1), s.x, d),
}
