"""What the variants of PPO share: the loss, and the loop of updates over minibatches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from msrl_jax.algorithms.loops.optimizer import descend
from msrl_jax.algorithms.losses import approximate_kl, clipped_surrogate_loss, clipped_value_loss, value_loss
from msrl_jax.algorithms.networks.distributions import Distribution
from msrl_jax.fragments import fragment


def surrogate_loss(
    policy: Distribution,
    value: jax.Array,
    *,
    action: jax.Array,
    log_prob: jax.Array,
    advantage: jax.Array,
    old_value: jax.Array,
    target: jax.Array,
    clip_ratio: float,
    clip_value: float | None,
    value_coef: float,
    entropy_coef: float,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of a minibatch: clipped surrogate, value loss and entropy bonus (arXiv 1707.06347, eq. 9).

    Args:
      policy: the distribution over actions now. `[...]`
      value: the values now. `[...]`
      action: the actions taken. `[..., *action_shape]`
      log_prob: their log-probabilities when they were taken. `[...]`
      advantage: the estimated advantages, standardized if they are to be. `[...]`
      old_value: the values when the actions were taken; they count if `clip_value` is given. `[...]`
      target: what the values should have been. `[...]`
      clip_ratio: how far from 1 the probability ratio still pays off.
      clip_value: how far a value may move to its profit; None does not clip.
      value_coef: weight of the value loss.
      entropy_coef: weight of the entropy bonus.

    Returns:
      The loss and its parts, float32 scalars.
    """
    log_ratio = policy.log_prob(action) - log_prob
    value_losses = value_loss(value, target)
    if clip_value is not None:
        value_losses = clipped_value_loss(value, old_value, target, clip_value)
    stats = {
        "policy_loss": clipped_surrogate_loss(log_ratio, advantage, clip_ratio).mean(),
        "value_loss": value_losses.mean(),
        "entropy": policy.entropy().mean(),
        "approx_kl": approximate_kl(log_ratio).mean(),
        "clip_fraction": (jnp.abs(jnp.expm1(log_ratio)) > clip_ratio).mean(dtype=jnp.float32),
    }
    total = stats["policy_loss"] + value_coef * stats["value_loss"]
    return total - entropy_coef * stats["entropy"], stats


def optimize(
    optimizer: optax.GradientTransformation,
    gradients: Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]],
    params: Any,
    opt_state: optax.OptState,
    minibatches: Any,
    *,
    learning_rate: jax.Array,
    target_kl: float | None,
) -> tuple[Any, optax.OptState, dict[str, jax.Array]]:
    """Makes one update per minibatch; once the divergence exceeds a target, the rest is skipped.

    Args:
      optimizer: turns gradients into directions.
      gradients: `(params, minibatch) -> (gradients, parts of the loss)`.
      params: the parameters.
      opt_state: the optimizer's state.
      minibatches: what `gradients` is given, stacked: a leading dimension counts the updates.
      learning_rate: the length of a step. `[]` float32
      target_kl: the divergence from the policy that acted, estimated of a minibatch, in nats; None never skips.

    Returns:
      Parameters, optimizer state, and metrics: means over the updates.
    """
    @fragment(role="server")
    def apply_update(params, opt_state, grads, learning_rate, skip):
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        old, new = (params, opt_state), (descend(params, updates, learning_rate), new_opt_state)
        if skip is not None:
            new = jax.tree.map(lambda old, new: jnp.where(skip, old, new), old, new)
        return *new, optax.tree.norm(grads)

    def update(carry, minibatch):
        params, opt_state, skip = carry
        grads, stats = gradients(params, minibatch)
        if target_kl is not None:
            skip |= stats["approx_kl"] > target_kl
        params, opt_state, grad_norm = apply_update(params, opt_state, grads, learning_rate, skip)
        return (params, opt_state, skip), stats | {"grad_norm": grad_norm}

    skip = None if target_kl is None else jnp.bool(False)
    (params, opt_state, _), stats = jax.lax.scan(update, (params, opt_state, skip), minibatches)
    return params, opt_state, jax.tree.map(jnp.mean, stats) | {"learning_rate": learning_rate}
