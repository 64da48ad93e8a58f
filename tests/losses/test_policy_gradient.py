"""Losses against float64 NumPy, and their gradients where clipping must stop them."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax.algorithms import PPO
from msrl_jax.algorithms.ppo import ppo_loss
from msrl_jax.losses import approximate_kl, clipped_surrogate_loss, clipped_value_loss, policy_gradient_loss, value_loss
from msrl_jax.networks.distributions import Categorical


@pytest.fixture
def numbers():
    return np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)


def test_policy_gradient_and_surrogate_have_equal_gradients_at_ratio_1(numbers):
    log_prob, advantage = numbers[:2]
    np.testing.assert_allclose(policy_gradient_loss(log_prob, advantage), -log_prob.astype(np.float64) * advantage, rtol=1e-6)
    gradients = jax.grad(lambda *x: policy_gradient_loss(*x).sum(), argnums=(0, 1))(log_prob, advantage)
    want = jax.grad(lambda x: clipped_surrogate_loss(x, advantage, 0.2).sum())(jnp.zeros_like(log_prob))
    np.testing.assert_allclose(gradients[0], want, rtol=1e-6)
    assert not np.any(gradients[1])


def test_clipped_surrogate_loss_equals_its_formula(numbers):
    log_ratio, advantage = numbers[:2]
    ratio = np.exp(log_ratio.astype(np.float64))
    want = -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
    np.testing.assert_allclose(clipped_surrogate_loss(log_ratio, advantage, 0.2), want, rtol=1e-5)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "moves"),
    [(0.5, 1.0, False), (0.5, -1.0, True), (-0.5, 1.0, True), (-0.5, -1.0, False), (0.0, 1.0, True)],
)
def test_the_surrogate_has_no_gradient_exactly_where_it_is_clipped(log_ratio, advantage, moves):
    gradient = jax.grad(clipped_surrogate_loss)(log_ratio, advantage, 0.2)
    assert bool(gradient != 0) == moves


def test_value_losses_equal_their_formulas(numbers):
    value, old, target = (x.astype(np.float64) for x in numbers[:3])
    near = old + np.clip(value - old, -0.3, 0.3)
    np.testing.assert_allclose(value_loss(*numbers[[0, 2]]), (value - target) ** 2 / 2, rtol=1e-5)
    want = np.maximum((value - target) ** 2, (near - target) ** 2) / 2
    np.testing.assert_allclose(clipped_value_loss(*numbers[:3], 0.3), want, rtol=1e-4, atol=1e-7)


def test_approximate_kl_is_unbiased():
    new, old = np.array([0.2, 0.3, 0.5]), np.array([0.25, 0.25, 0.5])
    estimates = approximate_kl(jnp.log(new / old))
    np.testing.assert_allclose((old * estimates).sum(), (old * np.log(old / new)).sum(), rtol=1e-5)
    assert (np.asarray(estimates) >= 0).all()


def test_approximate_kl_keeps_small_differences():
    np.testing.assert_allclose(approximate_kl(jnp.float32(1e-3)), 0.5e-6, rtol=1e-3)


@pytest.mark.parametrize("loss", [policy_gradient_loss, value_loss, lambda x, y: clipped_surrogate_loss(x, y, 0.2)])
def test_shapes_that_would_broadcast_are_refused(loss):
    with pytest.raises(AssertionError, match=r"\(4, 1\)"):
        loss(jnp.zeros((4, 1)), jnp.zeros(4))


@pytest.mark.parametrize("clip_value", [None, 0.3])
def test_the_loss_of_ppo_is_its_three_terms(clip_value):
    """Equation 9 of the paper in float64: the entropy is a bonus, and the clips count where the ratio itself is far from 1."""
    rng = np.random.default_rng(1)
    logits, (log_prob, advantage, value, old_value, target) = rng.normal(size=(64, 3)), rng.normal(size=(5, 64))
    action = rng.integers(3, size=64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    log_prob = log_p[range(64), action] + 0.25 * log_prob
    ratio = np.exp(log_p[range(64), action] - log_prob)
    policy_loss = -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage).mean()
    errors = 0.5 * (value - target) ** 2
    if clip_value is not None:
        errors = np.maximum(errors, 0.5 * (old_value + np.clip(value - old_value, -0.3, 0.3) - target) ** 2)
    entropy = -(np.exp(log_p) * log_p).sum(-1).mean()
    outside = abs(ratio - 1) > 0.2
    assert (outside != (abs(np.log(ratio)) > 0.2)).any()

    as_float32 = lambda x: jnp.asarray(x, jnp.float32)
    loss, stats = ppo_loss(
        PPO(clip_ratio=0.2, clip_value=clip_value, value_coef=0.7, entropy_coef=0.3),
        Categorical(as_float32(logits)),
        as_float32(value),
        SimpleNamespace(action=jnp.asarray(action), log_prob=as_float32(log_prob), valid=None),
        advantage=as_float32(advantage),
        old_value=as_float32(old_value),
        target=as_float32(target),
    )
    np.testing.assert_allclose(loss, policy_loss + 0.7 * errors.mean() - 0.3 * entropy, rtol=1e-5)
    np.testing.assert_allclose(stats["clip_fraction"], outside.mean(), rtol=1e-6)
    np.testing.assert_allclose(stats["entropy"], entropy, rtol=1e-5)
