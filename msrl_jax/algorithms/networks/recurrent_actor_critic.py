"""The actor-critic with a memory, for a space of actions."""

from typing import Any

import jax

from msrl_jax.algorithms.networks.actor_critic import actor_critic
from msrl_jax.algorithms.networks.distributions import choose
from msrl_jax.algorithms.networks.layers import Carry
from msrl_jax.algorithms.networks.recurrent import RecurrentNetwork, recurrent_network
from msrl_jax.envs import Space, VectorEnvironment
from msrl_jax.envs.actions import action_transform
from msrl_jax.envs.privileged import are_privileged


def recurrent_actor_critic(config: Any, venv: VectorEnvironment) -> RecurrentNetwork:
    """Makes the network of a config with a core: policy and value share all but their heads, unless critics see more."""
    shared = getattr(config, "shared_torso", False) or not are_privileged(venv.observation_space)
    heads = lambda torso: actor_critic(torso, venv.action_space, shared_torso=shared)  # noqa: E731
    return recurrent_network(venv.observation_space, heads, config)


def outside_recurrent_training(network: RecurrentNetwork, space: Space) -> dict[str, Any]:
    """`act` and `initial_carry` of an `Agent` whose state has the parameters."""
    to_env_action = action_transform(space)

    def act(state: Any, obs: jax.Array, key: jax.Array | None, carry: Carry) -> tuple[jax.Array, Carry]:
        (policy, _), carry = network.step(state.params, obs, carry)
        return to_env_action(choose(policy, key)), carry

    return {"act": act, "initial_carry": lambda num_envs: network.initial_carry((num_envs,))}
