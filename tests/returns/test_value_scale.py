"""The running scale of value targets, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax.returns.value_scale import value_scale
from tests.support.agents import make_still
from tests.support.many_agents import Homes
from tests.support.random_walk import RandomWalk
from tests.support.slow import slow_unless


@pytest.mark.parametrize("masked", [False, True])
def test_every_network_has_a_scale_of_its_own(masked):
    rng = np.random.default_rng(0)
    targets = (5 + 3 * rng.normal(size=(4, 7, 2, 3)) * [1, 10, 100]).astype(np.float32)
    counts = rng.random((4, 7, 2, 3)) < 0.7 if masked else [None] * 4
    together, alone = value_scale(3), [value_scale() for _ in range(3)]
    for target, count in zip(targets, counts, strict=True):
        together = together.updated(jnp.asarray(target), None if count is None else jnp.asarray(count))
        alone = [
            scale.updated(jnp.asarray(target[..., i]), None if count is None else jnp.asarray(count[..., i]))
            for i, scale in enumerate(alone)
        ]
    np.testing.assert_allclose(together.divisor, [scale.divisor for scale in alone], rtol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_the_scale_of_targets_that_count(masked):
    rng = np.random.default_rng(0)
    targets = 5 + 3 * rng.normal(size=(4, 7, 2))
    counts = rng.random((4, 7, 2)) < 0.7 if masked else np.ones((4, 7, 2), bool)
    counts[2] = not masked
    scale, square, weight = value_scale(), 0.0, 0.0
    assert scale.divisor == 1
    for target, count in zip(targets, counts, strict=True):
        scale = scale.updated(jnp.asarray(target, jnp.float32), jnp.asarray(count) if masked else None)
        if count.any():
            square, weight = (0.99999 * a + 0.00001 * b for a, b in ((square, (target[count] ** 2).mean()), (weight, 1.0)))
    np.testing.assert_allclose(scale.divisor, np.sqrt(square / weight), rtol=1e-4)
    assert value_scale().updated(jnp.float32([[0.3, -0.4]]), None).divisor == 1


@pytest.mark.parametrize(("center", "spread"), [(1000.0, 1.0), (-30.0, 1.0), (1e-3, 300.0)])
def test_the_scale_stays_right_in_long_runs(center, spread):
    """Half a million updates and then a change of the targets, against the closed form of the decaying sums."""
    draws = np.random.default_rng(1).normal(center, spread, (64, 2, 4)).astype(np.float32)
    later = draws + np.float32(3 * spread)

    @jax.jit
    def run(scale, draws, number):
        return jax.lax.fori_loop(0, number, lambda i, scale: scale.updated(draws[i % 64], None), scale)

    before = run(value_scale(), draws, 500_032)
    scale = run(before, later, 50_048)
    left = 0.99999**50_048
    weights = np.array([left * (1 - 0.99999**500_032), 1 - left])
    weights /= weights.sum()
    squares = np.array([np.square(x.astype(np.float64)).mean() for x in (draws, later)])
    want = np.sqrt(weights @ squares)
    np.testing.assert_allclose(scale.divisor, want, rtol=1e-3)
    np.testing.assert_allclose(scale.divisor - before.divisor, want - np.sqrt(squares[0]), rtol=1e-2)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("large", [2e18, 1e25, 2e38])
def test_the_scale_of_targets_whose_squares_are_no_float32(large, masked):
    targets = np.float32([[3.0, -4.0]]), np.float32([[large, -large / 2]]), np.float32([[5.0, large]])
    counts = np.array([[True, not masked]])
    mask = jnp.asarray(counts) if masked else None
    scale, updated = value_scale(), jax.jit(lambda scale, target: scale.updated(target, mask))
    for target in targets:
        scale = updated(scale, target)
    weights = np.array([0.99999**2, 0.99999, 1.0]) / (0.99999**2 + 0.99999 + 1)
    squares = [np.square(np.float64(target[counts])).mean() for target in targets]
    np.testing.assert_allclose(scale.divisor, np.sqrt(weights @ squares), rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "scaled"),
    [
        slow_unless(name == "ppo" and scaled, name, scaled)
        for name in ("ppo", "recurrent_ppo", "mappo")
        for scaled in (True, False)
    ],
)
def test_critics_learn_values_of_the_order_of_one(algorithm, scaled):
    """Rewards of hundreds give value losses of thousands, and of about 1 where values are scaled."""

    class InCents(Homes if algorithm == "mappo" else RandomWalk):
        def step(self, key, state, action):
            state, obs, reward, terminated, truncated = super().step(key, state, action)
            return state, obs, 1000 * reward, terminated, truncated

    agent = make_still(
        algorithm,
        InCents(),
        num_envs=16,
        unroll_length=8,
        hidden_sizes=(8,),
        num_epochs=1,
        num_minibatches=1,
        normalize_values=scaled,
    )
    _, metrics = jax.jit(lambda key: jax.lax.scan(lambda s, _: agent.iteration(s), agent.init(key), None, length=3))(
        jax.random.key(0)
    )
    assert metrics["value_loss"][-1] < 10 if scaled else metrics["value_loss"][-1] > 1000
