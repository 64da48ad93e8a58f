"""What critics predict: targets and losses against sorts, truncations and projections in float64 NumPy, example by example."""

import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax.algorithms import C51, DDPG, SAC, TD3, TQC, Expected, make
from tests.support.distributional import V_MAX, V_MIN, N, plain_projection, plain_quantile_loss

C, B = 3, 4


@pytest.fixture
def examples():
    """Outputs `[C, B, N]`, rewards, discounts and entropy bonuses `[B]`, and the backup with them."""
    numbers = np.random.default_rng(0)
    outputs = numbers.normal(size=(C, B, N)).astype(np.float32) * 2
    reward, bonus = numbers.normal(size=(2, B)).astype(np.float32)
    discount = np.array([0.9, 0.5, 0, 1], np.float32)
    return outputs, reward, discount, bonus, lambda q: reward + discount * (q + bonus)


@pytest.mark.parametrize("dropped", [0, 2])
def test_quantile_targets_are_the_pooled_ones_without_the_largest(examples, dropped):
    outputs, reward, discount, bonus, backup = examples
    got = TQC(N, dropped).of_critics(1).target(jnp.asarray(outputs), backup)
    assert got.shape == (B, C * (N - dropped))
    for b in range(B):
        pooled = np.sort(np.concatenate([outputs[c, b] for c in range(C)]).astype(np.float64))
        want = reward[b] + discount[b] * (pooled[: C * (N - dropped)] + bonus[b])
        np.testing.assert_allclose(got[b], want, rtol=1e-5, atol=1e-6)


def test_quantile_losses_are_those_of_each_critic(examples):
    outputs, *_, backup = examples
    predicted = TQC(N, 2).of_critics(1)
    target = predicted.target(jnp.asarray(outputs), backup)
    want = [[plain_quantile_loss(outputs[c, b], np.asarray(target[b]), 1.0) for b in range(B)] for c in range(C)]
    np.testing.assert_allclose(predicted.loss(outputs, target), want, rtol=1e-4)
    np.testing.assert_allclose(predicted.error(outputs, target), np.mean(want, 0), rtol=1e-4)
    np.testing.assert_allclose(predicted.value(outputs), outputs.astype(np.float64).mean((0, 2)), atol=1e-6)


def test_categorical_targets_project_the_critic_with_the_lowest_mean(examples):
    outputs, reward, discount, bonus, backup = examples
    got = C51(V_MIN, V_MAX, N).of_critics(1).target(jnp.asarray(outputs), backup)
    masses = np.exp(outputs.astype(np.float64))
    masses /= masses.sum(-1, keepdims=True)
    means = masses @ np.linspace(V_MIN, V_MAX, N)
    assert len(set(means.argmin(0))) > 1
    for b, c in enumerate(means.argmin(0)):
        want = plain_projection(masses[c, b], reward[b] + discount[b] * bonus[b], discount[b])
        np.testing.assert_allclose(got[b], want, atol=1e-6)
    value = C51(V_MIN, V_MAX, N).of_critics(1).value(outputs)
    np.testing.assert_allclose(value, means.min(0), rtol=1e-5, atol=1e-6)


def test_categorical_losses_are_cross_entropies_up_to_the_targets_entropy(examples):
    outputs, *_, backup = examples
    predicted = C51(V_MIN, V_MAX, N).of_critics(1)
    target = np.asarray(predicted.target(jnp.asarray(outputs), backup), np.float64)
    log_masses = outputs - np.log(np.exp(outputs.astype(np.float64)).sum(-1, keepdims=True))
    known = np.where(target > 0, target * np.log(np.maximum(target, 1e-300)), 0).sum(-1)
    np.testing.assert_allclose(predicted.loss(outputs, target), known - (target * log_masses).sum(-1), rtol=1e-4, atol=1e-6)


def test_of_expected_returns_the_lowest_counts(examples):
    q, *_, backup = examples
    np.testing.assert_array_equal(Expected().of_critics(1).target(q[..., 0], backup), backup(q[..., 0].min(0)))


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (SAC, {"returns": "c51:5.0,-5.0"}, r"SAC\.returns: v_min=5 is not below v_max=-5; exchange them"),
        (
            TD3,
            {"returns": "c51", "discount": 1.0},
            r"TD3\.discount=1.0 bounds no return; give v_min and v_max to returns='c51'",
        ),
        (TD3, {"returns": "tqc:4,4"}, r"TD3\.returns\.num_dropped=4 leaves no target"),
        (DDPG, {"returns": "iqn"}, "DDPG.returns='iqn': use one of expected, c51, tqc"),
        (TD3, {"exploration_noise": 0.3, "max_exploration_noise": 0.2}, r"max_exploration_noise=0.2 is below"),
    ],
)
def test_bad_distributions_are_refused_with_a_remedy(config, options, message):
    with pytest.raises(ValueError, match=message):
        make(config, options)
