"""Computations along time: sums backwards, and values of the last observations of episodes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


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
