"""Comparison of runs: the policies by name, plain `jax.jit` as reference, and pytrees with typed keys."""

import jax
import numpy as np

import msrl_jax as msrl

POLICIES = sorted(msrl.policies.POLICIES)


def as_numpy(tree):
    """The tree with NumPy leaves; typed keys as their data."""

    def leaf(x):
        return np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return jax.tree.map(leaf, tree)


def assert_close(a, b, rtol=1e-5, atol=1e-6):
    """Equal structure, and leaves equal within a tolerance (integers, booleans and keys exactly)."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(as_numpy(a)), jax.tree.leaves(as_numpy(b)), strict=True):
        if np.issubdtype(x.dtype, np.floating):
            np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)
        else:
            np.testing.assert_array_equal(x, y)


def run_plain(iteration, state, iterations):
    """The reference: the same iteration under plain `jax.jit`, metrics stacked."""
    step, rows = jax.jit(iteration), []
    for _ in range(iterations):
        state, metrics = step(state)
        rows.append(metrics)
    return state, jax.tree.map(lambda *xs: np.stack(xs), *as_numpy(rows))
