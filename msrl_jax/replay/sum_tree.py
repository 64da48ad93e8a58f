"""Sum trees: sample leaves in proportion to their values, and change the values, in logarithmic time.

A node has `BRANCHES` children. Compared with a binary tree (Schaul et al., 2016, arXiv 1511.05952), this needs fewer dependent
memory reads, each of adjacent numbers. A parent is always recomputed from its children. Adding differences instead would leave
rounding errors of large priorities in the sums; later, when all priorities are small, leaves of value 0 would be drawn.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax._compat import Tracer

BRANCHES = 8
NOWHERE = 2**30  # not a leaf of any tree

Tree = tuple[jax.Array, ...]


def init(num_leaves: int) -> Tree:
    """Makes an all-zero tree: the levels from the leaves to the children of the root, padded to whole families, float32."""
    sizes = [num_leaves]
    while sizes[-1] > BRANCHES:
        sizes.append(-(-sizes[-1] // BRANCHES))
    return tuple(jnp.zeros(-(-size // BRANCHES) * BRANCHES, jnp.float32) for size in sizes)


def total(tree: Tree) -> jax.Array:
    """Returns the sum of all leaves. `[]`"""
    return tree[-1].sum()


def write(tree: Tree, first: jax.Array, values: jax.Array) -> Tree:
    """Sets runs of adjacent leaves to the values `[K, W]`; `first` `[K]` int32 is the first leaf of each run.

    Runs that start at `NOWHERE` are ignored. Where runs overlap, the largest value wins. Raises ValueError if a value is
    negative or not finite; a traced value, as under `jit`, becomes 0 instead, which is never drawn.
    """
    chex.assert_rank((first, values), (1, 2))
    chex.assert_equal_shape_prefix((first, values), 1)
    if not isinstance(values, Tracer):
        bad = np.asarray(values)[~(np.isfinite(values) & (np.asarray(values) >= 0))]
        if bad.size:
            raise ValueError(f"a priority is {bad[0]}; priorities must be finite and not negative")
    values = jnp.where(jnp.isfinite(values) & (values > 0), values, 0.0)
    width = values.shape[1]
    leaves = first[:, None] + jnp.arange(width, dtype=jnp.int32)
    # If several values are written to one leaf, devices may keep an arbitrary one; the maximum is the same everywhere.
    levels = [tree[0].at[leaves].set(0.0, mode="drop").at[leaves].max(values, mode="drop")]
    for level in tree[1:]:
        # The ancestors of adjacent nodes are adjacent.
        first, width = first // BRANCHES, (width - 2) // BRANCHES + 2 if width > 1 else 1
        nodes = first[:, None] + jnp.arange(width, dtype=jnp.int32)
        families = levels[-1].reshape(-1, BRANCHES)
        sums = families.at[nodes].get(mode="fill", fill_value=0.0).sum(-1)
        levels.append(level.at[nodes].set(sums, mode="drop"))
    return tuple(levels)


def draw(tree: Tree, key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Draws leaves with probabilities in proportion to their values: one from each of `count` equal parts of the sum.

    Only leaves above 0 are drawn, so the sum must be above 0. At each level the target gets new low-order bits, so leaves far
    smaller than the rounding error of the whole sum keep their probabilities. Returns the leaves `[K]` int32 and their values
    `[K]`.
    """
    high, low = jax.random.split(key)
    # Fractions of the node's sum.
    target = (jnp.arange(count, dtype=jnp.float32) + jax.random.uniform(high, (count,), jnp.float32)) / count
    bits = jax.random.bits(low, (count,), jnp.uint32)
    node = jnp.zeros(count, jnp.int32)
    preceding = jnp.triu(jnp.ones((BRANCHES, BRANCHES), jnp.float32), 1)
    value = jnp.zeros(count, jnp.float32)
    for level in reversed(tree):
        children = level.reshape(-1, BRANCHES).at[node].get(mode="promise_in_bounds")
        # A matrix product is much faster than a cumulative sum on a CPU; accelerators would round at lower precision.
        sum_before = jnp.dot(children, preceding, precision=jax.lax.Precision.HIGHEST)
        total = sum_before[:, -1] + children[:, -1]
        goal = target * total
        # The first child above 0 always qualifies. If rounding moves the goal past all children, the last above 0 is picked.
        pick = jnp.max(jnp.where((sum_before <= goal[:, None]) & (children > 0), jnp.arange(BRANCHES, dtype=jnp.int32), 0), 1)
        value = jnp.take_along_axis(children, pick[:, None], 1)[:, 0]
        sum_before = jnp.take_along_axis(sum_before, pick[:, None], 1)[:, 0]
        bits = bits * jnp.uint32(1664525) + jnp.uint32(1013904223)  # a linear congruential generator is good enough here
        low_bits = (bits >> 8).astype(jnp.float32) * 2**-48 * total
        target = jnp.clip((goal - sum_before + low_bits) / value, 0.0, 1.0)
        node = node * BRANCHES + pick
    return node, value
