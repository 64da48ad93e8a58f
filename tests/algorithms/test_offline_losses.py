"""Losses of learning from data alone, against hand-worked cases, float64 NumPy and numerical integration."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_jax.algorithms.iql import advantage_weight, expectile_loss
from msrl_jax.losses.conservative import conservative_gap, log_partition
from msrl_jax.networks.continuous_policies import TanhNormal, log_likelihood
from msrl_jax.networks.distributions import Normal

NUMBERS = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).normal(size=(5, 4)).astype(np.float32) * 3)


def test_hand_worked_cases():
    # Two equal values: the soft maximum lies log(2) above either; one that towers above the rest has no gap.
    np.testing.assert_allclose(conservative_gap(jnp.float32([3, 3]), jnp.int32(0)), np.log(2), rtol=1e-6)
    np.testing.assert_allclose(conservative_gap(jnp.float32([[0, 90], [90, 0]]), jnp.int32([1, 1])), [0, 90], atol=1e-6)
    # A value of 2 everywhere on [-1, 1]: the integral of exp(2) is 2 exp(2), whatever is drawn uniformly.
    np.testing.assert_allclose(log_partition(jnp.full(7, 2.0), jnp.full(7, -np.log(2.0))), 2 + np.log(2), rtol=1e-6)
    np.testing.assert_allclose(expectile_loss(jnp.float32([2, -2, 0]), 0.9), [3.6, 0.4, 0], rtol=1e-6)
    np.testing.assert_allclose(advantage_weight(jnp.float32([0, 0.5, 9]), 2.0, 100.0), [1, np.e, 100], rtol=1e-6)
    np.testing.assert_array_equal(advantage_weight(jnp.float32([-5, 0, 5]), 0.0, 100.0), 1)


@settings(deadline=None, max_examples=30)
@given(NUMBERS, st.floats(0.0, 1.0, width=32), st.floats(0.0, 5.0, width=32))
def test_losses_equal_float64(numbers, expectile, inverse_temperature):
    wide, action = numbers.astype(np.float64), np.abs(numbers[:, 0]).astype(np.int32) % 4
    log_prob = wide[::-1] - 4
    wanted = [
        (conservative_gap(numbers, action), np.log(np.exp(wide).sum(-1)) - wide[np.arange(5), action]),
        (log_partition(numbers, numbers[::-1] - 4), np.log((np.exp(wide) / np.exp(log_prob)).mean(-1))),
        (expectile_loss(numbers, expectile), np.abs(expectile - (wide < 0)) * wide**2),
        (advantage_weight(numbers, inverse_temperature, 20.0), np.minimum(np.exp(inverse_temperature * wide), 20)),
    ]
    for got, want in wanted:
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-4)


@settings(deadline=None, max_examples=20)
@given(NUMBERS, st.sampled_from([0.1, 0.5, 0.7, 0.9]))
def test_the_expectile_loss_is_least_at_the_expectile(numbers, expectile):
    """There, the errors above weigh as much as those below (Newey and Powell, 1987)."""
    samples = np.sort(numbers.astype(np.float64).ravel())
    low, high = samples[0], samples[-1]
    for _ in range(60):
        middle = (low + high) / 2
        above, below = np.maximum(samples - middle, 0).sum(), np.maximum(middle - samples, 0).sum()
        low, high = (middle, high) if expectile * above > (1 - expectile) * below else (low, middle)
    slope = jax.grad(lambda m: expectile_loss(numbers.ravel() - m, expectile).mean())
    assert abs(slope(jnp.float32(low))) < 1e-3
    assert slope(jnp.float32(low - 0.5)) < 0 < slope(jnp.float32(low + 0.5))


def test_the_log_partition_equals_numerical_integration():
    """Of a value with two humps on one action in [-1, 1], from draws of three densities: uniform, rising and falling."""
    value = lambda a: 2 * jnp.sin(5 * a) + a
    grid = np.linspace(-1, 1, 200_001)
    exact = np.log(np.trapezoid(np.exp(2 * np.sin(5 * grid) + grid), grid))

    def draw(key, slope, count):
        """Actions with the density `(1 + slope * a) / 2`, by inverting its integral."""
        u = jax.random.uniform(key, (count,))
        action = 2 * u - 1 if slope == 0 else (jnp.sqrt((1 - slope) ** 2 + 4 * slope * u) - 1) / slope
        return action, jnp.log((1 + slope * action) / 2)

    def estimate(key, count):
        parts = [draw(k, slope, count) for k, slope in zip(jax.random.split(key, 3), (0.0, 0.8, -0.6), strict=True)]
        action, log_prob = (jnp.concatenate(x) for x in zip(*parts, strict=True))
        return log_partition(value(action), log_prob)

    np.testing.assert_allclose(jax.jit(estimate, static_argnums=1)(jax.random.key(0), 60_000), exact, atol=0.02)
    few = jax.jit(jax.vmap(lambda key: jnp.exp(estimate(key, 5))))(jax.random.split(jax.random.key(1), 20_000))
    # The integral is estimated without bias from few samples as well: within four standard errors.
    assert abs(few.mean() - np.exp(exact)) < 4 * few.std() / np.sqrt(len(few))


def test_densities_and_advantages_are_constants():
    assert not jax.grad(lambda x: log_partition(jnp.ones(4), x))(jnp.zeros(4)).any()
    assert jax.grad(lambda x: advantage_weight(x, 2.0, 100.0))(jnp.float32(0.1)) == 0


def test_actions_on_their_bounds_have_a_likelihood_like_those_next_to_them():
    policy = TanhNormal(Normal(jnp.zeros((3, 1)), jnp.zeros((3, 1))))
    likelihood = log_likelihood(policy, jnp.float32([[1.0], [-1.0], [0.999]]))
    np.testing.assert_allclose(likelihood, likelihood[2], rtol=1e-3)
