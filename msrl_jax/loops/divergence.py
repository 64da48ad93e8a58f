"""The KL divergence of an updated policy from the one that acted: a limit to it, and learning rates that adapt to it.

PPO makes several updates from one batch. With `target_kl`, once the divergence
exceeds the limit, the remaining updates of the iteration change nothing. An
adaptive learning rate (`kl:TARGET`) decreases after an update with a large divergence and increases after one with a small
divergence.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from msrl_jax.agents.agent import learning_rate_metric
from msrl_jax.agents.optimizers import adapts, is_transformation


class Divergence(NamedTuple):
    """State that is passed between the updates of an iteration; fields are None where the config does not need them."""

    exceeded: jax.Array | None  # whether an update exceeded `target_kl`, bool []
    kl: jax.Array | None  # the divergence that the learning rate adapts to, in nats; nan keeps the rate. float32 []
    is_first: jax.Array | None  # whether no update has been made yet, bool []


def no_divergence(config: Any) -> Divergence:
    """Returns the state before the first update of an iteration."""
    exceeded = None if config.target_kl is None else jnp.bool(False)
    if _adapts(config):
        return Divergence(exceeded, jnp.float32(jnp.nan), jnp.bool(True))
    return Divergence(exceeded, None, None)


def update_divergence(config: Any, previous: Divergence, kl: jax.Array) -> Divergence:
    """Returns the state for an update whose gradients were computed at a divergence of `kl` nats, `[]`."""
    exceeded, kl_followed, is_first = previous
    if is_first is not None:
        # The first update starts from the policy that acted, so the sign of its divergence is only rounding error.
        kl_followed = jnp.where(is_first if exceeded is None else is_first | exceeded, jnp.nan, kl)
        is_first = jnp.bool(False)
    return Divergence(None if exceeded is None else exceeded | (kl > config.target_kl), kl_followed, is_first)


def apply_gradients(
    config: Any,
    optimizer: optax.GradientTransformationExtraArgs,
    params: Any,
    opt_state: Any,
    grads: Any,
    learning_rate: jax.Array | None,
    divergence: Divergence,
) -> tuple[Any, Any]:
    """Returns the parameters and the optimizer state after an update; past the limit, only an adaptive rate changes.

    Args:
      config: the config of the algorithm.
      optimizer: the result of `make_optimizer`.
      params: the parameters.
      opt_state: the state of the optimizer.
      grads: the gradients of the parameters.
      learning_rate: `learning_rate_at(config, progress)`, `[]`; None if the optimizer has its own rate, or if the rate adapts.
      divergence: the result of `update_divergence`.
    """
    if divergence.kl is not None:
        opt_state = config.learning_rate.adapted(opt_state, divergence.kl)
    previous, exceeded = (params, opt_state), divergence.exceeded
    updates, opt_state = optimizer.update(grads, opt_state, params, learning_rate=learning_rate)
    updated = optax.apply_updates(params, updates), opt_state
    return updated if exceeded is None else jax.tree.map(lambda old, new: jnp.where(exceeded, old, new), previous, updated)


def current_rate_metric(config: Any, learning_rate: jax.Array | None, opt_state: Any) -> dict[str, jax.Array]:
    """Returns the metric `learning_rate`, fixed or adaptive; an empty dict if the optimizer has its own learning rate."""
    if _adapts(config):
        return {"learning_rate": config.learning_rate.rate_in(opt_state).mean()}  # over networks, if each has one
    return learning_rate_metric(learning_rate)


def _adapts(config: Any) -> bool:
    return adapts(config.learning_rate) and not is_transformation(config.optimizer)
