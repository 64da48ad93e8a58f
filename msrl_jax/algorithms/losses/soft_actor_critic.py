"""Targets and losses of SAC and TD3: functions of arrays; the caller takes the mean.

In the shape descriptions, `C` denotes the number of critics, `N` the number of discrete actions and `D` the length of
a continuous action.
"""

import chex
import jax
import jax.numpy as jnp


def pessimistic_value(q: jax.Array) -> jax.Array:
    """The minimum of several critics' values, against overestimation (Fujimoto et al., 2018, arXiv 1802.09477, eq. 10).

    Args:
      q: values. `[C, ...]`

    Returns:
      The minima. `[...]`
    """
    return jnp.min(q, axis=0)


def soft_value(q: jax.Array, log_prob: jax.Array, temperature: jax.Array) -> jax.Array:
    """The soft value of an action drawn from a policy (Haarnoja et al., 2018, arXiv 1812.05905, eq. 3).

    Its negative is the loss of the actor (eq. 7) if the action is reparameterized.

    Args:
      q: values of actions drawn from the policy. `[...]`
      log_prob: their log-probabilities, in nats. `[...]`
      temperature: the value of a nat of entropy. `[]`

    Returns:
      One estimate per action. `[...]`
    """
    chex.assert_equal_shape((q, log_prob))
    chex.assert_rank(temperature, 0)
    return q - temperature * log_prob


def expected_soft_value(
    q: jax.Array, log_probs: jax.Array, temperature: jax.Array, legal: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The soft value of a discrete policy (Christodoulou, 2019, arXiv 1910.07207, eq. 10): the expectation of `soft_value`.

    Args:
      q: values of every action. `[..., N]`
      log_probs: log-probabilities of every action, in nats. `[..., N]`
      temperature: the value of a nat of entropy. `[]`
      legal: whether each action is legal; all are if None. The log-probability of an illegal action is -inf. `[..., N]` bool

    Returns:
      The value, and the expected log-probability (the negative entropy). `[...]` each
    """
    chex.assert_equal_shape((q, log_probs))
    chex.assert_rank(temperature, 0)
    probs = jnp.exp(log_probs)
    if legal is not None:
        log_probs = jnp.where(legal, log_probs, 0.0)  # an action of probability 0 adds nothing
    return jnp.sum(probs * (q - temperature * log_probs), axis=-1), jnp.sum(probs * log_probs, axis=-1)


def temperature_loss(log_temperature: jax.Array, log_prob: jax.Array, target_entropy: float | jax.Array) -> jax.Array:
    """The loss that raises the temperature while the entropy is below its target (arXiv 1812.05905, eq. 18).

    Args:
      log_temperature: the logarithm of the temperature. `[]`
      log_prob: log-probabilities of actions drawn from the policy; no gradient flows through them. `[...]`
      target_entropy: the target entropy, in nats. `[]` or `[...]`

    Returns:
      The loss to minimize. `[...]`
    """
    chex.assert_rank(log_temperature, 0)
    return -jnp.exp(log_temperature) * (jax.lax.stop_gradient(log_prob) + target_entropy)


def smoothed_action(action: jax.Array, noise: jax.Array, noise_clip: float) -> jax.Array:
    """A target policy's action with clipped noise: similar actions should have similar values (arXiv 1802.09477, eq. 14).

    Args:
      action: actions in [-1, 1]. `[..., D]`
      noise: noise. `[..., D]`
      noise_clip: the noise is clipped to this size.

    Returns:
      Actions in [-1, 1]. `[..., D]`
    """
    chex.assert_equal_shape((action, noise))
    return jnp.clip(action + jnp.clip(noise, -noise_clip, noise_clip), -1.0, 1.0)
