"""Running statistics of value targets, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax.algorithms.returns.value_scale import value_scale
from tests.support.agents import make_still
from tests.support.many_agents import Homes


@pytest.mark.parametrize("shape", [(), (3,)])
def test_statistics_of_targets_that_count(shape):
    rng = np.random.default_rng(0)
    targets = 5 + 3 * rng.normal(size=(4, 7, 2, 3))
    counts = rng.random((4, 7, 2, 3)) < 0.7
    counts[2] = False
    scale = value_scale(*shape)
    for target, count in zip(targets, counts, strict=True):
        scale = scale.updated(jnp.asarray(target, jnp.float32), jnp.asarray(count))
    total, square, weight = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for target, count in zip(targets, counts, strict=True):
        for agent in np.ndindex(shape):
            x = target[..., *agent][count[..., *agent]] if shape else target[count]
            if x.size:
                sums = [(total, x.mean()), (square, (x**2).mean()), (weight, 1.0)]
                for held, new in sums:
                    held[agent] = 0.99999 * held[agent] + 0.00001 * new
    mean = total / weight
    np.testing.assert_allclose(scale.mean, mean, rtol=1e-4)
    np.testing.assert_allclose(scale.deviation, np.sqrt(square / weight - mean**2), rtol=1e-3)
    values = jnp.asarray(targets[0], jnp.float32)
    np.testing.assert_allclose(scale.restore(scale.normalize(values)), values, rtol=1e-5)


@pytest.mark.parametrize(("center", "spread"), [(100.0, 1.0), (-30.0, 1.0), (1e-3, 300.0)])
def test_statistics_stay_right_in_long_runs(center, spread):
    """Half a million updates and then a change of the targets, against the closed form of the decaying sums."""
    draws = np.random.default_rng(1).normal(center, spread, (64, 2, 4, 1)).astype(np.float32)
    later = draws + np.float32(3 * spread)
    counts = jnp.ones(draws.shape[1:], bool)

    @jax.jit
    def run(scale, draws, number):
        return jax.lax.fori_loop(0, number, lambda i, scale: scale.updated(draws[i % 64], counts), scale)

    scale = run(run(value_scale(), draws, 500_032), later, 50_048)
    left = 0.99999**50_048
    weights = np.array([left * (1 - 0.99999**500_032), 1 - left])
    weights /= weights.sum()
    means, squares = (np.array([f(x.astype(np.float64)).mean() for x in (draws, later)]) for f in (np.array, np.square))
    mean = weights @ means
    np.testing.assert_allclose(scale.mean, mean, rtol=1e-3, atol=1e-3 * spread)
    np.testing.assert_allclose(scale.deviation, np.sqrt(weights @ squares - mean**2), rtol=1e-3)


@pytest.mark.parametrize("normalize", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_critics_learn_standardized_values(normalize):
    """Rewards of hundreds give value losses of thousands, and of the size of 1 where values are standardized."""

    class InCents(Homes):
        def step(self, key, state, action):
            state, obs, reward, terminated, truncated = super().step(key, state, action)
            return state, obs, 100 * reward, terminated, truncated

    agent = make_still(
        "mappo", InCents(), num_envs=16, unroll_length=8, hidden_sizes=(8,), num_epochs=1, num_minibatches=1,
        normalize_values=normalize,
    )  # fmt: skip
    _, metrics = jax.jit(lambda key: jax.lax.scan(lambda s, _: agent.iteration(s), agent.init(key), None, length=3))(
        jax.random.key(0)
    )
    assert metrics["value_loss"][-1] < 10 if normalize else metrics["value_loss"][-1] > 1000
