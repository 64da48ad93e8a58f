"""What a network of action values predicts of a return, and the targets of M-DQN, per example.

In the shape descriptions, `A` denotes the number of actions and `N` the number of outputs per action: one value, or the atoms
or quantiles of a distribution.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax.configs.predictions import C51, IQN, QR
from msrl_jax.losses.distributional import categorical_loss, categorical_projection, quantile_huber_loss
from msrl_jax.losses.values import value_error


class ActionPrediction(NamedTuple):
    """Functions of the outputs for an action."""

    num_outputs: int  # per action; 1 if the outputs are at fractions that the network takes (IQN)
    expected: Callable[[jax.Array], jax.Array]  # outputs [..., N] -> expected returns [...]
    # (outputs [N], outputs for the next step [N'], reward [], discount [], fractions [N] if any) -> (loss [], TD error [])
    loss: Callable[..., tuple[jax.Array, jax.Array]]


def action_prediction(config: Any) -> ActionPrediction:
    """Returns the prediction of a config, `config.returns`."""
    returns = config.returns
    if isinstance(returns, C51):
        return categorical(returns.num_atoms, *returns.support(config.discount))

    def loss(
        outputs: jax.Array, next_outputs: jax.Array, reward: jax.Array, discount: jax.Array, *fraction: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        target = reward + discount * next_outputs
        error = target.mean() - outputs.mean()
        if isinstance(returns, QR | IQN):
            return quantile_huber_loss(outputs, target, 1.0, *fraction), error
        return value_error(outputs.mean(), target.mean(), returns.huber_delta), error

    return ActionPrediction(returns.num_quantiles if isinstance(returns, QR) else 1, lambda outputs: outputs.mean(-1), loss)


def categorical(num_atoms: int, v_min: float, v_max: float) -> ActionPrediction:
    """Predicts logits of atoms (Bellemare et al., 2017, arXiv 1707.06887); the TD error is the loss."""

    def expected(outputs: jax.Array) -> jax.Array:
        return jax.nn.softmax(outputs) @ jnp.linspace(v_min, v_max, num_atoms, dtype=jnp.float32)

    def loss(
        outputs: jax.Array, next_outputs: jax.Array, reward: jax.Array, discount: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        atoms = jnp.linspace(v_min, v_max, num_atoms, dtype=jnp.float32)
        masses = categorical_projection(jax.nn.softmax(next_outputs), reward + discount * atoms, v_min, v_max)
        divergence = categorical_loss(outputs, masses)
        return divergence, divergence

    return ActionPrediction(num_atoms, expected, loss)


def soft_target(next_value: jax.Array, next_target: jax.Array, temperature: float) -> jax.Array:
    """Returns the soft value `[N]` of the softmax policy of values `[A]`, from outputs `[A, N]` (arXiv 2007.14430, eq. 1)."""
    log_policy = jax.nn.log_softmax(next_value / temperature)[:, None]
    policy = jnp.exp(log_policy)
    return jnp.where(policy > 0, policy * (next_target - temperature * log_policy), 0.0).sum(0)


def munchausen_reward(value: jax.Array, action: jax.Array, scale: float, temperature: float, clip: float) -> jax.Array:
    """Returns the scaled and clipped log-probability of an action under the softmax policy of values `[A]` (2007.14430)."""
    log_prob = temperature * jax.nn.log_softmax(value / temperature)[action]
    return scale * jnp.clip(log_prob, clip, 0.0)
