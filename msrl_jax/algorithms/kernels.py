"""What is computed one way on CPUs and another way on accelerators, behind plain functions.

XLA's CPU compiler and its compilers for accelerators are fast for other programs: a CPU wants products of certain shapes and
loops over steps, an accelerator wants few launches. Each function computes the same mathematics on all platforms.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

_LARGE = 2**20  # with more numbers than these a copy takes longer than the launches that it saves


def _weight_gradient(x: jax.Array, g: jax.Array) -> jax.Array:
    """The sum of `x.T @ g` over rows, `[..., M]` and `[..., N]` to `[M, N]`; rows keep their dimensions and their devices."""
    rows = tuple(range(x.ndim - 1))
    return jax.lax.dot_general(x, g, ((rows, rows), ((), ())))


def _weight_gradient_on_cpu(x: jax.Array, g: jax.Array) -> jax.Array:
    rows = tuple(range(x.ndim - 1))
    if g.shape[-1] == 1:  # values; a product this narrow is slower than a sum
        return (x * g).sum(rows)[:, None]
    # XLA's fast CPU kernels contract the last dimension of the left operand. Without the barrier, XLA folds the
    # transpose into a product that contracts the first dimension, and a PPO update on two cores takes 20 % longer.
    transposed = jax.lax.optimization_barrier(jnp.moveaxis(x, -1, 0))
    return jax.lax.dot_general(transposed, g, ((tuple(i + 1 for i in rows), rows), ((), ())))


@jax.custom_vjp
def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """`x @ w` for `x` `[..., M]` and `w` `[M, N]`."""
    return x @ w


def _matmul_backward(residuals, g):
    x, w = residuals
    dw = jax.lax.platform_dependent(x, g, cpu=_weight_gradient_on_cpu, default=_weight_gradient)
    return (g @ w.T).astype(x.dtype), dw.astype(w.dtype)


matmul.defvjp(lambda x, w: (x @ w, (x, w)), _matmul_backward)


def _convolve(x, w, stride):
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _patches(x, window, stride):
    """What each filter sees, `[B, H, W, C]` to `[B, H', W', h * w * C]`."""
    height, width = (size - side + 1 for size, side in zip(x.shape[1:3], window, strict=True))
    return jnp.concatenate([x[:, i : i + height : stride, j : j + width : stride] for i, j in np.ndindex(*window)], axis=-1)


def _product(x, w):
    return _patches(x, w.shape[:2], 1) @ w.reshape(-1, w.shape[-1])


@cache
def _forward(stride: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    usual = partial(_convolve, stride=stride)

    # XLA's CPU convolutions are slow if the members of a population have filters of their own: PPO on MinAtar took twice
    # as long with five seeds.
    def batched(size, in_batched, x, w):
        axes = [0 if each else None for each in in_batched]
        one = jax.vmap(usual, axes)
        if stride > 1 or not in_batched[1]:
            return one(x, w), True
        return jax.lax.platform_dependent(x, w, cpu=jax.vmap(_product, axes), default=one), True

    convolve = jax.custom_batching.custom_vmap(usual)
    convolve.def_vmap(batched)
    return convolve


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolve(x: jax.Array, w: jax.Array, stride: int) -> jax.Array:
    """Convolves images `x` `[B, H, W, C]` with filters `w` `[h, w, C, D]`, without padding, with a stride."""
    return _forward(stride)(x, w)


def _convolve_backward(stride, residuals, g):
    def usual(x, w, g):
        return jax.vjp(partial(_convolve, stride=stride), x, w)[1](g)

    # Inside a loop, XLA's CPU convolution is slow for filters as large as in the gradient of the filters: a PPO update on
    # MinAtar took ten times as long. That of the input is slow without a stride, up to 27 times; with one, the product is.
    def product(x, w, g):
        patches, to_input = jax.vjp(lambda x: _patches(x, w.shape[:2], stride), x)
        dw = _weight_gradient_on_cpu(patches, g).reshape(w.shape)
        return to_input(g @ w.reshape(-1, w.shape[-1]).T)[0] if stride == 1 else usual(x, w, g)[0], dw

    return jax.lax.platform_dependent(*residuals, g, cpu=product, default=usual)


convolve.defvjp(lambda x, w, stride: (convolve(x, w, stride), (x, w)), _convolve_backward)


def backward_sums(delta: jax.Array, decay: jax.Array) -> jax.Array:
    """Sums backwards in time: `sum[t] = delta[t] + decay[t] * sum[t + 1]`. `[T, ...]`.

    A CPU goes from step to step. Other devices, which would launch kernels for each, double the reach of all sums at once:
    `log2(T)` kernels (Kogge & Stone, 1973).
    """
    return jax.lax.platform_dependent(delta, decay, cpu=_step_by_step, default=_doubling)


def _step_by_step(delta: jax.Array, decay: jax.Array) -> jax.Array:
    def backwards(total, step):
        delta, decay = step
        total = delta + decay * total
        return total, total

    return jax.lax.scan(backwards, jnp.zeros_like(delta, shape=delta.shape[1:]), (delta, decay), reverse=True)[1]


def _doubling(total: jax.Array, decay: jax.Array) -> jax.Array:
    reach = 1
    while reach < len(total):
        later, further = (jnp.concatenate([x[reach:], jnp.zeros_like(x[:reach])]) for x in (total, decay))
        total, decay = total + decay * later, decay * further
        reach *= 2
    return total


def global_norm(tree: Any) -> jax.Array:
    """The norm of all numbers of a pytree together. On devices that would launch a kernel for each leaf, of one vector."""
    leaves = jax.tree.leaves(tree)
    if len({jnp.result_type(x) for x in leaves}) != 1 or sum(jnp.size(x) for x in leaves) > _LARGE:
        return jnp.asarray(optax.tree.norm(tree))

    def of_vector(*leaves: jax.Array) -> jax.Array:
        return optax.tree.norm(jnp.concatenate([jnp.ravel(x) for x in leaves]))

    return jax.lax.platform_dependent(*leaves, cpu=lambda *leaves: optax.tree.norm(leaves), default=of_vector)


def truncated_values(
    value: Callable[[Any, Any], jax.Array], params: Any, final: Any, truncated: jax.Array, *, and_last: bool = False
) -> jax.Array:
    """The values `[T, E, ...]` of the last observations of episodes: right where `truncated`, and at the end if `and_last`.

    `value` is `(params, last observations [N, ...]) -> values [N, ...]` for any `N`; `final` has the observations before a
    reset, with whatever else `value` needs: a pytree of `[T, E, ...]`, as is `truncated`.

    A CPU computes those values alone: of the first truncation of every environment, of the second, and so on; devices that
    share the environments tell one another how often, which is one integer. Other devices compute the values of all steps at
    once, since a loop that depends on data would wait for the host. So do the members of several runs in one, which would wait
    for one another on several devices.
    """

    def some(params: Any, final: Any, truncated: jax.Array) -> jax.Array:
        needed = truncated.at[-1].set(True) if and_last else truncated

        def pick(step: jax.Array) -> Any:
            return jax.tree.map(lambda x: jax.vmap(lambda x, step: x[step], in_axes=(1, 0))(x, step), final)

        def fill(_: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            left, found = carry
            step = jnp.argmax(left, axis=0)  # of every environment, the first that is needed
            new = value(params, pick(step))
            here = left & (jnp.arange(len(left))[:, None] == step)
            return left & ~here, jnp.where(here.reshape(*here.shape, *(1,) * (new.ndim - 1)), new, found)

        one = jax.eval_shape(lambda: value(params, pick(jnp.zeros(truncated.shape[1], int))))
        found = jnp.zeros((len(truncated), *one.shape), one.dtype)
        return jax.lax.fori_loop(0, needed.sum(axis=0).max(), fill, (needed, found))[1]

    def every(params: Any, final: Any, truncated: jax.Array) -> jax.Array:
        found = value(params, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), final))  # [E * T, ...]
        return jnp.swapaxes(found.reshape(-1, len(truncated), *found.shape[1:]), 0, 1)

    @jax.custom_batching.custom_vmap
    def values(params: Any, final: Any, truncated: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(params, final, truncated, cpu=some, default=every)

    @values.def_vmap
    def of_members(size: int, in_batched: Any, *args: Any) -> tuple[jax.Array, bool]:
        axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched)
        return jax.vmap(every, in_axes=tuple(axes), axis_size=size)(*args), True

    return values(params, final, truncated)
