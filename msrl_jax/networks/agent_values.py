"""The action values of several agents, which share a network or have their own.

In the shape descriptions, `A` denotes the number of agents, `N` the number of actions and `H` the size of a carry.
"""

from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.envs import Discrete, Space
from msrl_jax.networks.agent_ids import with_ids, with_ids_space
from msrl_jax.networks.q_network import value_heads
from msrl_jax.networks.recurrent import RecurrentNetwork, recurrent_network


def agent_values(observation_space: Space, action_space: Discrete, num_agents: int, config: Any) -> RecurrentNetwork:
    """Makes a network from `JointObservation`s to the action values `[..., A, N]` of all agents; carries are `[..., A, H]`."""
    shared = config.share_parameters
    identify = shared and config.agent_ids and num_agents > 1
    space = with_ids_space(observation_space, num_agents) if identify else observation_space
    network = recurrent_network(space, lambda torso: value_heads(torso, action_space, config, dueling=config.dueling), config)

    def init(key: jax.Array) -> Any:
        # Sequentially, because a batched QR decomposition of orthogonal initializers is slow.
        return network.init(key) if shared else jax.lax.map(network.init, jax.random.split(key, num_agents))

    def inputs_of(joint: Any) -> Any:
        return with_ids(joint.obs, num_agents, observation_space) if identify else joint.obs

    def step(params: Any, joint: Any, carry: Any) -> tuple[jax.Array, Any]:
        obs = inputs_of(joint)
        if shared:
            return network.step(params, obs, carry)
        axis = joint.valid.ndim - 1
        return jax.vmap(network.step, in_axes=(0, axis, axis), out_axes=axis)(params, obs, carry)

    def unroll(params: Any, joint: Any, is_first: jax.Array, carry: Any) -> tuple[jax.Array, Any]:
        obs = inputs_of(joint)
        if not shared:
            return jax.vmap(network.unroll, in_axes=(0, 2, None, 1), out_axes=2)(params, obs, is_first, carry)
        # The agents of an environment are rows of the shared network.
        length, batch = is_first.shape
        rows = jax.tree.map(lambda x: x.reshape(length, -1, *x.shape[3:]), obs)
        carry = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), carry)
        outputs = network.unroll(params, rows, jnp.repeat(is_first, num_agents, axis=1), carry)
        return jax.tree.map(lambda x: x.reshape(length, batch, num_agents, *x.shape[2:]), outputs)

    return RecurrentNetwork(init, lambda batch_shape: network.initial_carry((*batch_shape, num_agents)), step, unroll)
