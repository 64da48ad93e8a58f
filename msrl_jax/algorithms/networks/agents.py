"""Policies and critics of several agents, feed-forward or recurrent; a critic may see the global state.

A config has the layers of `make_torso`, the kind `core` of a recurrent layer ("none" for feed-forward networks), and its
`memory_size`. Networks that convolve raise ValueError if observations are not images of at least 3x3. In the shape
descriptions, `S` denotes the length of what a centralized critic sees.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from msrl_jax.algorithms.networks.actor_critic import actor_critic, linear_actor_critic
from msrl_jax.algorithms.networks.distributions import Distribution, check_policy_space, has_scale, num_outputs, policy_of
from msrl_jax.algorithms.networks.layers import Torso, dense, make_torso
from msrl_jax.algorithms.networks.recurrent import RecurrentNetwork, feed_forward, recurrent_network
from msrl_jax.envs import Box, Discrete, Space


def independent_network(observation_space: Space, action_space: Space, config: Any) -> RecurrentNetwork:
    """Makes a policy and a critic that both see observations: the networks of PPO and of recurrent PPO.

    Its outputs are distributions over actions, as in `actor_critic`, and values `[...]`. Policy and critic share a torso if the
    config has `shared_torso`; recurrent ones always do. Raises TypeError if there is no policy for the space of actions.
    """
    if config.core != "none":
        return recurrent_network(observation_space, lambda features: linear_actor_critic(features, action_space), config)
    return feed_forward(
        observation_space, actor_critic(observation_space, action_space, config, shared_torso=config.shared_torso)
    )


def centralized_network(observation_space: Space, action_space: Space, state_size: int, config: Any) -> RecurrentNetwork:
    """Makes a policy that sees observations, and a critic that sees global states.

    The network takes pairs of observations and states `[..., S]`; its outputs are those of `independent_network`. Raises
    TypeError if there is no policy for the space of actions.
    """
    space, states = check_policy_space(action_space), Box(-np.inf, np.inf, (state_size,))
    actor = _network(observation_space, lambda torso: _Policy(torso, space), config)
    critic = _network(states, _Value, config)

    def init(key: jax.Array) -> dict[str, Any]:
        actor_key, critic_key = jax.random.split(key)
        return {"actor": actor.init(actor_key), "critic": critic.init(critic_key)}

    def step(params: Any, inputs: Any, carry: Any) -> tuple[Any, Any]:
        obs, state = inputs
        policy, actor_carry = actor.step(params["actor"], obs, carry[0])
        value, critic_carry = critic.step(params["critic"], state, carry[1])
        return (policy, value), (actor_carry, critic_carry)

    def unroll(params: Any, inputs: Any, is_first: jax.Array, carry: Any) -> tuple[Any, Any]:
        obs, state = inputs
        policy, actor_carry = actor.unroll(params["actor"], obs, is_first, carry[0])
        value, critic_carry = critic.unroll(params["critic"], state, is_first, carry[1])
        return (policy, value), (actor_carry, critic_carry)

    def initial_carry(batch_shape: tuple[int, ...]) -> Any:
        return actor.initial_carry(batch_shape), critic.initial_carry(batch_shape)

    return RecurrentNetwork(init, initial_carry, step, unroll)


class _Policy(nn.Module):
    """A policy alone: a torso and a linear layer."""

    torso: Torso
    action_space: Discrete | Box

    @nn.compact
    def __call__(self, obs: jax.Array) -> Distribution:
        """Maps observations to distributions over actions."""
        size = num_outputs(self.action_space)
        outputs = dense(size, 0.01)(self.torso(obs))
        log_scale = self.param("log_scale", nn.initializers.zeros, (size,)) if has_scale(self.action_space) else None
        return policy_of(self.action_space, outputs, obs, log_scale)


class _Value(nn.Module):
    """A value function alone: a torso and a linear layer."""

    torso: Torso

    @nn.compact
    def __call__(self, state: jax.Array) -> jax.Array:
        """Maps states to values `[...]`."""
        return dense(1, 1.0)(self.torso(state))[..., 0]


def _network(space: Space, make: Callable[[Torso], nn.Module], config: Any) -> RecurrentNetwork:
    """A module on a torso, or linear in the outputs of a recurrent core."""
    if config.core == "none":
        return feed_forward(space, make(make_torso(space, config)))
    return recurrent_network(space, lambda features: make(Torso(features, (), "tanh", convolve=False)), config)
