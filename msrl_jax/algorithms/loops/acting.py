"""Acting: how the actor-critic algorithms unroll a policy in the vector environment, and what a learner gets to see."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax.algorithms.networks.actor_critic import ActorCritic, action_transform
from msrl_jax.envs import Space, VectorEnvironment
from msrl_jax.fragments import fragment
from msrl_jax.metrics import Mean


class Trajectory(NamedTuple):
    """What the learner needs to know of an unroll; every leaf is `[T, E, ...]`.

    Attributes:
      obs: observations acted on.
      action: the policy's actions, before they are fitted to the action space.
      log_prob: their log-probabilities under the policy that acted.
      reward: rewards.
      terminated: whether the episode ended in a terminal state.
      truncated: whether the episode was cut short.
    """

    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array


class Unroll(NamedTuple):
    """The outcome of acting for `T` steps.

    Attributes:
      actor_keys: one key per environment, for the next unroll. shape=(E,)
      env_state: state of the vector environment, its episode statistics drained.
      obs: the observations to act on next. shape=(E, ...)
      trajectory: what happened.
      final_value: values, for the policy that acted, of the true successor of every step. shape=(T, E)
      episodes: statistics of the episodes that ended.
    """

    actor_keys: jax.Array
    env_state: Any
    obs: jax.Array
    trajectory: Trajectory
    final_value: jax.Array
    episodes: Mapping[str, Mean]


def make_unroll(
    venv: VectorEnvironment, network: ActorCritic, unroll_length: int
) -> Callable[[Any, jax.Array, Any, jax.Array], Unroll]:
    """Makes the function that acts, of fragments with the roles "actor" and "env".

    Args:
      venv: the vector environment.
      network: the network that acts.
      unroll_length: how many steps, `T`.

    Returns:
      `(params, actor_keys [E], env_state, obs [E, ...]) -> Unroll`.
    """
    to_env_action = action_transform(venv.action_space)

    @fragment(role="actor")
    def draw_keys(keys):
        keys = jax.vmap(lambda key: jax.random.split(key, unroll_length + 1), out_axes=1)(keys)
        return keys[0], keys[1:]

    @fragment(role="actor")
    def act(params, obs, keys):
        policy = network.policy(params, obs)
        action = policy.sample(keys)
        return action, policy.log_prob(action)

    @fragment(role="env")
    def env_step(env_state, action):
        return venv.step(env_state, to_env_action(action))

    # The actors evaluate the observations that ended episodes: a number crosses to the learner, not an observation.
    @fragment(role="actor")
    def bootstrap(params, obs):
        return values(network, params, obs)

    drain = fragment(role="env", name="drain")(venv.pop_episodes)

    def unroll(params, actor_keys, env_state, obs):
        def step(carry, keys):
            env_state, obs = carry
            action, log_prob = act(params, obs, keys)
            env_state, t = env_step(env_state, action)
            seen = Trajectory(obs, action, log_prob, t.reward, t.terminated, t.truncated)
            return (env_state, t.obs), (seen, t.final_obs)

        actor_keys, keys = draw_keys(actor_keys)
        (env_state, obs), (trajectory, final_obs) = jax.lax.scan(step, (env_state, obs), keys)
        final_value = bootstrap(params, final_obs)
        env_state, episodes = drain(env_state)
        return Unroll(actor_keys, env_state, obs, trajectory, final_value, episodes)

    return unroll


@fragment(role="actor")
def stamp(iteration: jax.Array) -> jax.Array:
    """Reads the learner's counter where the actors do: a policy with staleness delays it as it delays the parameters."""
    return iteration


def make_choose_action(
    network: ActorCritic, action_space: Space
) -> Callable[[Any, jax.Array, jax.Array | None], jax.Array]:
    """Makes the function that acts outside of training, an `Agent`'s `act`.

    Args:
      network: the network.
      action_space: space of one action.

    Returns:
      `(state, obs [E, ...], key) -> action [E, ...]`; the most probable actions if `key` is None.
    """
    to_env_action = action_transform(action_space)

    def choose_action(state: Any, obs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        policy = network.policy(state.params, obs)
        return to_env_action(policy.mode() if key is None else policy.sample(jax.random.split(key, obs.shape[0])))

    return choose_action


def values(network: ActorCritic, params: Any, obs: jax.Array) -> jax.Array:
    """The values `[T, E]` of observations `[T, E, ...]`."""
    return unflatten(network.value(params, flatten(obs)), obs.shape[0])


def evaluate(network: ActorCritic, params: Any, trajectory: Trajectory) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What a network thinks of a trajectory.

    Args:
      network: the network.
      params: its parameters.
      trajectory: the trajectory.

    Returns:
      Log-probabilities of its actions, entropies of the policy, and values of its observations. `[T, E]` each
    """
    policy, value = network.apply(params, flatten(trajectory.obs))
    log_prob, entropy = policy.log_prob(flatten(trajectory.action)), policy.entropy()
    unroll_length = trajectory.obs.shape[0]
    return unflatten(log_prob, unroll_length), unflatten(entropy, unroll_length), unflatten(value, unroll_length)


def next_values(value: jax.Array, last_value: jax.Array, final_value: jax.Array, truncated: jax.Array) -> jax.Array:
    """The value of the true successor of every step.

    Args:
      value: values of the observations acted on. `[T, E]`
      last_value: values of the observations after the last step. `[E]`
      final_value: values of the observations before the reset; they count where an episode was cut. `[T, E]`
      truncated: whether the episode was cut short. `[T, E]` bool

    Returns:
      The values; where an episode terminated they mean nothing. `[T, E]`
    """
    return jnp.where(truncated, final_value, jnp.concatenate([value[1:], last_value[None]]))


def flatten(x: jax.Array) -> jax.Array:
    """Merges `[T, E, ...]` into `[E * T, ...]`: a dimension split over devices stays split if it is the outermost."""
    return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])


def unflatten(x: jax.Array, unroll_length: int) -> jax.Array:
    """Splits `[E * T, ...]` into `[T, E, ...]`: the inverse of `flatten`."""
    return jnp.swapaxes(x.reshape(-1, unroll_length, *x.shape[1:]), 0, 1)
