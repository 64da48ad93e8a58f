"""Losses of action values and of return distributions against hand-worked cases and float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_jax.losses.atoms import categorical_loss, categorical_projection
from msrl_jax.losses.quantiles import quantile_huber_loss
from msrl_jax.networks.q_network import greedy_target
from tests.support.distributional import V_MAX, V_MIN, N, plain_projection, plain_quantile_loss

project = jax.jit(lambda p, r, d: categorical_projection(p, r + d * jnp.linspace(V_MIN, V_MAX, N), V_MIN, V_MAX))
seeds = st.integers(0, 2**32 - 1)
rewards = st.floats(-10, 10, width=32)
discounts = st.floats(0, 1, width=32)


def random_masses(seed):
    """Masses, some of them 0, in float32."""
    numbers = np.random.default_rng(seed)
    masses = numbers.gamma(0.5, size=N) * (numbers.uniform(size=N) < 0.7) + 1e-3
    return (masses / masses.sum()).astype(np.float32)


def test_one_network_chooses_and_the_other_values():
    online, target = jnp.array([1.0, 3.0, 2.0]), jnp.array([7.0, 5.0, 9.0])
    assert greedy_target(target, target) == 9 and greedy_target(online, target) == 5
    atoms = jnp.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(greedy_target(online, atoms), [2, 3])


def test_projection_splits_mass_between_neighbors():
    masses = jnp.zeros(N).at[3].set(1.0)  # all at the atom 1
    np.testing.assert_allclose(project(masses, 0.25, 1.0), [0, 0, 0, 0.75, 0.25, 0, 0])
    np.testing.assert_allclose(project(masses, 0.0, 0.5), [0, 0, 0.5, 0.5, 0, 0, 0])
    np.testing.assert_allclose(project(masses, 1.0, 1.0), [0, 0, 0, 0, 1, 0, 0])


@pytest.mark.parametrize(("reward", "last"), [(50.0, N - 1), (-50.0, 0)])
def test_projection_clips_what_lands_outside(reward, last):
    np.testing.assert_allclose(project(random_masses(0), reward, 0.9), np.eye(N)[last], atol=1e-6)


def test_a_terminal_step_has_the_reward_alone():
    for masses in map(random_masses, range(3)):
        np.testing.assert_allclose(project(masses, 1.5, 0.0), [0, 0, 0, 0.5, 0.5, 0, 0], atol=1e-6)


@settings(deadline=None, max_examples=200)
@given(seeds, rewards, discounts)
def test_projection_equals_the_papers_and_keeps_mass_and_mean(seed, reward, discount):
    masses = random_masses(seed)
    got = np.asarray(project(masses, reward, discount), np.float64)
    np.testing.assert_allclose(got, plain_projection(masses.astype(np.float64), reward, discount), atol=2e-6)
    assert (got >= 0).all() and abs(got.sum() - 1) < 2e-6
    atoms = np.linspace(V_MIN, V_MAX, N)
    clipped = np.clip(reward + discount * atoms, V_MIN, V_MAX)
    np.testing.assert_allclose(got @ atoms, masses.astype(np.float64) @ clipped, atol=1e-5)


def test_the_divergence_is_zero_where_both_agree_and_has_the_gradient_of_cross_entropy():
    target, logits = random_masses(1), jnp.linspace(-1, 1, N)
    assert abs(categorical_loss(jnp.log(target), target)) < 1e-6
    p = np.exp(np.linspace(-1, 1, N)) / np.exp(np.linspace(-1, 1, N)).sum()
    np.testing.assert_allclose(categorical_loss(logits, target), (target * np.log(target / p)).sum(), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(categorical_loss)(logits, target), p - target, atol=1e-6)
    assert jnp.isfinite(categorical_loss(logits, jnp.eye(N)[2]))


quantile_loss = jax.jit(quantile_huber_loss, static_argnames="delta")


@settings(deadline=None, max_examples=50)
@given(seeds, st.sampled_from([0.5, 1.0, 2.0]))
def test_quantile_loss_equals_its_formula(seed, delta):
    numbers = np.random.default_rng(seed).normal(scale=2, size=(2, 5)).astype(np.float32)
    want = plain_quantile_loss(numbers[0], numbers[1], delta)
    np.testing.assert_allclose(quantile_loss(numbers[0], numbers[1], delta=delta), want, rtol=1e-4, atol=1e-6)


def test_quantile_loss_by_hand():
    # Midpoints 1/4 and 3/4; errors of the first 2 and -1, of the second 1 and -2; Huber losses 1.5 and 0.5.
    want = (0.25 * 1.5 + 0.75 * 0.5) / 2 + (0.75 * 0.5 + 0.25 * 1.5) / 2
    np.testing.assert_allclose(quantile_huber_loss(jnp.array([0.0, 1.0]), jnp.array([2.0, -1.0])), want, rtol=1e-6)


def test_quantile_regression_finds_the_quantiles():
    samples = jnp.asarray(np.random.default_rng(0).exponential(size=400), jnp.float32)
    step = jax.grad(lambda q: quantile_huber_loss(q, samples, 0.01))
    quantile = jax.jit(lambda q: jax.lax.fori_loop(0, 2000, lambda _, q: q - 0.02 * step(q), q))(jnp.zeros(4))
    np.testing.assert_allclose(quantile, np.quantile(samples, [0.125, 0.375, 0.625, 0.875]), atol=0.05)
