"""The experience of an unroll, and the shuffled minibatches of PPO, for the actor-critic algorithms.

In the shape descriptions, `T` denotes the length of an unroll, `E` the number of environments, `M` the number of minibatches of
an epoch and `U` the number of updates. A shuffle moves nothing between devices: a minibatch of feed-forward networks holds
`T / M` time steps of all environments; one of recurrent networks holds one environment from every group of `M` adjacent ones.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from msrl_jax.algorithms.loops.updates import descend
from msrl_jax.algorithms.networks.layers import flatten, unflatten
from msrl_jax.fragments import fragment

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


def shuffled_times(
    key: jax.Array, *, unroll_length: int, num_epochs: int, num_minibatches: int
) -> tuple[jax.Array, jax.Array]:
    """Shuffles the time steps of every epoch: the next key, and the time steps of every minibatch. `[U, T / M]` int32."""
    key, *epoch_keys = jax.random.split(key, num_epochs + 1)
    times = jnp.stack([jax.random.permutation(k, unroll_length) for k in epoch_keys])
    return key, times.reshape(num_epochs * num_minibatches, -1)


def shuffled_members(key: jax.Array, *, num_envs: int, num_epochs: int, num_minibatches: int) -> tuple[jax.Array, jax.Array]:
    """Shuffles environments within groups of `M`: the next key, and who is in each minibatch, for `pick`. `[U, E / M]`."""
    key, *epoch_keys = jax.random.split(key, num_epochs + 1)
    order = jnp.broadcast_to(jnp.arange(num_minibatches)[:, None], (num_minibatches, num_envs // num_minibatches))
    return key, jnp.concatenate([jax.random.permutation(k, order, axis=0, independent=True) for k in epoch_keys])


def pick(x: jax.Array, chosen: jax.Array) -> jax.Array:
    """One environment of every group: `[T, E, ...] -> [T, E / M, ...]`, for `chosen` `[E / M]`."""
    groups = len(chosen)
    x = x.reshape(len(x), groups, -1, *x.shape[2:])
    index = chosen.reshape(1, groups, 1, *(1,) * (x.ndim - 3))
    return jnp.take_along_axis(x, index, axis=2, mode="promise_in_bounds")[:, :, 0]


def proximal_updates(
    optimizer: optax.GradientTransformation, gradients: Callable[..., tuple[Any, dict[str, jax.Array]]], target_kl: float | None
) -> Callable[..., tuple[Any, Any, dict[str, jax.Array]]]:
    """Makes the updates of an iteration.

    Args:
      optimizer: the optimizer, without a learning rate.
      gradients: `(params, *data, chosen) -> (gradients, statistics)`; the statistics have `approx_kl`.
      target_kl: updates are skipped once `approx_kl` exceeds it; None skips none.

    Returns:
      `(params, opt_state, minibatches [U, ...], learning_rate, *data) -> (params, opt_state, statistics)`, with the means of
      the statistics over the updates.
    """

    @fragment(role="server")
    def apply_update(params, opt_state, grads, learning_rate, diverged):
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        old, new = (params, opt_state), (descend(params, updates, learning_rate), new_opt_state)
        if diverged is not None:
            new = jax.tree.map(lambda old, new: jnp.where(diverged, old, new), old, new)
        return *new, optax.tree.norm(grads)

    def run(params: Any, opt_state: Any, minibatches: jax.Array, learning_rate: jax.Array, *data: Any) -> Any:
        def update(updated, chosen):
            params, opt_state, diverged = updated
            grads, stats = gradients(params, *data, chosen)
            if target_kl is not None:
                diverged |= stats["approx_kl"] > target_kl
            params, opt_state, grad_norm = apply_update(params, opt_state, grads, learning_rate, diverged)
            return (params, opt_state, diverged), stats | {"grad_norm": grad_norm}

        diverged = None if target_kl is None else jnp.bool(False)
        (params, opt_state, _), stats = jax.lax.scan(update, (params, opt_state, diverged), minibatches)
        return params, opt_state, jax.tree.map(jnp.mean, stats)

    return run
