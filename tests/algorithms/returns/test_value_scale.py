"""Running statistics of value targets, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax.algorithms.returns.value_scale import value_scale

from ...support.agents import make_still
from ..many_agents import Homes


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


def test_critics_learn_standardized_values():
    """Rewards of hundreds give value losses of thousands, and of the size of 1 where values are standardized."""

    class InCents(Homes):
        def step(self, key, state, action):
            state, obs, reward, terminated, truncated = super().step(key, state, action)
            return state, obs, 100 * reward, terminated, truncated

    def last_loss(normalize):
        agent = make_still(
            "mappo", InCents(), num_envs=16, unroll_length=8, hidden_sizes=(8,), num_epochs=1, num_minibatches=1,
            normalize_values=normalize,
        )  # fmt: skip
        _, metrics = jax.jit(lambda key: jax.lax.scan(lambda s, _: agent.iteration(s), agent.init(key), None, length=3))(
            jax.random.key(0)
        )
        return float(metrics["value_loss"][-1])

    assert last_loss(False) > 1000
    assert last_loss(True) < 10
