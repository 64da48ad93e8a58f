"""Actor-critics with a memory or without one: the parts of their unrolls, and what the learner computes from an unroll.

Without a memory (`core="none"`) what is remembered is `()`, and nothing of it is in the program. In the shape descriptions, `T`
denotes the length of an unroll and `E` the number of environments.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax.algorithms.loops.trajectory import Trajectory, actor, stepping, truncated_values
from msrl_jax.algorithms.networks.actor_critic import ActorCritic, actor_critic, outside_training
from msrl_jax.algorithms.networks.layers import Carry, flatten, forget, make_torsos, unflatten
from msrl_jax.algorithms.networks.recurrent import RecurrentNetwork
from msrl_jax.algorithms.networks.recurrent_actor_critic import outside_recurrent_training, recurrent_actor_critic
from msrl_jax.envs import VectorEnvironment
from msrl_jax.envs.masks import unmasked
from msrl_jax.envs.privileged import actor_part, are_privileged, with_privileged_of
from msrl_jax.fragments import fragment


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


def unrolling(
    network: ActorCritic | RecurrentNetwork, venv: VectorEnvironment, unroll_length: int
) -> tuple[Callable[..., Any], ...]:
    """Makes the fragments of `actor` for a network of `make_network`.

    `act` is `(params, obs, memory, keys) -> (action, log_prob, carry)`, and `bootstrap` is `(params, final_obs, carries,
    truncated) -> values [T, E]`, right where an episode was truncated.
    """
    if isinstance(network, ActorCritic):
        draw_keys, choose, env_step, values, pop_episodes = actor(network, venv, unroll_length)
        act_on = lambda params, obs, memory, keys: (*choose(params, obs, keys), ())  # noqa: E731
        return draw_keys, act_on, env_step, lambda params, final_obs, *_: values(params, final_obs), pop_episodes
    draw_keys, env_step, pop_episodes = stepping(venv, unroll_length)

    @fragment(role="actor")
    def act(params, obs, memory, keys):
        (policy, _), carry = network.step(params, obs, forget(*memory))
        action = policy.sample(keys)
        return action, policy.log_prob(action), carry

    # The actors have the carries. If a value depends on what they do not see too, they compute the features for it.
    @fragment(role="actor")
    def bootstrap(params, final_obs, carries, truncated):
        value = lambda params, final: network.step(params, *final)[0][1]  # noqa: E731
        return truncated_values(value, params, (final_obs, carries), truncated, and_last=True)

    @fragment(role="learner")
    def value_privileged(params, final):
        return unflatten(network.value(params, flatten(final)), unroll_length)

    def act_on(params, obs, memory, keys):
        return act(params, actor_part(obs), memory, keys)

    def bootstrap_from(params, final_obs, carries, truncated):
        found = bootstrap(params, actor_part(final_obs), carries, truncated)
        if not are_privileged(venv.observation_space):
            return found
        return value_privileged(params, with_privileged_of(unmasked(final_obs), found))

    return draw_keys, act_on, env_step, bootstrap_from, pop_episodes


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
