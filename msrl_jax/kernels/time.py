"""Computations along time: backward sums, and values of the last observations of episodes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.fragments.support.reading import are_read


def backward_sums(delta: jax.Array, decay: jax.Array) -> jax.Array:
    """Sums backward in time: `sum[t] = delta[t] + decay[t] * sum[t + 1]`. `[T, ...]`.

    On a CPU, this is a loop over steps. On other devices, such a loop would launch kernels for every step; instead, `log2(T)`
    rounds each double the span of all sums at once (Kogge & Stone, 1973).
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
    of_params: Callable[[Any, Any], jax.Array], params: Any, final: Any, truncated: jax.Array, *, and_last: bool = False
) -> jax.Array:
    """Computes the values `[T, E, ...]` of the last observations of episodes.

    The results are valid where `truncated`, and at the last step if `and_last`. `of_params` is
    `(params, last observations [N, ...]) -> values [N, ...]` for any `N`; `final` has the observations before a reset, with
    other inputs that it needs: a pytree of `[T, E, ...]`. `truncated` is `[T, E]`.

    A CPU computes only these values: those of the first truncation of every environment, then of the second, and so on; devices
    that share the environments exchange one integer, the number of rounds. Other devices compute the values of all steps at
    once, because a data-dependent loop would wait for the host. Vmapped runs also compute all values, because the members would
    otherwise wait for each other across devices.
    """
    # Parameters that the function does not read become zeros, so that they are not sent to the device that computes the values,
    # and `values` does not close over them, which a rule for members may not.
    leaves, tree = jax.tree.flatten(params)
    is_read = are_read(of_params, params, jax.tree.map(lambda x: x[0], final))

    def value(read_leaves: Sequence[Any], final: Any) -> jax.Array:
        remaining = iter(read_leaves)
        all_leaves = [next(remaining) if is_used else jnp.zeros_like(x) for x, is_used in zip(leaves, is_read, strict=True)]
        return of_params(tree.unflatten(all_leaves), final)

    def values_where_truncated(params: Any, final: Any, truncated: jax.Array) -> jax.Array:
        is_needed = truncated.at[-1].set(True) if and_last else truncated

        def pick(step: jax.Array) -> Any:
            return jax.tree.map(lambda x: jax.vmap(lambda x, step: x[step], in_axes=(1, 0))(x, step), final)

        def fill(_: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            remaining, results = carry
            step = jnp.argmax(remaining, axis=0)  # the first remaining step of every environment
            new = value(params, pick(step))
            selected = remaining & (jnp.arange(len(remaining))[:, None] == step)
            return remaining & ~selected, jnp.where(selected.reshape(*selected.shape, *(1,) * (new.ndim - 1)), new, results)

        value_aval = jax.eval_shape(lambda: value(params, pick(jnp.zeros(truncated.shape[1], int))))
        results = jnp.zeros((len(truncated), *value_aval.shape), value_aval.dtype)
        return jax.lax.fori_loop(0, is_needed.sum(axis=0).max(), fill, (is_needed, results))[1]

    def values_of_all_steps(params: Any, final: Any, truncated: jax.Array) -> jax.Array:
        results = value(params, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), final))  # [E * T, ...]
        return jnp.swapaxes(results.reshape(-1, len(truncated), *results.shape[1:]), 0, 1)

    @jax.custom_batching.custom_vmap
    def values(params: Any, final: Any, truncated: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(params, final, truncated, cpu=values_where_truncated, default=values_of_all_steps)

    @values.def_vmap
    def of_members(size: int, in_batched: Any, *args: Any) -> tuple[jax.Array, bool]:
        axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched)
        return jax.vmap(values_of_all_steps, in_axes=tuple(axes), axis_size=size)(*args), True

    return values([x for x, is_used in zip(leaves, is_read, strict=True) if is_used], final, truncated)
