"""Actor-critics of several agents whose critic sees a global state, with `S` numbers, and the actor only its observation."""

from typing import Any

import jax
import numpy as np
from flax import linen as nn

from msrl_jax.envs import Box, Discrete, Space
from msrl_jax.envs.spaces import is_continuous
from msrl_jax.networks.actor_critic import ActorCritic
from msrl_jax.networks.core import RecurrentFields
from msrl_jax.networks.distributions import Distribution
from msrl_jax.networks.policy_heads import check_policy_space, num_outputs, policy_of
from msrl_jax.networks.recurrent import recurrent_network
from msrl_jax.networks.torso import Torso


def centralized_actor_critic(
    observation_space: Space, action_space: Space, state_size: int, config: RecurrentFields
) -> ActorCritic:
    """Makes an actor-critic of a config that takes pairs of observations `[..., *observation_shape]` and states `[..., S]`."""
    space, states = check_policy_space(action_space), Box(-np.inf, np.inf, (state_size,))
    actor = recurrent_network(observation_space, lambda torso: _Policy(torso.of("actor"), space), config)
    critic = recurrent_network(states, lambda torso: _Value(torso.of("critic")), config)

    def init(key: jax.Array) -> dict[str, Any]:
        actor_key, critic_key = jax.random.split(key)
        return {"actor": actor.init(actor_key), "critic": critic.init(critic_key)}

    def act(params: Any, inputs: Any, carry: Any) -> tuple[Any, Any, Any]:
        policy, actor_carry = actor.step(params["actor"], inputs[0], carry[0])
        value, critic_carry = critic.step(params["critic"], inputs[1], carry[1])
        return policy, value if config.core is not None else (), (actor_carry, critic_carry)

    def unroll(params: Any, inputs: Any, is_first: jax.Array, carry: Any) -> tuple[Any, Any, Any]:
        policy, actor_carry = actor.unroll(params["actor"], inputs[0], is_first, carry[0])
        value, critic_carry = critic.unroll(params["critic"], inputs[1], is_first, carry[1])
        return policy, value, (actor_carry, critic_carry)

    def value_input(params: Any, inputs: Any, carry: Any) -> jax.Array:
        return critic.step(params["critic"], inputs[1], carry[1])[0]

    def value(params: Any, inputs: Any, value_input: Any) -> jax.Array:
        return critic.step(params["critic"], inputs[1], ())[0] if isinstance(value_input, tuple) else value_input

    def initial_carry(batch_shape: tuple[int, ...]) -> Any:
        return actor.initial_carry(batch_shape), critic.initial_carry(batch_shape)

    return ActorCritic(init, initial_carry, act, value_input, value, unroll)


class _Policy(nn.Module):
    """A policy without a value function: a torso and a linear layer."""

    torso: Torso
    action_space: Discrete | Box

    @nn.compact
    def __call__(self, obs: jax.Array) -> Distribution:
        """Maps observations to distributions over actions."""
        size = num_outputs(self.action_space)
        outputs = self.torso.head(size, 0.01)(self.torso(obs))
        log_scale = self.param("log_scale", nn.initializers.zeros, (size,)) if is_continuous(self.action_space) else None
        return policy_of(self.action_space, outputs, obs, log_scale)


class _Value(nn.Module):
    """A value function without a policy: a torso and a linear layer."""

    torso: Torso

    @nn.compact
    def __call__(self, state: jax.Array) -> jax.Array:
        """Maps states to values `[...]`."""
        return self.torso.head(1, 1.0)(self.torso(state))[..., 0]
