"""What the loops of networks with a memory share: whole sequences as minibatches, and the values at their ends.

In the shape descriptions, `T` denotes the length of an unroll, `E` the number of environments, `M` the number of minibatches of
an epoch and `U` the number of updates. A minibatch holds one environment from every group of `M` adjacent ones, so a shuffle
moves nothing between devices that hold whole groups.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.algorithms.networks.layers import flatten, unflatten


def truncated_values(value: Callable[[Any], jax.Array], final: Any, truncated: jax.Array) -> jax.Array:
    """The values `[T, E, ...]` of the last observations of episodes and of the unroll: right where `truncated`, and at the end.

    `value` is `last observations [N, ...] -> values [N, ...]` for any `N`; `final` has the observations before a reset, with
    whatever else `value` needs: a pytree of `[T, E, ...]`, as is `truncated`.

    A CPU computes those values alone: of the first truncation of every environment, of the second, and so on. Other devices
    compute the values of all steps at once, since a loop that depends on data would wait for the host.
    """

    def some(final: Any, truncated: jax.Array) -> jax.Array:
        needed = truncated.at[-1].set(True)
        steps = jnp.argsort(~needed, axis=0, stable=True)  # of every environment, those that are needed first

        def pick(i: jax.Array) -> Any:
            return jax.tree.map(lambda x: jax.vmap(lambda x, step: x[step], in_axes=(1, 0))(x, steps[i]), final)

        def fill(i: jax.Array, found: jax.Array) -> jax.Array:
            new = value(pick(i))
            here = jnp.arange(len(truncated))[:, None] == steps[i]
            return jnp.where(here.reshape(*here.shape, *(1,) * (new.ndim - 1)), new, found)

        one = jax.eval_shape(lambda: value(pick(jnp.int32(0))))
        found = jnp.zeros((len(truncated), *one.shape), one.dtype)
        return jax.lax.fori_loop(0, needed.sum(axis=0).max(), fill, found)

    def all_at_once(final: Any, truncated: jax.Array) -> jax.Array:
        return unflatten(value(flatten(final)), len(truncated))

    return jax.lax.platform_dependent(final, truncated, cpu=some, default=all_at_once)


def shuffled_members(key: jax.Array, *, num_envs: int, num_epochs: int, num_minibatches: int) -> tuple[jax.Array, jax.Array]:
    """Shuffles environments within groups of `M`: the next key, and who is in each minibatch, for `pick`. `[U, E / M]`."""
    key, *epoch_keys = jax.random.split(key, num_epochs + 1)
    order = jnp.broadcast_to(jnp.arange(num_minibatches)[:, None], (num_minibatches, num_envs // num_minibatches))
    return key, jnp.concatenate([jax.random.permutation(k, order, axis=0, independent=True) for k in epoch_keys])


def pick(x: jax.Array, chosen: jax.Array) -> jax.Array:
    """One environment of every group: `[T, E, ...] -> [T, E / M, ...]`, for `chosen` `[E / M]`."""
    groups = len(chosen)
    x = x.reshape(len(x), groups, -1, *x.shape[2:])
    index = chosen.reshape(1, groups, 1, *(1,) * (x.ndim - 3))
    return jnp.take_along_axis(x, index, axis=2, mode="promise_in_bounds")[:, :, 0]
