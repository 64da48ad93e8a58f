"""Accelerator kernels for the linear recursion of advantages and returns: one Pallas program per block of columns.

XLA launches one or more kernels per step of a short `jax.lax.scan`. A program of this file holds `x` in registers and loops
over all `T` rows. Algorithms do not use these kernels by default; a fragment takes them as implementations:

    fragment(role="learner", implementations={"gpu": reverse_scan_gpu, "tpu": reverse_scan_tpu})(reverse_scan)
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as pltriton

from msrl_jax.algorithms.returns.advantages import accumulate

Scan = Callable[[jax.Array, jax.Array, bool], jax.Array]
"""`(a [T, E], b [T, E], reverse) -> x [T, E]`."""

_COLUMNS = 128  # a vector register of a TPU is 8 by 128; blocks of 128 threads are small enough to fill a GPU
_ROWS = 512  # rows of a block on a TPU; its vector memory holds three blocks of 256 KiB, twice


def reverse_scan(a: jax.Array, b: jax.Array) -> jax.Array:
    """Solves `x[t] = a[t] + b[t] * x[t + 1]` with `x[T] = 0`, by a `jax.lax.scan`.

    Advantages and discounted returns have this form. For advantages, `a` is the temporal-difference error, and `b` is the
    discount times lambda, or 0 where an episode ends.

    Args:
      a: the summands. `[T, ...]`
      b: the factors. `[T, ...]`

    Returns:
      The solution. `[T, ...]`
    """
    return accumulate(a, b)


def reverse_scan_gpu(a: jax.Array, b: jax.Array, *, interpret: bool = False) -> jax.Array:
    """`reverse_scan` as a Triton kernel for GPUs.

    XLA cannot split the kernel: if `a` and `b` are split over devices, call it in a `jax.shard_map`.

    Args:
      a: the summands. `[T, ...]` float32
      b: the factors. `[T, ...]` float32
      interpret: evaluate the kernel step by step on any platform, for tests.

    Returns:
      The solution. `[T, ...]` float32

    Raises:
      TypeError: if `a` and `b` are not float32 arrays of one shape with at least one row.
    """
    return _columnwise(functools.partial(_gpu_scan, interpret=interpret), a, b)


def reverse_scan_tpu(a: jax.Array, b: jax.Array, *, interpret: bool = False) -> jax.Array:
    """`reverse_scan` as a Mosaic kernel for TPUs; see `reverse_scan_gpu`."""
    return _columnwise(functools.partial(_tpu_scan, interpret=interpret), a, b)


def _columnwise(scan: Scan, a: jax.Array, b: jax.Array) -> jax.Array:
    if a.shape != b.shape or not a.ndim or not a.size or {a.dtype, b.dtype} != {jnp.dtype(jnp.float32)}:
        raise TypeError(
            f"the kernel of reverse_scan takes two float32 arrays [T, ...] of one shape, not {jax.typeof(a).str_short()} "
            f"and {jax.typeof(b).str_short()}; convert them, or use reverse_scan"
        )
    return _solve(scan, a.reshape(a.shape[0], -1), b.reshape(b.shape[0], -1)).reshape(a.shape)


def _solve_reverse(scan: Scan, a: jax.Array, b: jax.Array) -> jax.Array:
    return scan(a, b, True)


def _solve_forward(scan, a, b):
    x = scan(a, b, True)
    return x, (b, x)


def _solve_backward(scan, residuals, g):
    # x[t] also enters x[t - 1], with the factor b[t - 1]. So the gradient is the same recursion, forwards in time.
    b, x = residuals
    total = scan(g, jnp.concatenate([jnp.zeros_like(b[:1]), b[:-1]]), False)
    return total, total * jnp.concatenate([x[1:], jnp.zeros_like(x[:1])])


_solve = jax.custom_vjp(_solve_reverse, nondiff_argnums=(0,))
_solve.defvjp(_solve_forward, _solve_backward)


def _scan_rows(a_ref, b_ref, x_ref, x: jax.Array, reverse: bool) -> jax.Array:
    """Loops over the rows of one block, and returns the last `x` `[1, columns]`."""
    rows = a_ref.shape[0]

    def step(i, x):
        row = pl.ds(rows - 1 - i if reverse else i, 1)
        x = a_ref[row, :] + b_ref[row, :] * x
        x_ref[row, :] = x
        return x

    return jax.lax.fori_loop(0, rows, step, x)


def _gpu_scan(a: jax.Array, b: jax.Array, reverse: bool, interpret: bool) -> jax.Array:
    def kernel(a_ref, b_ref, x_ref):
        _scan_rows(a_ref, b_ref, x_ref, jnp.zeros((1, _COLUMNS), jnp.float32), reverse)

    rows, columns = a.shape
    a, b = _padded(a, 1, _COLUMNS), _padded(b, 1, _COLUMNS)
    block = pl.BlockSpec((rows, _COLUMNS), lambda i: (0, i))
    solve = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(a.shape, a.dtype),
        grid=(a.shape[1] // _COLUMNS,),
        in_specs=[block, block],
        out_specs=block,
        compiler_params=pltriton.CompilerParams(num_warps=4),
        interpret=interpret,
        name="reverse_scan",
    )
    return solve(a, b)[:, :columns]


def _tpu_scan(a: jax.Array, b: jax.Array, reverse: bool, interpret: bool) -> jax.Array:
    def kernel(a_ref, b_ref, x_ref, carried_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            carried_ref[...] = jnp.zeros_like(carried_ref)

        carried_ref[...] = _scan_rows(a_ref, b_ref, x_ref, carried_ref[...], reverse)

    rows, columns = a.shape
    block_rows = min(_ROWS, -(-rows // 8) * 8)
    # Rows of zeros after the end change nothing, in both directions.
    a, b = _padded(a, block_rows, _COLUMNS), _padded(b, block_rows, _COLUMNS)
    last = a.shape[0] // block_rows - 1
    block = pl.BlockSpec((block_rows, _COLUMNS), lambda i, j: (last - j if reverse else j, i))
    solve = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(a.shape, a.dtype),
        grid=(a.shape[1] // _COLUMNS, last + 1),
        in_specs=[block, block],
        out_specs=block,
        scratch_shapes=[pltpu.VMEM((1, _COLUMNS), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="reverse_scan",
    )
    return solve(a, b)[:rows, :columns]


def _padded(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """`x` padded with zeros to a multiple of `rows` and `columns`."""
    return jnp.pad(x, [(0, -size % multiple) for size, multiple in zip(x.shape, (rows, columns), strict=True)])
