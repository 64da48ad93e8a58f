"""Losses and targets of action values: pure functions of one example; the caller maps them over a batch.

In the shape descriptions, `A` denotes the number of actions and `N` the number of atoms or quantiles of a distribution.
"""

import chex
import jax
import jax.numpy as jnp
import optax


def greedy_target(next_value: jax.Array, next_target: jax.Array) -> jax.Array:
    """The target network's outputs for the action with the largest value (van Hasselt et al., 2016, arXiv 1509.06461).

    The values `next_value` `[A]` that choose the action are the target network's for Q-learning, the online network's for
    double Q-learning. `next_target` `[A, ...]` has the target network's values, atoms or quantiles of each action.
    """
    chex.assert_rank(next_value, 1)
    chex.assert_equal_shape_prefix((next_value, next_target), 1)
    return next_target[jnp.argmax(next_value)]


def categorical_projection(
    probability: jax.Array, reward: jax.Array, discount: jax.Array, v_min: float, v_max: float
) -> jax.Array:
    """Projects the distribution of `reward + discount * return` onto the atoms (C51; arXiv 1707.06887, algorithm 1).

    The mass of a shifted atom goes to its two neighbors, more to the nearer one, or to the first or last atom if it is outside.
    The masses `[N]` belong to atoms at equal distances from `v_min` to `v_max`; their sum stays.
    """
    chex.assert_rank((probability, reward, discount), (1, 0, 0))
    num_atoms = probability.shape[-1]
    atoms = jnp.linspace(v_min, v_max, num_atoms)
    spacing = (v_max - v_min) / (num_atoms - 1)
    landed = (jnp.clip(reward + discount * atoms, v_min, v_max) - v_min) / spacing
    share = jnp.clip(1 - jnp.abs(landed[:, None] - jnp.arange(num_atoms)), 0, 1)
    return probability @ share


def categorical_loss(logits: jax.Array, target: jax.Array) -> jax.Array:
    """The KL divergence of the predicted masses from the target; it has the gradient of the cross-entropy (arXiv 1707.06887).

    From logits `[N]` and target masses `[N]`; 0 if the masses are equal.
    """
    chex.assert_rank(logits, 1)
    chex.assert_equal_shape((logits, target))
    known = jnp.where(target > 0, target * jnp.log(jnp.where(target > 0, target, 1.0)), 0.0)
    return (known - target * jax.nn.log_softmax(logits)).sum(-1)


def quantile_huber_loss(quantile: jax.Array, target: jax.Array, delta: float = 1.0) -> jax.Array:
    """The quantile Huber loss (Dabney et al., 2018, arXiv 1710.10044, eq. 10), summed over quantiles, averaged over samples.

    The quantiles `[N]` are predictions at the midpoints `(i + 1/2) / N`; the targets `[M]` are samples. The Huber loss is
    linear above `delta` and divided by it.
    """
    chex.assert_rank((quantile, target), 1)
    midpoint = (jnp.arange(quantile.shape[-1]) + 0.5) / quantile.shape[-1]
    error = target[None, :] - quantile[:, None]
    weight = jnp.abs(midpoint[:, None] - (jax.lax.stop_gradient(error) < 0))
    return (weight * optax.huber_loss(error, delta=delta) / delta).mean(1).sum(0)


def rescale(value: jax.Array, epsilon: float) -> jax.Array:
    """Squeezes large values: `sign(x) (sqrt(|x| + 1) - 1) + epsilon x` (Pohlen et al., 2018, arXiv 1805.11593)."""
    # Equal to the root minus 1, without the cancellation.
    return value / (jnp.sqrt(jnp.abs(value) + 1) + 1) + epsilon * value


def unrescale(value: jax.Array, epsilon: float) -> jax.Array:
    """The inverse of `rescale`."""
    size = jnp.abs(value)
    # sqrt(|x| + 1) - 1 by the larger root of a quadratic equation, written without cancellation.
    root = jnp.sqrt((1 + 2 * epsilon) ** 2 + 4 * epsilon * size)
    above = 2 * size / (root + 1 + 2 * epsilon)
    return jnp.sign(value) * above * (above + 2)


def sequence_priority(td_error: jax.Array, eta: float) -> jax.Array:
    """One error `[...]` for a sequence of errors `[L, ...]` of either sign, for its priority (Kapturowski et al., 2019).

    It is `eta max |td_error| + (1 - eta) mean |td_error|`; see https://openreview.net/forum?id=r1lyTjAqYX.
    """
    chex.assert_type(td_error, float)
    size = jnp.abs(td_error)
    return eta * size.max(0) + (1 - eta) * size.mean(0)
