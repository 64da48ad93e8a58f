"""Targets and losses of soft actor-critic, against hand-worked cases and float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_jax.losses.entropy import soft_value, temperature_loss
from msrl_jax.networks.discrete_policies import AllActions

NUMBERS = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).normal(size=(3, 5, 4)).astype(np.float32) * 3)
TEMPERATURES = st.floats(0.0, 10.0, width=32)


def expected_soft_value(q, logits, temperature):
    """The soft value of a discrete policy, and the mean of its log-probabilities."""
    policy = AllActions(logits)
    _, log_prob = policy.sample_and_log_prob(jax.random.key(0))
    return policy.expectation(soft_value(q, log_prob, jnp.float32(temperature))), policy.expectation(log_prob)


def test_hand_worked_cases():
    assert soft_value(jnp.float32(2), jnp.float32(-0.5), jnp.float32(0.2)) == np.float32(2.1)
    value, log_prob = expected_soft_value(jnp.float32([1, 3]), jnp.log(jnp.float32([0.5, 0.5])), jnp.float32(1))
    np.testing.assert_allclose([value, log_prob], [2 + np.log(2), -np.log(2)], rtol=1e-6)
    # An entropy of 0.5 nats where 2 are wanted: the loss falls as the temperature rises.
    loss, slope = jax.value_and_grad(temperature_loss)(jnp.float32(0), jnp.float32(-0.5), 2.0)
    assert loss == slope == -1.5


@settings(deadline=None, max_examples=30)
@given(NUMBERS, TEMPERATURES)
def test_losses_equal_float64(numbers, temperature):
    q, log_prob, logits = numbers.astype(np.float64)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    wanted = [
        (soft_value(numbers[0], numbers[1], temperature), q - temperature * log_prob),
        (temperature_loss(np.log1p(temperature), numbers[1], -2.5), -(1 + temperature) * (log_prob - 2.5)),
        *zip(
            expected_soft_value(numbers[0], numbers[2], temperature),
            ((probs * (q - temperature * np.log(probs))).sum(-1), (probs * np.log(probs)).sum(-1)),
            strict=True,
        ),
    ]
    for got, want in wanted:
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@settings(deadline=None, max_examples=20)
@given(NUMBERS, st.floats(0.125, 10.0, width=32))
def test_the_best_discrete_policy_is_the_softmax_of_values(numbers, temperature):
    """Its soft value is the temperature times the log-sum-exp (Haarnoja et al., 2017, arXiv 1702.08165, eq. 3)."""
    q, log_probs = numbers[0], jax.nn.log_softmax(numbers[0] / temperature)
    best, _ = expected_soft_value(q, log_probs, temperature)
    scaled = q.astype(np.float64) / temperature
    np.testing.assert_allclose(best, temperature * np.log(np.exp(scaled).sum(-1)), rtol=1e-4, atol=1e-4)
    assert (expected_soft_value(q, jax.nn.log_softmax(numbers[1]), temperature)[0] <= best + 1e-4).all()


def test_the_temperature_does_not_move_the_policy():
    gradient = jax.grad(lambda log_prob: temperature_loss(jnp.float32(0), log_prob, 1.0).sum())(jnp.ones(3))
    assert not gradient.any()
