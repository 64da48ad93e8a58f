"""The experience of an unroll, and small functions of it, for the actor-critic algorithms.

In the shape descriptions, `T` denotes the length of an unroll and `E` the number of environments.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from msrl_jax.algorithms.networks.layers import flatten, unflatten

if TYPE_CHECKING:  # algorithms without such a network load none
    from msrl_jax.algorithms.networks.actor_critic import ActorCritic


class Trajectory(NamedTuple):
    """The experience of an unroll; every leaf is `[T, E, ...]`.

    Attributes:
      obs: the observations at every step.
      action: the policy's actions, before `action_transform`.
      log_prob: log-probabilities of the actions under the policy that acted.
      reward: rewards.
      terminated: whether the episode ended in a terminal state.
      truncated: whether the episode was cut short.
      present: which steps count; all if None.
    """

    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    present: jax.Array | None = None


def split_keys(keys: jax.Array, unroll_length: int) -> tuple[jax.Array, jax.Array]:
    """Splits the key of every environment.

    Args:
      keys: one key per environment. `[E]`
      unroll_length: the length of an unroll, `T`.

    Returns:
      Keys for the next unroll `[E]`, and keys for the steps of this unroll `[T, E]`.
    """
    keys = jax.vmap(lambda key: jax.random.split(key, unroll_length + 1), out_axes=1)(keys)
    return keys[0], keys[1:]


def values(network: "ActorCritic", params: Any, obs: jax.Array) -> jax.Array:
    """The values `[T, E]` of observations `[T, E, ...]`."""
    return unflatten(network.value(params, flatten(obs)), len(jax.tree.leaves(obs)[0]))


def evaluate(network: "ActorCritic", params: Any, trajectory: Trajectory) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Evaluates a trajectory with the current parameters.

    Args:
      network: the network.
      params: its parameters.
      trajectory: the trajectory.

    Returns:
      Log-probabilities of the actions, entropies of the policy, and values of the observations. `[T, E]` each
    """
    policy, value = network.apply(params, flatten(trajectory.obs))
    log_prob, entropy = policy.log_prob(flatten(trajectory.action)), policy.entropy()
    unroll_length = len(trajectory.reward)
    return unflatten(log_prob, unroll_length), unflatten(entropy, unroll_length), unflatten(value, unroll_length)


def next_values(value: jax.Array, last_value: jax.Array, bootstrap_value: jax.Array, truncated: jax.Array) -> jax.Array:
    """The value of the true successor of every step.

    Args:
      value: values of the observations at every step. `[T, E]`
      last_value: values of the observations after the last step. `[E]`
      bootstrap_value: values of the true successors, before a reset; used where an episode was truncated. `[T, E]`
      truncated: whether the episode was cut short. `[T, E]` bool

    Returns:
      The values; those of terminated steps have no meaning. `[T, E]`
    """
    chex.assert_equal_shape([value, bootstrap_value, truncated])
    chex.assert_equal_shape([value[0], last_value])
    return jnp.where(truncated, bootstrap_value, jnp.concatenate([value[1:], last_value[None]]))


def truncated_values(
    value: Callable[[Any], jax.Array], final: Any, truncated: jax.Array, *, also_last: bool = False
) -> jax.Array:
    """The values of the last observations of truncated episodes.

    A CPU computes those values alone: of the first truncation of every environment, of the second, and so on. Other devices
    compute the values of all steps at once, since a loop that depends on data would wait for the host.

    Args:
      value: `last observations [N, ...] -> values [N, ...]`, of any number of environments.
      final: the observations before a reset, with whatever else `value` needs; a pytree of `[T, E, ...]`.
      truncated: whether the episode was cut short. `[T, E]` bool
      also_last: whether the values of the last step are also needed, truncated or not.

    Returns:
      The values; those of steps that truncate no episode have no meaning. `[T, E, ...]`
    """

    def some(final: Any, truncated: jax.Array) -> jax.Array:
        needed = truncated.at[-1].set(True) if also_last else truncated
        steps = jnp.argsort(~needed, axis=0, stable=True)  # of every environment, those that are needed first

        def pick(i: jax.Array) -> Any:
            return jax.tree.map(lambda x: jax.vmap(lambda x, step: x[step], in_axes=(1, 0))(x, steps[i]), final)

        def fill(i: jax.Array, found: jax.Array) -> jax.Array:
            new = value(pick(i))
            here = jnp.arange(len(truncated))[:, None] == steps[i]
            return jnp.where(here.reshape(*here.shape, *(1,) * (new.ndim - 1)), new, found)

        one = jax.eval_shape(lambda: value(pick(jnp.int32(0))))
        found = jnp.zeros((len(truncated), *one.shape), one.dtype)
        return jax.lax.fori_loop(0, needed.sum(axis=0).max(), fill, found)

    def all_at_once(final: Any, truncated: jax.Array) -> jax.Array:
        return unflatten(value(flatten(final)), len(truncated))

    return jax.lax.platform_dependent(final, truncated, cpu=some, default=all_at_once)
