"""Actor-critics with a memory or without one: the parts of their unrolls, and what the learner computes from an unroll.

Without a memory (`core="none"`) what is remembered is `()`, and nothing of it is in the program. In the shape descriptions, `T`
denotes the length of an unroll and `E` the number of environments.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax.algorithms.kernels import truncated_values
from msrl_jax.algorithms.loops.trajectory import Trajectory
from msrl_jax.algorithms.networks.actor_critic import ActorCritic, actor_critic, outside_training
from msrl_jax.algorithms.networks.distributions import Distribution
from msrl_jax.algorithms.networks.layers import Carry, flatten, forget, make_torsos, unflatten
from msrl_jax.algorithms.networks.recurrent import RecurrentNetwork
from msrl_jax.algorithms.networks.recurrent_actor_critic import outside_recurrent_training, recurrent_actor_critic
from msrl_jax.envs import VectorEnvironment
from msrl_jax.envs.masks import unmasked
from msrl_jax.envs.privileged import PrivilegedObservation, with_privileged_of


class Memory(NamedTuple):
    """What actors remember when they see an observation."""

    is_first: jax.Array  # whether it is the first of an episode, which clears the carry, bool [E]
    carry: Carry  # the recurrent state after the step before, [E, ...] each


def make_network(config: Any, venv: VectorEnvironment) -> ActorCritic | RecurrentNetwork:
    """Makes the network of a config: with a core, policy and value share it and the torso before it."""
    if config.core != "none":
        return recurrent_actor_critic(config, venv)
    torsos = make_torsos(venv.observation_space, config)
    return actor_critic(torsos, venv.action_space, shared_torso=config.shared_torso)


def starting(network: ActorCritic | RecurrentNetwork, key: jax.Array, obs: Any) -> tuple[Any, Memory | tuple[()]]:
    """New parameters, and what is remembered before the first observations `[E, ...]`."""
    if isinstance(network, ActorCritic):
        return network.init(key, obs), ()
    num_envs = len(jax.tree.leaves(obs)[0])
    return network.init(key), Memory(jnp.ones(num_envs, bool), network.initial_carry((num_envs,)))


def remember(memory: Memory | tuple[()], t: Any, carry: Carry) -> Memory | tuple[()]:
    """What is remembered after a step `t` of the environments, from the carry after it."""
    return Memory(t.terminated | t.truncated, carry) if memory else ()


def acting_policy(
    network: ActorCritic | RecurrentNetwork, params: Any, obs: Any, memory: Memory | tuple[()]
) -> tuple[Distribution, Carry]:
    """The policy in observations `[E, ...]`, of which it sees the actor's part, and the carry after them."""
    if isinstance(network, ActorCritic):
        return network.policy(params, obs), ()
    assert memory
    (policy, _), carry = network.step(params, obs, forget(*memory))
    return policy, carry


def final_values(
    network: ActorCritic | RecurrentNetwork, params: Any, final_obs: Any, carries: Carry, truncated: jax.Array
) -> Any:
    """What actors compute of the values of the last observations of episodes, for `completed_values`.

    These are the values `[T, E]`, right where an episode was truncated and at the end. If critics see what actors do not, the
    features of a recurrent network in their place, and nothing of another one.

    Args:
      network: that of `make_network`.
      params: its parameters.
      final_obs: the actor's part of the observations before a reset. `[T, E, ...]`
      carries: the carries after the steps to them. `[T, E, ...]`
      truncated: whether an episode was truncated. `[T, E]` bool
    """
    if isinstance(network, RecurrentNetwork):
        value = lambda params, final: network.step(params, *final)[0][1]  # noqa: E731
        return truncated_values(value, params, (final_obs, carries), truncated, and_last=True)
    return () if network.is_privileged else unflatten(network.value(params, flatten(final_obs)), len(truncated))


def completed_values(
    network: ActorCritic | RecurrentNetwork, params: Any, final_obs: Any, found: jax.Array | tuple[()]
) -> jax.Array:
    """The values `[T, E]` of the last observations of episodes, from what actors `found`: see `final_values`."""
    if isinstance(found, tuple):
        return unflatten(network.value(params, flatten(final_obs)), len(jax.tree.leaves(final_obs)[0]))
    if isinstance(network, ActorCritic) or not isinstance(unmasked(final_obs), PrivilegedObservation):
        return found
    return unflatten(network.value(params, flatten(with_privileged_of(unmasked(final_obs), found))), len(found))


def evaluate(
    network: ActorCritic | RecurrentNetwork, params: Any, t: Trajectory, memory: Memory | tuple[()]
) -> tuple[jax.Array, jax.Array, jax.Array, Carry]:
    """Log-probabilities of the actions, entropies of the policy and values now, `[T, E]` each, and the carry in the end.

    `memory` is what was remembered before the unroll; gradients flow back to its first step.
    """
    if isinstance(network, ActorCritic):
        policy, value = network.apply(params, flatten(t.obs))
        parts = policy.log_prob(flatten(t.action)), policy.entropy(), value
        return *(unflatten(x, len(t.action)) for x in parts), ()  # type: ignore[return-value]
    assert memory
    is_first = jnp.concatenate([memory.is_first[None], (t.terminated | t.truncated)[:-1]])
    (policy, value), carries = network.unroll(params, t.obs, is_first, memory.carry)
    return policy.log_prob(t.action), policy.entropy(), value, tuple(x[-1] for x in carries)


def last_values(network: ActorCritic | RecurrentNetwork, params: Any, last_obs: Any, carry: Carry) -> jax.Array:
    """The values `[E]` of the observations after an unroll; nobody needs them where an episode ended with it."""
    if isinstance(network, ActorCritic):
        return network.value(params, last_obs)
    return network.step(params, last_obs, carry)[0][1]


def outside(network: ActorCritic | RecurrentNetwork, venv: VectorEnvironment) -> dict[str, Any]:
    """What an `Agent` does outside of training: `act` and what belongs to it."""
    if isinstance(network, ActorCritic):
        return outside_training(network, venv.action_space)
    return outside_recurrent_training(network, venv.action_space)
