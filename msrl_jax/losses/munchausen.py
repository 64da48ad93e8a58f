"""Munchausen reinforcement learning (M-DQN; Vieillard et al., 2020, arXiv 2007.14430).

In the shape descriptions, `A` denotes the number of actions and `N` the number of outputs per action.
"""

from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.configs.config import Tunable, tunable
from msrl_jax.configs.options import option
from msrl_jax.losses.atoms import C51
from msrl_jax.losses.q_targets import QTarget, Values
from msrl_jax.replay import NStep


@option(of=QTarget)
class Munchausen:
    """Adds the log-policy to rewards; targets average over all actions (M-DQN, Vieillard et al., 2020, arXiv 2007.14430)."""

    scale: Tunable = tunable(default=0.9, low=0, high=1, doc="weight of the log-policies. Usual: 0.9.")
    temperature: Tunable = tunable(default=0.03, above=0, doc="of the policy, in units of values. Usual: 0.03.")
    clip: Tunable = tunable(default=-1.0, high=0, doc="smallest log-policy times temperature. Usual: -1.")

    def check_config(self, config: Any) -> None:
        """Raises ValueError if the buffer keeps sums of rewards, or the network predicts probabilities."""
        name = type(config).__name__
        if config.replay.n_step > 1:
            raise ValueError(
                f"{name}.target={self} adds the log-policy of every step to its reward, but of replay.n_step="
                f"{config.replay.n_step} steps the buffer keeps the sum of their rewards; use replay.n_step=1"
            )
        if isinstance(config.returns, C51):
            raise ValueError(
                f"{name}.target={self} averages what actions return, but returns='c51' has probabilities; use "
                "returns='expected', 'qr' or 'iqn'"
            )

    def next_outputs_and_reward(
        self, values: Values, params: Any, target_params: Any, e: NStep, next_outputs: jax.Array
    ) -> tuple[Any, jax.Array]:
        """Returns the average outputs of the softmax policy, and the rewards with the log-policy of the actions taken."""
        next_value = values(target_params, e.next_obs)
        soft_outputs = jax.vmap(soft_target, (0, 0, None))(next_value, next_outputs, self.temperature)
        numbers = self.scale, self.temperature, self.clip
        rewards = jax.vmap(munchausen_reward, (0, 0, None, None, None))(values(target_params, e.obs), e.action, *numbers)
        return soft_outputs, e.reward + rewards


def soft_target(next_value: jax.Array, next_target: jax.Array, temperature: float) -> jax.Array:
    """Returns the soft value `[N]` of the softmax policy of values `[A]`, from outputs `[A, N]` (arXiv 2007.14430, eq. 1)."""
    log_policy = jax.nn.log_softmax(next_value / temperature)[:, None]
    policy = jnp.exp(log_policy)
    return jnp.where(policy > 0, policy * (next_target - temperature * log_policy), 0.0).sum(0)


def munchausen_reward(value: jax.Array, action: jax.Array, scale: float, temperature: float, clip: float) -> jax.Array:
    """Returns the scaled and clipped log-probability of an action under the softmax policy of values `[A]` (2007.14430)."""
    log_prob = temperature * jax.nn.log_softmax(value / temperature)[action]
    return scale * jnp.clip(log_prob, clip, 0.0)
