"""Targets of deep Q-learning: which action of the next step counts. In the shape descriptions, `B` denotes the batch size,
`A` the number of actions and `N` the number of outputs per action.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax

from msrl_jax.configs.options import option
from msrl_jax.networks.q_network import greedy_target
from msrl_jax.replay import NStep

Values = Callable[[Any, Any], jax.Array]
"""`(params, obs) -> values [B, A]` by which actions are chosen, -inf for illegal actions."""


class QTarget(Protocol):
    """The options for how targets are computed."""

    def next_outputs_and_reward(
        self, values: Values, params: Any, target_params: Any, e: NStep, next_outputs: jax.Array
    ) -> tuple[Any, jax.Array]:
        """Returns the outputs for the next step `[B, N]`, and the rewards before it `[B]`.

        Args:
          values: computes action values from parameters.
          params: the online network's.
          target_params: the target network's.
          e: the batch.
          next_outputs: the target network's outputs for the next step. `[B, A, N]`
        """
        ...


@option(of=QTarget)
class Double:
    """Targets use the target network's value of the online network's greedy action (arXiv 1509.06461)."""

    def next_outputs_and_reward(
        self, values: Values, params: Any, target_params: Any, e: NStep, next_outputs: jax.Array
    ) -> tuple[Any, jax.Array]:
        """Returns the outputs for the online network's greedy actions, and the rewards."""
        return jax.vmap(greedy_target)(values(params, e.next_obs), next_outputs), e.reward


@option(of=QTarget)
class Greedy:
    """Targets use the largest value of the target network."""

    def next_outputs_and_reward(
        self, values: Values, params: Any, target_params: Any, e: NStep, next_outputs: jax.Array
    ) -> tuple[Any, jax.Array]:
        """Returns the outputs for the target network's greedy actions, and the rewards."""
        return jax.vmap(greedy_target)(values(target_params, e.next_obs), next_outputs), e.reward
