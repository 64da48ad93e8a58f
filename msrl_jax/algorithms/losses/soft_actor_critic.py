"""Targets and losses of SAC and TD3: functions of arrays; the caller takes the mean.

In the shape descriptions, `C` denotes the number of critics, `N` the number of discrete actions and `D` the length of
a continuous action.
"""

import chex
import jax
import jax.numpy as jnp


def pessimistic_value(q: jax.Array) -> jax.Array:
    """The minimum of critics' values `[C, ...]`, against overestimation (Fujimoto et al., 2018, arXiv 1802.09477, eq. 10)."""
    return jnp.min(q, axis=0)


def soft_value(q: jax.Array, log_prob: jax.Array, temperature: jax.Array) -> jax.Array:
    """The soft value of actions drawn from a policy, from values and log-probabilities `[...]` (arXiv 1812.05905, eq. 3).

    Its negative is the loss of the actor (eq. 7) if the action is reparameterized.
    """
    chex.assert_equal_shape((q, log_prob))
    chex.assert_rank(temperature, 0)
    return q - temperature * log_prob


def expected_soft_value(
    q: jax.Array, log_probs: jax.Array, temperature: jax.Array, legal: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The soft value of a discrete policy (Christodoulou, 2019, arXiv 1910.07207, eq. 10), and the expected log-probability.

    The first is the expectation of `soft_value`, the second the negative entropy, `[...]` each, from values `[..., N]` and
    log-probabilities `[..., N]`; the log-probability of an action that is not `legal` is -inf.
    """
    chex.assert_equal_shape((q, log_probs))
    chex.assert_rank(temperature, 0)
    probs = jnp.exp(log_probs)
    if legal is not None:
        log_probs = jnp.where(legal, log_probs, 0.0)  # an action of probability 0 adds nothing
    return jnp.sum(probs * (q - temperature * log_probs), axis=-1), jnp.sum(probs * log_probs, axis=-1)


def temperature_loss(log_temperature: jax.Array, log_prob: jax.Array, target_entropy: float | jax.Array) -> jax.Array:
    """The loss that raises the temperature while the entropy is below its target, in nats (arXiv 1812.05905, eq. 18).

    No gradient flows through the log-probabilities `[...]` of actions drawn from the policy.
    """
    chex.assert_rank(log_temperature, 0)
    return -jnp.exp(log_temperature) * (jax.lax.stop_gradient(log_prob) + target_entropy)


def smoothed_action(action: jax.Array, noise: jax.Array, noise_clip: float) -> jax.Array:
    """A target policy's action in [-1, 1] with clipped noise: similar ones have similar values (arXiv 1802.09477, eq. 14)."""
    chex.assert_equal_shape((action, noise))
    return jnp.clip(action + jnp.clip(noise, -noise_clip, noise_clip), -1.0, 1.0)
