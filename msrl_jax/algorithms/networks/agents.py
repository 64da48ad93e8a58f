"""Policies and critics of several agents, feed-forward or recurrent; a critic may see the global state.

In the shape descriptions, `S` denotes the length of what a centralized critic sees.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from msrl_jax.algorithms.configs.network import NetworkConfig, RecurrentConfig
from msrl_jax.algorithms.networks.actor_critic import Torso, actor_critic, make_torso
from msrl_jax.algorithms.networks.distributions import Categorical, Distribution, Normal
from msrl_jax.algorithms.networks.layers import dense
from msrl_jax.algorithms.networks.policies import Network
from msrl_jax.algorithms.networks.recurrent import RecurrentNetwork, recurrent_actor_critic, recurrent_network
from msrl_jax.envs import Box, Discrete, Space
from msrl_jax.envs.masks import only_legal

Core = Literal["none", "gru", "lstm", "min_gru"]
"""The kind of recurrent layer; "none" makes a feed-forward network."""


def independent_network(
    observation_space: Space, action_space: Space, config: NetworkConfig, *, core: Core, memory_size: int, shared_torso: bool
) -> RecurrentNetwork:
    """Makes a policy and a critic that both see observations: the networks of PPO and of recurrent PPO.

    Args:
      observation_space: a `Box`.
      action_space: `Discrete`, or a `Box` of floats.
      config: the layers.
      core: the kind of recurrent layer.
      memory_size: its size.
      shared_torso: whether policy and critic share a torso; recurrent ones always do.

    Returns:
      The network; its outputs are distributions over actions, as in `actor_critic`, and values `[...]`.

    Raises:
      TypeError: if a space is of another kind.
      ValueError: if the network convolves and the observations are not images of at least 3x3.
    """
    if core != "none":
        return recurrent_actor_critic(observation_space, action_space, _recurrent(config, core, memory_size))
    network = actor_critic(observation_space, action_space, config, shared_torso=shared_torso)
    return _feed_forward(observation_space, network.init, network.apply)


def centralized_network(
    observation_space: Space, action_space: Space, state_size: int, config: NetworkConfig, *, core: Core, memory_size: int
) -> RecurrentNetwork:
    """Makes a policy that sees observations, and a critic that sees global states.

    Args:
      observation_space: a `Box`.
      action_space: `Discrete`, or a `Box` of floats.
      state_size: length of what the critic sees, `S`.
      config: the layers of both.
      core: the kind of recurrent layer of both.
      memory_size: its size.

    Returns:
      The network. It takes pairs of observations and states `[..., S]`; its outputs are distributions over actions, as in
      `actor_critic`, and values `[...]`.

    Raises:
      TypeError: if a space is of another kind.
      ValueError: if the network convolves and the observations are not images of at least 3x3.
    """
    if not isinstance(action_space, Discrete) and not (
        isinstance(action_space, Box) and jnp.issubdtype(action_space.dtype, jnp.floating)
    ):
        raise TypeError(
            f"no policy for actions in {action_space}; wrap the environment to take a Discrete space or a Box of floats"
        )
    states = Box(-np.inf, np.inf, (state_size,))
    actor = _network(observation_space, lambda torso: _Policy(torso, action_space), config, core, memory_size)
    critic = _network(states, _Value, config, core, memory_size)

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
        num_outputs = self.action_space.n if isinstance(self.action_space, Discrete) else math.prod(self.action_space.shape)
        outputs = dense(num_outputs, 0.01)(self.torso(obs))
        if isinstance(self.action_space, Discrete):
            return Categorical(only_legal(outputs, obs))
        log_scale = self.param("log_scale", nn.initializers.zeros, (num_outputs,))
        return Normal(outputs, jnp.broadcast_to(log_scale, outputs.shape))


class _Value(nn.Module):
    """A value function alone: a torso and a linear layer."""

    torso: Torso

    @nn.compact
    def __call__(self, state: jax.Array) -> jax.Array:
        """Maps states to values `[...]`."""
        return dense(1, 1.0)(self.torso(state))[..., 0]


def _network(
    space: Space, make: Callable[[Torso], nn.Module], config: NetworkConfig, core: Core, memory_size: int
) -> RecurrentNetwork:
    """A module on a torso, or linear in the outputs of a recurrent core."""
    if core == "none":
        module = make(
            make_torso(space, hidden_sizes=config.hidden_sizes, activation=config.activation, network=config.network)
        )
        return _feed_forward(space, module.init, module.apply)

    def heads(features: Box) -> Network:
        module = make(Torso(features.shape, (), "tanh", convolve=False))
        return Network(module.init, module.apply)  # type: ignore[arg-type]

    return recurrent_network(space, heads, _recurrent(config, core, memory_size))


def _recurrent(config: NetworkConfig, core: Any, memory_size: int) -> RecurrentConfig:
    return RecurrentConfig(
        hidden_sizes=config.hidden_sizes,
        activation=config.activation,
        network=config.network,
        core=core,
        memory_size=memory_size,
    )


def _feed_forward(space: Any, init: Callable[..., Any], apply: Callable[..., Any]) -> RecurrentNetwork:
    """Gives a network the interface of a recurrent one, with an empty carry."""
    return RecurrentNetwork(
        init=lambda key: init(key, jnp.zeros((1, *space.shape), space.dtype)),
        initial_carry=lambda batch_shape: (),
        step=lambda params, obs, carry: (apply(params, obs), carry),
        unroll=lambda params, obs, is_first, carry: (apply(params, obs), carry),
    )
