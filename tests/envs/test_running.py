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


def test_statistics_of_few_values_equal_the_plain_rule():
    def plain(stats, x):
        count, mean, var = stats
        total = count + x.shape[0]
        old, new = count / total, x.shape[0] / total
        x = x - mean
        shift, square = jnp.mean(x, axis=0), jnp.mean(x * x, axis=0)
        spread = old * var + new * jnp.maximum(square - shift * shift, 0) + old * new * shift * shift
        return (total, mean + new * shift, spread), None

    batches = jnp.asarray(np.random.default_rng(1).normal(3, 2, (300, 4, 3)), jnp.float32)
    end = run(running.empty(jax.ShapeDtypeStruct((3,), jnp.float32)), batches)
    start = jnp.float32(0), jnp.zeros(3), jnp.ones(3)
    count, mean, var = jax.jit(lambda s, b: jax.lax.scan(plain, s, b)[0])(start, batches)
    assert counters.to_int(end.count) == count
    np.testing.assert_allclose(end.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(end.var, var, rtol=1e-6)
    assert not np.any(end.mean_rest) and not np.any(end.var_rest)


def test_a_batch_of_another_shape_is_refused():
    with pytest.raises(AssertionError):
        running.update(running.empty(jax.ShapeDtypeStruct((3,), jnp.float32)), jnp.zeros((4, 2)))


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
