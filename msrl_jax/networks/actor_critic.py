"""Actor-critics with or without a recurrent core, behind one interface.

In the shape descriptions, `T` denotes the length of an unroll, `E` the number of environments and `N` any number of them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from msrl_jax.envs import Space
from msrl_jax.envs.actions import action_transform
from msrl_jax.envs.masks import unmasked
from msrl_jax.envs.privileged import are_privileged, with_privileged_of
from msrl_jax.envs.spaces import is_continuous, zeros
from msrl_jax.kernels.time import truncated_values
from msrl_jax.networks.core import core_of
from msrl_jax.networks.distributions import Distribution, choose
from msrl_jax.networks.policy_and_value import policy_and_value
from msrl_jax.networks.policy_heads import check_policy_space
from msrl_jax.networks.torso import make_torsos
from msrl_jax.networks.unrolls import Carry, flatten, unflatten


class ActorCritic(NamedTuple):
    """A policy and a value function as pure functions of their parameters.

    With a recurrent core, values depend on carries, which stay with the actors. Actors therefore record a value input for the
    learner: the value, or the features before it if critics have privileged inputs. Without a core, carries and value inputs
    are `()`, and the learner computes values from observations.
    """

    init: Callable[[jax.Array], Any]  # (key) -> params
    initial_carry: Callable[[tuple[int, ...]], Any]  # (batch_shape) -> zeros
    # (params, obs [N, ...], carry) -> (policy, value input, carry); obs may omit the privileged state
    act: Callable[[Any, Any, Carry], tuple[Distribution, Any, Carry]]
    # (params, obs [N, ...], carry) -> value input, the value even without a core; None if values depend on a privileged state
    value_input: Callable[[Any, Any, Carry], Any] | None
    # (params, obs [N, ...], value input) -> value [N]; computed from the observations if the value input is `()`
    value: Callable[[Any, Any, Any], jax.Array]
    # (params, obs [T, E, ...], is_first [T, E] bool, carry [E, ...]) -> (policy, value [T, E], carries after every step);
    # clears the carry before the first step of every episode
    unroll: Callable[[Any, Any, jax.Array, Carry], tuple[Distribution, jax.Array, Carry]]


def actor_critic(config: Any, observation_space: Space, action_space: Space) -> ActorCritic:
    """Makes the actor-critic of a config. With a core, policy and value share all but the heads, unless critics see more."""
    if config.core is None:
        return _feed_forward(config, observation_space, action_space)
    shared = config.shared_torso or not are_privileged(observation_space)
    heads = lambda torso: policy_and_value(torso, action_space, shared_torso=shared)
    network = core_of(config).network(observation_space, heads, config)

    def act(params: Any, obs: Any, carry: Carry) -> tuple[Distribution, Any, Carry]:
        (policy, value_input), carry = network.step(params, obs, carry)
        return policy, value_input, carry

    def unroll(params: Any, obs: Any, is_first: jax.Array, carry: Carry) -> tuple[Distribution, jax.Array, Carry]:
        (policy, value), carries = network.unroll(params, obs, is_first, carry)
        return policy, value, carries

    return ActorCritic(
        init=network.init,
        initial_carry=network.initial_carry,
        act=act,
        value_input=lambda params, obs, carry: act(params, obs, carry)[1],
        value=lambda params, obs, value_input: network.value(params, with_privileged_of(unmasked(obs), value_input)),
        unroll=unroll,
    )


def _feed_forward(config: Any, observation_space: Space, action_space: Space) -> ActorCritic:
    network = policy_and_value(make_torsos(observation_space, config), action_space, shared_torso=config.shared_torso)

    def unroll(params: Any, obs: Any, is_first: jax.Array, carry: Carry) -> tuple[Distribution, jax.Array, Carry]:
        policy, value = jax.tree.map(lambda x: unflatten(x, len(is_first)), network.apply(params, flatten(obs)))
        return policy, value, carry

    return ActorCritic(
        init=lambda key: network.init(key, zeros(observation_space)),
        initial_carry=lambda batch_shape: (),
        act=lambda params, obs, carry: (network.policy(params, obs), (), carry),
        value_input=None if are_privileged(observation_space) else lambda params, obs, carry: network.value(params, obs),
        value=lambda params, obs, value_input: network.value(params, obs) if isinstance(value_input, tuple) else value_input,
        unroll=unroll,
    )


def values(network: ActorCritic, params: Any, obs: Any, value_inputs: Any) -> jax.Array:
    """Returns the values `[T, E]` of observations `[T, E, ...]`, from the value inputs that actors recorded."""
    return unflatten(network.value(params, flatten(obs), flatten(value_inputs)), len(jax.tree.leaves(obs)[0]))


def final_value_inputs(network: ActorCritic, params: Any, final_obs: Any, carries: Carry, truncated: jax.Array) -> Any:
    """Returns the value inputs for the last observations of episodes: valid where truncated, and at the end of an unroll.

    Args:
      network: the actor-critic.
      params: its parameters.
      final_obs: the observations before a reset, without the privileged state. `[T, E, ...]`
      carries: the carries after the steps that lead to them. `[T, E, ...]`
      truncated: whether an episode was truncated. `[T, E]` bool

    Returns:
      The value inputs `[T, E, ...]`; `()` without them.
    """
    if (value_input := network.value_input) is None:
        return ()
    return truncated_values(
        lambda params, final: value_input(params, *final), params, (final_obs, carries), truncated, and_last=True
    )


class Acting(NamedTuple):
    """The functions of an `Agent` that acts outside of training."""

    act: Callable[..., tuple[jax.Array, Carry]]
    initial_carry: Callable[[int], Carry]
    probabilities: Callable[[Any, Any], jax.Array] | None


def acting_functions(network: ActorCritic, space: Space) -> Acting:
    """Makes the functions of an `Agent` whose state has the field `params`."""
    to_env_action = action_transform(space)

    def act(state: Any, obs: Any, key: jax.Array | None, carry: Carry) -> tuple[jax.Array, Carry]:
        policy, _, carry = network.act(state.params, obs, carry)
        return to_env_action(choose(policy, key)), carry

    def probabilities(state: Any, obs: Any) -> jax.Array:
        policy: Any = network.act(state.params, obs, ())[0]
        return policy.probabilities()

    is_categorical = not network.initial_carry(()) and not is_continuous(check_policy_space(space))
    return Acting(act, lambda num_envs: network.initial_carry((num_envs,)), probabilities if is_categorical else None)
