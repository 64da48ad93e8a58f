"""Policies and critics of off-policy and offline actor-critics for discrete actions, or for integers.

SAC computes expectations over all actions instead of sampling one (Christodoulou, 2019, arXiv 1910.07207). In the shape
descriptions, `B` denotes the batch size, `C` the number of critics and `N` the number of discrete actions.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.envs import Box, Discrete, Space
from msrl_jax.envs.masks import mask_of
from msrl_jax.networks.continuous_policies import HEADS, ActionHeads
from msrl_jax.networks.distributions import Categorical
from msrl_jax.networks.heads import init_critics, linear_head, make_actor
from msrl_jax.networks.network import Network
from msrl_jax.networks.policy_heads import discrete_policy, num_outputs
from msrl_jax.networks.torso import NetworkFields, SpaceOrTorsos, Torso, make_torsos


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AllActions(Categorical):
    """A categorical policy whose expectations are sums over all actions, where SAC samples one continuous action."""

    legal: jax.Array | None = None  # mask of legal actions, [..., N]; all if None

    def sample_and_log_prob(self, key: jax.Array) -> tuple[None, jax.Array]:
        """Returns None, which stands for all actions, and their log-probabilities `[..., N]`, 0 for illegal ones."""
        log_probs = jax.nn.log_softmax(self.logits)
        if self.legal is not None:
            log_probs = jnp.where(self.legal, log_probs, 0.0)  # an action of probability 0 adds nothing
        return None, log_probs

    def expectation(self, x: jax.Array) -> jax.Array:
        """Computes the mean over actions of `x` `[..., N]`. `[...]`."""
        return jnp.sum(jnp.exp(jax.nn.log_softmax(self.logits)) * x, axis=-1)

    def usual_target_entropy(self) -> float | jax.Array:
        """Returns the target of SAC's entropy: half the logarithm of the number of legal actions. `[...]` or `[]`."""
        if self.legal is None:
            return 0.5 * math.log(self.logits.shape[-1])
        return 0.5 * jnp.log(jnp.maximum(self.legal.sum(-1), 1))


def categorical_policy(space_or_torsos: SpaceOrTorsos, action_space: Discrete | Box, config: NetworkFields) -> Network:
    """Makes a stochastic policy: `(params, obs) -> AllActions`, or for a `Box` of integers `-> Categorical`."""
    network = make_actor(space_or_torsos, num_outputs(action_space), config)

    def apply(params: Any, obs: Any) -> Categorical:
        policy = discrete_policy(action_space, network.apply(params, obs), obs)
        return policy if policy.several else AllActions(policy.logits, legal=mask_of(obs))

    return Network(network.init, apply)


def all_action_critics(
    space_or_torsos: SpaceOrTorsos,
    action_space: Discrete,
    num_critics: int,
    config: Any,
    num_outputs: int = 1,
    torso: Callable[[Torso, Space], Torso] = lambda torso, action_space: torso,
) -> Network:
    """Makes critics `(params, obs, action [B]) -> [C, B]`, or without actions the values of all, `-> [C, B, N]`."""
    if num_outputs > 1:
        raise ValueError(
            f"{type(config).__name__}.returns={config.returns} predicts returns of continuous actions, but the space is "
            f"{action_space}; use returns='expected', or dqn"
        )
    critic = linear_head(torso(make_torsos(space_or_torsos, config).of("critic").clone(), action_space), action_space.n, 1.0)

    def apply(params: Any, obs: Any, action: jax.Array | None = None) -> jax.Array:
        values = jax.vmap(lambda p: critic.apply(p, obs))(params)
        return values if action is None else jnp.take_along_axis(values, action[None, :, None], axis=-1)[..., 0]

    return Network(lambda key, obs: init_critics(critic, num_critics, key, obs), apply)


HEADS["discrete"] = ActionHeads(categorical_policy, all_action_critics)
