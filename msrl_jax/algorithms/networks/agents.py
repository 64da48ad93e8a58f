"""Policies and critics of several agents, feed-forward or recurrent; a critic may see the global state.

In the shape descriptions, `S` denotes the length of what a centralized critic sees.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from msrl_jax.algorithms.networks.actions import check_policy_space, has_scale, num_outputs, policy_of
from msrl_jax.algorithms.networks.actor_critic import Layers, Torso, actor_critic, make_torso
from msrl_jax.algorithms.networks.distributions import Distribution
from msrl_jax.algorithms.networks.layers import dense
from msrl_jax.algorithms.networks.policies import Network
from msrl_jax.algorithms.networks.q_network import q_network
from msrl_jax.algorithms.networks.recurrent import (
    RecurrentNetwork,
    recurrent_actor_critic,
    recurrent_network,
    recurrent_q_network,
)
from msrl_jax.envs import Box, Discrete, Space
from msrl_jax.envs.masks import unmasked, with_mask_of
from msrl_jax.envs.spaces import flat_space, flatten, zeros

Core = Literal["none", "gru", "lstm", "min_gru"]
"""The kind of recurrent layer; "none" makes a feed-forward network."""


def independent_network(
    observation_space: Space, action_space: Space, config: Layers, *, core: Core, memory_size: int, shared_torso: bool
) -> RecurrentNetwork:
    """Makes a policy and a critic that both see observations: the networks of PPO and of recurrent PPO.

    Args:
      observation_space: any space.
      action_space: `Discrete`, or a `Box` of floats or of integers.
      config: the layers.
      core: the kind of recurrent layer.
      memory_size: its size.
      shared_torso: whether policy and critic share a torso; recurrent ones always do.

    Returns:
      The network; its outputs are distributions over actions, as in `actor_critic`, and values `[...]`.

    Raises:
      TypeError: if the space of actions is of another kind.
      ValueError: if the network convolves and the observations are not images of at least 3x3.
    """
    if core != "none":
        return recurrent_actor_critic(observation_space, action_space, config, core=core, memory_size=memory_size)
    network = actor_critic(observation_space, action_space, config, shared_torso=shared_torso)
    return _feed_forward(observation_space, network.init, network.apply)


def centralized_network(
    observation_space: Space, action_space: Space, state_size: int, config: Layers, *, core: Core, memory_size: int
) -> RecurrentNetwork:
    """Makes a policy that sees observations, and a critic that sees global states.

    Args:
      observation_space: any space.
      action_space: `Discrete`, or a `Box` of floats or of integers.
      state_size: length of what the critic sees, `S`.
      config: the layers of both.
      core: the kind of recurrent layer of both.
      memory_size: its size.

    Returns:
      The network. It takes pairs of observations and states `[..., S]`; its outputs are distributions over actions, as in
      `actor_critic`, and values `[...]`.

    Raises:
      TypeError: if the space of actions is of another kind.
      ValueError: if the network convolves and the observations are not images of at least 3x3.
    """
    space, states = check_policy_space(action_space), Box(-np.inf, np.inf, (state_size,))
    actor = _network(observation_space, lambda torso: _Policy(torso, space), config, core, memory_size)
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


def _network(
    space: Space, make: Callable[[Torso], nn.Module], config: Layers, core: Core, memory_size: int
) -> RecurrentNetwork:
    """A module on a torso, or linear in the outputs of a recurrent core."""
    if core == "none":
        module = make(
            make_torso(space, config)
        )
        return _feed_forward(space, module.init, module.apply)

    def heads(features: Box) -> Network:
        module = make(Torso(features, (), "tanh", convolve=False))
        return Network(module.init, module.apply)  # type: ignore[arg-type]

    return recurrent_network(space, heads, config, core=core, memory_size=memory_size)


def _feed_forward(space: Any, init: Callable[..., Any], apply: Callable[..., Any]) -> RecurrentNetwork:
    """Gives a network the interface of a recurrent one, with an empty carry."""
    return RecurrentNetwork(
        init=lambda key: init(key, zeros(space)),
        initial_carry=lambda batch_shape: (),
        step=lambda params, obs, carry: (apply(params, obs), carry),
        unroll=lambda params, obs, is_first, carry: (apply(params, obs), carry),
    )


def agent_values(
    observation_space: Space,
    action_space: Discrete,
    num_agents: int,
    config: Layers,
    *,
    core: Core,
    memory_size: int,
    dueling: bool,
    shared: bool,
    agent_ids: bool,
) -> RecurrentNetwork:
    """Makes the action values of every agent of a team, from joint observations.

    Args:
      observation_space: the space of one agent's observations, a `Box`.
      action_space: the space of one agent's `N` actions.
      num_agents: number of agents, `A`.
      config: the layers.
      core: the kind of recurrent layer.
      memory_size: its size.
      dueling: whether there are separate streams for values and for advantages.
      shared: whether all agents have one network, or each its own.
      agent_ids: whether a shared network also sees which agent it acts for.

    Returns:
      The network: it takes `JointObservation`s; its outputs are values `[..., A, N]`, and its carry is `[..., A, H]`.

    Raises:
      ValueError: if the network convolves and the observations are not images of at least 3x3.
    """
    identify = shared and agent_ids and num_agents > 1
    space = with_ids_space(observation_space, num_agents) if identify else observation_space
    if core == "none":
        values = q_network(space, action_space, config, dueling=dueling)
        one = _feed_forward(space, values.init, lambda params, obs: values.apply(params, obs)[..., 0])
    else:
        one = recurrent_q_network(space, action_space, config, core=core, memory_size=memory_size, dueling=dueling)

    def init(key: jax.Array) -> Any:
        # One after another: a batched QR decomposition of orthogonal initializers is slow.
        return one.init(key) if shared else jax.lax.map(one.init, jax.random.split(key, num_agents))

    def seen(joint: Any) -> Any:
        return with_ids(joint.obs, num_agents, observation_space) if identify else joint.obs

    def step(params: Any, joint: Any, carry: Any) -> tuple[jax.Array, Any]:
        obs = seen(joint)
        if shared:
            return one.step(params, obs, carry)
        axis = joint.present.ndim - 1
        return jax.vmap(one.step, in_axes=(0, axis, axis), out_axes=axis)(params, obs, carry)

    def unroll(params: Any, joint: Any, is_first: jax.Array, carry: Any) -> tuple[jax.Array, Any]:
        obs = seen(joint)
        if not shared:
            return jax.vmap(one.unroll, in_axes=(0, 2, None, 1), out_axes=2)(params, obs, is_first, carry)
        # The agents of an environment are rows of the one network.
        length, batch = is_first.shape
        rows = jax.tree.map(lambda x: x.reshape(length, -1, *x.shape[3:]), obs)
        carry = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), carry)
        outputs = one.unroll(params, rows, jnp.repeat(is_first, num_agents, axis=1), carry)
        return jax.tree.map(lambda x: x.reshape(length, batch, num_agents, *x.shape[2:]), outputs)

    return RecurrentNetwork(init, lambda batch_shape: one.initial_carry((*batch_shape, num_agents)), step, unroll)


def with_ids(obs: Any, num_agents: int, space: Space | None = None) -> Any:
    """Appends the number of the agent, one-hot, to observations `[..., A, *shape]`, flattened; a mask stays as it is.

    Args:
      obs: observations of a space, or vectors if none is given.
      num_agents: number of agents, `A`.
      space: the space of one agent's observations.

    Returns:
      Vectors. `[..., A, D + A]` float32
    """
    plain = unmasked(obs)
    vectors = plain if space is None else flatten(space, plain)
    ids = jnp.broadcast_to(jnp.eye(num_agents), (*vectors.shape[:-1], num_agents))
    return with_mask_of(obs, jnp.concatenate([vectors, ids], axis=-1))


def with_ids_space(space: Space, num_agents: int) -> Box:
    """The space of the results of `with_ids`; raises TypeError if observations are arrays of several dimensions."""
    if isinstance(space, Box) and len(space.shape) > 1:
        raise TypeError(
            f"agent_ids=True appends the number of the agent to vectors, but observations are in {space}; flatten them, or use "
            "agent_ids=False"
        )
    return Box(-np.inf, np.inf, (flat_space(space).shape[0] + num_agents,))
