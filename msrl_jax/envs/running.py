"""Running mean and variance of a stream of batches, accurate up to the largest value of a `Counter`."""

import chex
import jax
import jax.numpy as jnp
from flax import struct

from msrl_jax.envs.base import PyTree
from msrl_jax.fragments.counters import Counter, advance, at_least, counter, to_float


@struct.dataclass
class RunningStatistics:
    """Elementwise mean and variance of all values so far.

    One batch changes the statistics of many values by less than the precision of float32, so `mean_rest` and `var_rest` keep
    the rounding errors for the next batch to add (Kahan, 1965, doi:10.1145/363707.363723).

    Attributes:
      count: number of values so far.
      mean: mean of the values; arrays of the values' shapes, float32.
      var: population variance of the values; arrays of the same shapes; 1 without values.
      mean_rest: rounding error of `mean`, arrays of the same shapes.
      var_rest: rounding error of `var`, arrays of the same shapes.
    """

    count: Counter
    mean: PyTree
    var: PyTree
    mean_rest: PyTree
    var_rest: PyTree


def compensated_sum(value: jax.Array, increment: jax.Array, error: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `value + increment + rest`, and its rounding error in float32, the next `error`."""
    increment = increment + error
    total = value + increment
    return total, increment - (total - value)


def _statistics(count: Counter, mean: PyTree, var: PyTree) -> RunningStatistics:
    return RunningStatistics(count, mean, var, jax.tree.map(jnp.zeros_like, mean), jax.tree.map(jnp.zeros_like, var))


def empty(example: PyTree) -> RunningStatistics:
    """Returns the statistics of no values, with mean 0 and variance 1, given one value or its shapes."""
    mean = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), example)
    var = jax.tree.map(lambda x: jnp.ones(x.shape, jnp.float32), example)
    return _statistics(counter(), mean, var)


def batch_statistics(batch: PyTree) -> RunningStatistics:
    """Returns the statistics of one batch `[B, ...]`, in two passes."""
    chex.assert_equal_shape_prefix(jax.tree.leaves(batch), 1)
    batch = jax.tree.map(lambda x: x.astype(jnp.float32), batch)
    size = jax.tree.leaves(batch)[0].shape[0]
    mean, var = (jax.tree.map(lambda x, f=f: f(x, axis=0), batch) for f in (jnp.mean, jnp.var))
    return _statistics(counter(size), mean, var)


def normalize(stats: RunningStatistics, values: PyTree, *, epsilon: float = 1e-8, clip: float = 10.0) -> PyTree:
    """Values `[..., *shape]` with mean 0 and variance 1, clipped to [-clip, clip]; unchanged while `stats` is empty."""

    def normalize_leaf(x, mean, var):
        x = x.astype(jnp.float32)
        normalized = jnp.clip((x - mean) / jnp.sqrt(var + epsilon), -clip, clip)
        return jnp.where(at_least(stats.count, 1), normalized, x)

    return jax.tree.map(normalize_leaf, values, stats.mean, stats.var)


def update(stats: RunningStatistics, batch: PyTree) -> RunningStatistics:
    """Merges a batch `[B, ...]` into the statistics (the parallel rule of Chan, Golub and LeVeque, 1983).

    One pass reduces the batch, centered on the old mean, so a batch split over devices needs one round of communication. The
    batch variance loses digits only if the mean shifts by much more, and then the shift dominates.
    """
    leaves = jax.tree.leaves(batch)
    size = leaves[0].shape[0]
    chex.assert_trees_all_equal_structs(stats.mean, batch)
    for mean, x in zip(jax.tree.leaves(stats.mean), leaves, strict=True):
        chex.assert_shape(x, (size, *mean.shape))
    count = advance(stats.count, size)
    total = to_float(count)
    has_data = at_least(stats.count, 1)
    # Do not multiply the old statistics by `1 - new`: near 1, its rounding error would bias every batch.
    new = size / total

    def merge(mean, var, mean_rest, var_rest, x):
        x = x.astype(jnp.float32) - mean
        shift, square = jnp.mean(x, axis=0), jnp.mean(x * x, axis=0)
        batch_var = jnp.maximum(square - shift * shift, 0)
        var = jnp.where(has_data, var, 0.0)
        mean, mean_rest = compensated_sum(mean, new * shift, mean_rest)
        var, var_rest = compensated_sum(var, new * (batch_var - var + (1 - new) * shift * shift), var_rest)
        return mean, var, mean_rest, var_rest

    parts = [jax.tree.leaves(part) for part in (stats.mean, stats.var, stats.mean_rest, stats.var_rest)]
    treedef = jax.tree.structure(stats.mean)
    merged = [merge(*xs) for xs in zip(*parts, leaves, strict=True)]
    return RunningStatistics(count, *(treedef.unflatten(leaves) for leaves in zip(*merged, strict=True)))
