"""Running statistics equal the statistics of all values, for any number of values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax.envs import running
from msrl_jax.fragments import counters


def run(stats, batches):
    @jax.jit
    def updated(stats, batches):
        return jax.lax.scan(lambda stats, x: (running.update(stats, x), None), stats, batches)[0]

    return jax.device_get(updated(stats, batches))


def reference(count, mean, var, batches):
    """The statistics in float64, from the moments of the values before."""
    batches = np.asarray(batches, np.float64).reshape(-1, *np.shape(mean))
    total = count + len(batches)
    new_mean = mean + (batches - mean).sum(0) / total
    squares = count * (var + (new_mean - mean) ** 2) + ((batches - new_mean) ** 2).sum(0)
    return total, new_mean, squares / total


@pytest.mark.parametrize("count", [2**24 - 40, 2**31 - 40, 2**32 - 40, 10**13])
def test_statistics_follow_the_values_at_any_count(count):
    mean, var = np.array([0.5, -2.0]), np.array([1.0, 4.0])
    stats = running.empty(jax.ShapeDtypeStruct((2,), jnp.float32)).replace(
        count=counters.counter(count), mean=jnp.float32(mean), var=jnp.float32(var)
    )
    # Values whose sum moves the mean by about 1, in steps that float32 does not resolve.
    size, steps = 8, 4000
    scale = count / (size * steps) if count > 2**25 else 500.0
    batches = np.float32(mean + scale * np.random.default_rng(0).uniform(0.5, 1.5, (steps, size, 2)))
    end = run(stats, batches)
    total, new_mean, new_var = reference(count, mean, var, batches)
    assert counters.to_int(end.count) == total
    assert (np.abs(new_mean - mean) > 0.5).all()
    np.testing.assert_allclose(end.mean, new_mean, rtol=1e-5)
    np.testing.assert_allclose(end.var, new_var, rtol=1e-5)


@pytest.mark.parametrize(("size", "steps"), [(1, 40_000), (8, 20_000), (64, 5_000)])
def test_statistics_of_small_batches_are_not_biased(size, steps):
    """As with one update for each step of few environments, for means and deviations of different sizes."""
    draws = np.random.default_rng(size).normal([100, -3, 1], [1, 1000, 1e-3], (steps, size, 3))
    batches = draws.astype(np.float32)
    end = run(running.empty(jax.ShapeDtypeStruct((3,), jnp.float32)), batches)
    values = batches.reshape(-1, 3).astype(np.float64)
    assert (np.abs(end.mean - values.mean(0)) <= np.spacing(end.mean) + 1e-7 * values.std(0)).all()
    np.testing.assert_allclose(end.var, values.var(0), rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_first_batch_replaces_the_statistics_of_no_values(scale):
    batch = np.float32(scale * np.random.default_rng(0).normal(size=(1, 64, 3)))
    end = run(running.empty(jax.ShapeDtypeStruct((3,), jnp.float32)), batch)
    np.testing.assert_allclose(end.mean, batch[0].astype(np.float64).mean(0), rtol=1e-4)
    np.testing.assert_allclose(end.var, batch[0].astype(np.float64).var(0), rtol=1e-5)


def test_a_variance_follows_changes_that_float32_does_not_resolve():
    """Each batch has the mean of the values before, and another variance."""
    stats = running.empty(jax.ShapeDtypeStruct((), jnp.float32)).replace(count=counters.counter(2**31), var=jnp.float32(4))
    batches = np.full((10_000, 8), [5, -5] * 4, np.float32)
    end, (_, mean, var) = run(stats, batches), reference(2**31, 0.0, 4.0, batches)
    assert end.mean == mean == 0 and var > 4 * (1 + 1e-4)
    np.testing.assert_allclose(end.var, var, rtol=1e-6)


def test_many_shifts_that_float32_does_not_resolve_add_up():
    """Every batch moves the mean by a third of the smallest step of float32 above 1."""
    count, size, steps = 10**13, 8, 4000
    shift = float(np.spacing(np.float32(1.0))) / 3
    stats = running.empty(jax.ShapeDtypeStruct((), jnp.float32)).replace(count=counters.counter(count), mean=jnp.float32(1.0))
    end = run(stats, jnp.full((steps, size), 1.0 + shift * count / size, jnp.float32))
    np.testing.assert_allclose(end.mean, 1.0 + shift * steps, rtol=3e-7)


def test_statistics_of_no_values_change_nothing():
    stats = running.empty(jax.ShapeDtypeStruct((3,), jnp.float32))
    np.testing.assert_array_equal(stats.mean, np.zeros(3))
    np.testing.assert_array_equal(stats.var, np.ones(3))
