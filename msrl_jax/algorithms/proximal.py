"""What the variants of PPO share: the checks of their configs, the loss, and the loop of updates over minibatches."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from msrl_jax.algorithms import config as check
from msrl_jax.algorithms.distributions import Distribution
from msrl_jax.algorithms.losses import approximate_kl, clipped_surrogate_loss, clipped_value_loss, value_loss
from msrl_jax.algorithms.networks import ACTIVATIONS, NETWORKS
from msrl_jax.algorithms.optimizer import descend, learning_rate_at
from msrl_jax.algorithms.returns import standardise
from msrl_jax.fragments import fragment

if TYPE_CHECKING:
    from msrl_jax.algorithms.ppo import PPOConfig
    from msrl_jax.algorithms.recurrent_ppo import RecurrentPPOConfig


def check_config(config: "PPOConfig | RecurrentPPOConfig") -> None:
    """Raises ValueError on a field, common to the variants of PPO, whose value cannot work."""
    check.check_integers(config, 1, "num_envs", "unroll_length", "num_epochs", "num_minibatches", "total_steps")
    check.check_numbers(config, "learning_rate", "clip_ratio", "max_grad_norm", "clip_value", "target_kl", above=0.0)
    check.check_numbers(config, "discount", "gae_lambda", low=0.0, high=1.0)
    check.check_numbers(config, "entropy_coef", "value_coef", low=0.0)
    check.check_booleans(config, "anneal_learning_rate", "normalize_observations", "normalize_rewards")
    check.check_choice(config, "normalize_advantage", ("minibatch", "batch", "none"))
    check.check_sizes(config, "hidden_sizes")
    check.check_choice(config, "activation", ACTIVATIONS)
    check.check_choice(config, "network", NETWORKS)


def surrogate_loss(
    config: "PPOConfig | RecurrentPPOConfig",
    policy: Distribution,
    value: jax.Array,
    *,
    action: jax.Array,
    log_prob: jax.Array,
    advantage: jax.Array,
    old_value: jax.Array,
    target: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of a minibatch: clipped surrogate, value loss and entropy bonus (arXiv 1707.06347, eq. 9).

    Args:
      config: the weights and clipping ranges.
      policy: the distribution over actions now. `[...]`
      value: the values now. `[...]`
      action: the actions taken. `[..., *action_shape]`
      log_prob: their log-probabilities when they were taken. `[...]`
      advantage: the estimated advantages, standardised if they are to be over more than this minibatch. `[...]`
      old_value: the values when the actions were taken; they count if `clip_value` is given. `[...]`
      target: what the values should have been. `[...]`

    Returns:
      The loss and its parts, float32 scalars.
    """
    if config.normalize_advantage == "minibatch":
        advantage = standardise(advantage)
    log_ratio = policy.log_prob(action) - log_prob
    if config.clip_value is None:
        value_losses = value_loss(value, target)
    else:
        value_losses = clipped_value_loss(value, old_value, target, config.clip_value)
    stats = {
        "policy_loss": clipped_surrogate_loss(log_ratio, advantage, config.clip_ratio).mean(),
        "value_loss": value_losses.mean(),
        "entropy": policy.entropy().mean(),
        "approx_kl": approximate_kl(log_ratio).mean(),
        "clip_fraction": (jnp.abs(jnp.expm1(log_ratio)) > config.clip_ratio).mean(dtype=jnp.float32),
    }
    total = stats["policy_loss"] + config.value_coef * stats["value_loss"]
    return total - config.entropy_coef * stats["entropy"], stats


def optimize(
    config: "PPOConfig | RecurrentPPOConfig",
    optimizer: optax.GradientTransformation,
    gradients: Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]],
    params: Any,
    opt_state: optax.OptState,
    iteration: jax.Array,
    minibatches: Any,
) -> tuple[Any, optax.OptState, dict[str, jax.Array]]:
    """Makes one update per minibatch; once the divergence exceeds `config.target_kl`, the rest is skipped.

    Args:
      config: the learning rate and the target.
      optimizer: turns gradients into directions.
      gradients: `(params, minibatch) -> (gradients, parts of the loss)`.
      params: the parameters.
      opt_state: the optimiser's state.
      iteration: iterations done. shape=(), dtype=int32
      minibatches: what `gradients` is given, stacked: a leading dimension counts the updates.

    Returns:
      Parameters, optimiser state, and metrics: means over the updates.
    """
    anneal_over = config.total_steps if config.anneal_learning_rate else None
    learning_rate = learning_rate_at(iteration, config.learning_rate, config.num_envs * config.unroll_length, anneal_over)

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
        if config.target_kl is not None:
            skip |= stats["approx_kl"] > config.target_kl
        params, opt_state, grad_norm = apply_update(params, opt_state, grads, learning_rate, skip)
        return (params, opt_state, skip), stats | {"grad_norm": grad_norm}

    skip = None if config.target_kl is None else jnp.bool(False)
    (params, opt_state, _), stats = jax.lax.scan(update, (params, opt_state, skip), minibatches)
    return params, opt_state, jax.tree.map(jnp.mean, stats) | {"learning_rate": learning_rate}
