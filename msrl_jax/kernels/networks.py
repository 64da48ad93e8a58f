"""Products of matrices, and norms."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

_MAX_JOINED = 2**20  # above this number of elements, a copy takes longer than the kernel launches that it saves


def _weight_gradient(x: jax.Array, g: jax.Array) -> jax.Array:
    """Sums `x.T @ g` over rows, `[..., M]` and `[..., N]` to `[M, N]`; rows keep their dimensions and their devices."""
    rows = tuple(range(x.ndim - 1))
    return jax.lax.dot_general(x, g, ((rows, rows), ((), ())))


def weight_gradient_on_cpu(x: jax.Array, g: jax.Array) -> jax.Array:
    """Returns the same sums as `_weight_gradient`, fast on a CPU."""
    rows = tuple(range(x.ndim - 1))
    if g.shape[-1] == 1:  # a value head; a matrix product this narrow is slower than a sum
        return (x * g).sum(rows)[:, None]
    # XLA's fast CPU kernels contract the last dimension of the left operand. Without the barrier, XLA folds the
    # transpose into a product that contracts the first dimension, and a PPO update on two cores takes 20 % longer.
    transposed = jax.lax.optimization_barrier(jnp.moveaxis(x, -1, 0))
    return jax.lax.dot_general(transposed, g, ((tuple(i + 1 for i in rows), rows), ((), ())))


@jax.custom_vjp
def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns `x @ w` for `x` `[..., M]` and `w` `[M, N]`."""
    return x @ w


def _matmul_backward(residuals, g):
    x, w = residuals
    dw = jax.lax.platform_dependent(x, g, cpu=weight_gradient_on_cpu, default=_weight_gradient)
    return (g @ w.T).astype(x.dtype), dw.astype(w.dtype)


matmul.defvjp(lambda x, w: (x @ w, (x, w)), _matmul_backward)


def global_norm(tree: Any) -> jax.Array:
    """Returns the norm of all leaves together. Accelerators first concatenate the leaves of small trees, to save launches."""
    leaves = jax.tree.leaves(tree)
    if len({jnp.result_type(x) for x in leaves}) != 1 or sum(jnp.size(x) for x in leaves) > _MAX_JOINED:
        return jnp.asarray(optax.tree.norm(tree))

    def of_vector(*leaves: jax.Array) -> jax.Array:
        return optax.tree.norm(jnp.concatenate([jnp.ravel(x) for x in leaves]))

    return jax.lax.platform_dependent(*leaves, cpu=lambda *leaves: optax.tree.norm(leaves), default=of_vector)
