"""Targets and losses of action values along sequences of steps, as in R2D2 (Kapturowski et al., 2019).

In the shape descriptions, `L` denotes the number of steps in the loss and `B` the batch size.
"""

import chex
import jax
import jax.numpy as jnp

from msrl_jax.losses.values import value_error
from msrl_jax.replay import Transition
from msrl_jax.returns.n_step import n_step_return


def sequence_target(
    next_value: jax.Array, window: Transition, *, discount: float, num_steps: int, epsilon: float | None
) -> jax.Array:
    """Returns the targets of all but the last `num_steps - 1` steps, rescaled by `rescale` unless `epsilon` is None."""
    if epsilon is not None:
        next_value = unrescale(next_value, epsilon)
    target = n_step_return(
        window.reward, next_value, window.terminated, window.truncated, discount=discount, num_steps=num_steps
    )[: len(next_value) - num_steps + 1]
    return target if epsilon is None else rescale(target, epsilon)


def rescale(value: jax.Array, epsilon: float) -> jax.Array:
    """Compresses large values: `sign(x) (sqrt(|x| + 1) - 1) + epsilon x` (Pohlen et al., 2018, arXiv 1805.11593)."""
    # Equals the formula above, without cancellation.
    return value / (jnp.sqrt(jnp.abs(value) + 1) + 1) + epsilon * value


def unrescale(value: jax.Array, epsilon: float) -> jax.Array:
    """Inverts `rescale`."""
    size = jnp.abs(value)
    # sqrt(|x| + 1) - 1 by the larger root of a quadratic equation, written without cancellation.
    root = jnp.sqrt((1 + 2 * epsilon) ** 2 + 4 * epsilon * size)
    excess = 2 * size / (root + 1 + 2 * epsilon)
    return jnp.sign(value) * excess * (excess + 2)


def sequence_priority(td_error: jax.Array, eta: float) -> jax.Array:
    """Returns the priority of a sequence of errors `[L, ...]`: `eta max |error| + (1 - eta) mean |error|` (R2D2)."""
    chex.assert_type(td_error, float)
    size = jnp.abs(td_error)
    return eta * size.max(0) + (1 - eta) * size.mean(0)


def sequence_loss(
    weight: jax.Array, value: jax.Array, target: jax.Array, huber_delta: float | None, eta: float
) -> tuple[jax.Array, tuple[jax.Array, dict[str, jax.Array]]]:
    """Returns the mean loss of values `[L, B]` of actions taken, with weights `[B]`; priorities `[B]`; and statistics."""
    losses = value_error(value, target, huber_delta)
    stats = {"loss": losses.mean(), "value": value.mean()}
    return (weight * losses.mean(0)).mean(), (sequence_priority(target - value, eta), stats)
