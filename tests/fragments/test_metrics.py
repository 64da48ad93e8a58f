"""`Mean`: every sample has the same weight, over any number of iterations, devices and members."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import Mean


@pytest.fixture(params=[np, jnp], ids=["numpy", "jax"])
def means(request):
    """Three iterations with 3, 0 and 1 samples."""
    return Mean(request.param.float32([30, 0, 50]), request.param.float32([3, 0, 1]))


def test_every_sample_weighs_the_same(means):
    assert means.mean() == 20.0, "80 / 4, not (10 + 50) / 2"
    np.testing.assert_array_equal(means.mean(axis=()), [10, np.nan, 50])


def test_slices_have_exact_means(means):
    assert means[-2:].mean() == 50.0
    assert means[0].mean() == 10.0
    assert means[np.array([0, 2])].mean() == 20.0
    assert np.isnan(means[1:2].mean())


def test_members_are_kept_apart():
    means = Mean(np.float32([[30, 1], [50, 2]]), np.float32([[3, 1], [1, 1]]))
    np.testing.assert_array_equal(means.mean(axis=0), [20, 1.5])
    np.testing.assert_array_equal(means[1:].mean(axis=0), [50, 2])


def test_many_sums_lose_no_precision():
    means = Mean(np.full(1_000_000, 0.1, np.float32), np.ones(1_000_000, np.float32))
    assert means.mean() == pytest.approx(float(np.float32(0.1)), rel=1e-12)


def test_a_mean_is_a_pytree_and_no_sequence(means):
    assert jax.tree.map(lambda x: 2 * x, means).mean() == 20.0
    assert [x.shape for x in jax.tree.leaves(means)] == [(3,), (3,)]
    with pytest.raises(TypeError, match="not iterable"):
        iter(means)
