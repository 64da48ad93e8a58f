"""Running mean and variance of a stream of batches."""

import jax
import jax.numpy as jnp
from flax import struct

from msrl_jax.envs.base import PyTree


@struct.dataclass
class RunningStatistics:
    """Mean and variance of all values seen, per element.

    Attributes:
      count: how many were seen. shape=(), dtype=float32
      mean: their mean; arrays of the values' shapes, float32.
      var: their population variance, likewise; 1 while nothing was seen.
    """

    count: jax.Array
    mean: PyTree
    var: PyTree


def empty(like: PyTree) -> RunningStatistics:
    """The statistics of no values: mean 0 and variance 1.

    Args:
      like: arrays or `jax.ShapeDtypeStruct`s of the shapes of one value.
    """
    mean = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)
    var = jax.tree.map(lambda x: jnp.ones(x.shape, jnp.float32), like)
    return RunningStatistics(jnp.zeros((), jnp.float32), mean, var)


def of_batch(batch: PyTree) -> RunningStatistics:
    """The statistics of one batch `[B, ...]`, in two passes."""
    batch = jax.tree.map(lambda x: x.astype(jnp.float32), batch)
    size = jax.tree.leaves(batch)[0].shape[0]
    mean, var = (jax.tree.map(lambda x, f=f: f(x, axis=0), batch) for f in (jnp.mean, jnp.var))
    return RunningStatistics(jnp.asarray(size, jnp.float32), mean, var)


def update(stats: RunningStatistics, batch: PyTree) -> RunningStatistics:
    """Merges a batch into the statistics (the parallel rule of Chan, Golub and LeVeque, 1983).

    The batch is reduced in one pass, about the old mean: one round of communication where it is split over devices. The
    cancellation that this risks in the batch's variance is far below what the shift of the mean adds to the total.

    Args:
      stats: of the values before.
      batch: new values, `[B, ...]`.

    Returns:
      The statistics of all.
    """
    size = jax.tree.leaves(batch)[0].shape[0]
    count = stats.count + size
    old, new = stats.count / count, size / count

    def merge(mean, var, x):
        x = x.astype(jnp.float32) - mean
        shift, square = jnp.mean(x, axis=0), jnp.mean(x * x, axis=0)
        batch_var = jnp.maximum(square - shift * shift, 0)
        return mean + new * shift, old * var + new * batch_var + old * new * shift * shift

    means, treedef = jax.tree.flatten(stats.mean)
    merged = [merge(*xs) for xs in zip(means, jax.tree.leaves(stats.var), jax.tree.leaves(batch), strict=True)]
    mean, var = (treedef.unflatten(leaves) for leaves in zip(*merged, strict=True))
    return RunningStatistics(count, mean, var)
