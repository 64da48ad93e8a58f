"""The learning rule of DQN and what is built on it, wherever batches come from (Mnih et al., 2013, arXiv 1312.5602).

In the shape descriptions, `B` denotes the batch size, `A` the number of actions and `N` that of the outputs for each of them:
one value, or the atoms or quantiles of a distribution.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from msrl_jax.algorithms.loops.off_policy import Batch, Learner, Rule, Update, make_apply_update, track
from msrl_jax.algorithms.loops.optimizer import make_optimizer
from msrl_jax.algorithms.losses import q_learning as q_losses
from msrl_jax.algorithms.losses import value_loss
from msrl_jax.algorithms.networks.q_network import q_network
from msrl_jax.envs import Discrete, Space
from msrl_jax.fragments import fragment
from msrl_jax.replay import NStep

Penalty = Callable[[jax.Array, jax.Array], tuple[jax.Array, Mapping[str, jax.Array]]]
"""`(values [B, A], action [B]) -> (losses [B], statistics)`: what else values cost."""


def support(config: Any) -> tuple[float, float]:
    """The lowest and the highest atom of "c51".

    Args:
      config: with `v_min` and `v_max`, or a `discount` that sets them.

    Returns:
      The two.

    Raises:
      ValueError: if there are none, or the first is not below the second.
    """
    name = type(config).__name__
    if config.discount == 1 and None in (config.v_min, config.v_max):
        raise ValueError(f"{name}.discount=1.0 bounds no return; give v_min and v_max to distribution='c51', or discount=0.99")
    most = None if config.discount == 1 else 1 / (1 - config.discount)
    v_min = config.v_min if config.v_min is not None else -(most or 0.0)
    v_max = config.v_max if config.v_max is not None else most or 0.0
    if v_min >= v_max:
        raise ValueError(f"{name}.v_min={v_min:g} is not below v_max={v_max:g}; use a v_min that is")
    return v_min, v_max


def q_learning(
    observation_space: Space,
    action_space: Discrete,
    config: Any,
    learning_rate: Callable[[jax.Array], jax.Array],
    penalty: Penalty | None = None,
) -> Rule:
    """Makes the rule by which action values, or distributions of returns, are learned from n-step transitions.

    Args:
      observation_space: a `Box`.
      action_space: its size is `A`.
      config: with the fields of `DQNConfig` that say what a network is, what it learns and how fast.
      learning_rate: of update number `count`.
      penalty: adds to the loss.

    Returns:
      The rule; a learner's trees are the parameters of one network each.

    Raises:
      TypeError: if the observation space is of another kind.
      ValueError: if the network convolves and the observations are no images of at least 3x3.
    """
    network = q_network(
        observation_space, action_space, hidden_sizes=config.hidden_sizes, activation=config.activation,
        network=config.network, dueling=config.dueling, num_atoms=1 if config.distribution == "none" else config.num_atoms,
    )  # fmt: skip
    optimizer = make_optimizer("adam", max_grad_norm=config.max_grad_norm, epsilon=config.adam_epsilon)
    v_min, v_max = support(config) if config.distribution == "c51" else (0.0, 0.0)

    def init(key: jax.Array, obs: jax.Array) -> Learner:
        params = network.init(key, obs)
        return Learner(params, jax.tree.map(jnp.copy, params), optimizer.init(params))

    def expected(outputs: jax.Array) -> jax.Array:
        """The action values `[..., A]` that outputs `[..., A, N]` stand for."""
        if config.distribution == "c51":
            return jax.nn.softmax(outputs) @ jnp.linspace(v_min, v_max, config.num_atoms)
        return outputs.mean(-1)

    def loss_and_error(outputs: jax.Array, target: jax.Array, reward: jax.Array, discount: jax.Array):
        """Of one example: the loss of outputs `[N]` given the target network's `[N]`, and what its priority follows from."""
        if config.distribution == "c51":
            masses = q_losses.categorical_projection(jax.nn.softmax(target), reward, discount, v_min, v_max)
            loss = q_losses.categorical_loss(outputs, masses)
            return loss, loss
        target = reward + discount * target
        error = target.mean() - outputs.mean()
        if config.distribution == "qr":
            return q_losses.quantile_huber_loss(outputs, target), error
        if config.huber_delta is None:
            return value_loss(outputs.mean(), target.mean()), error
        return q_losses.huber(error, config.huber_delta), error

    def choose_action(params: Any, obs: jax.Array, key: jax.Array | None) -> jax.Array:
        return expected(network.apply(params, obs)).argmax(-1).astype(jnp.int32)

    @fragment(role="learner")
    def gradients(params, target_params, experience: NStep, weight):
        next_target = network.apply(target_params, experience.next_obs)
        next_outputs = network.apply(params, experience.next_obs) if config.double else next_target
        target = jax.vmap(q_losses.greedy_target)(expected(next_outputs), next_target)

        def loss(params):
            outputs = network.apply(params, experience.obs)
            taken = jnp.take_along_axis(outputs, experience.action[:, None, None], 1)[:, 0]
            losses, error = jax.vmap(loss_and_error)(taken, target, experience.reward, experience.discount)
            stats = {"value": expected(taken).mean()}
            if penalty is not None:
                penalties, more = penalty(expected(outputs), experience.action)
                losses, stats = losses + penalties, {**stats, **more}
            stats["loss"] = losses.mean()
            return (weight * losses).mean(), (error, stats)

        return jax.grad(loss, has_aux=True)(params)

    def measure(learner: Learner, batch: Batch) -> Mapping[str, jax.Array]:
        return gradients(learner.params, learner.target_params, batch.experience, batch.weight)[1][1]

    return Rule(init, make_update(gradients, optimizer, learning_rate, config), measure, choose_action)


def make_update(
    gradients: Callable[..., tuple[Any, tuple[jax.Array, Mapping[str, jax.Array]]]],
    optimizer: optax.GradientTransformation,
    learning_rate: Callable[[jax.Array], jax.Array],
    config: Any,
) -> Update:
    """Makes the function that learns from a batch, and lets the target network follow.

    Args:
      gradients: `(params, target_params, experience, weight [B]) -> (gradient, (TD errors [B], statistics))`.
      optimizer: gives directions of descent.
      learning_rate: of update number `count`.
      config: with the fields `target_period` and `tau`.

    Returns:
      The function.
    """
    apply_update = make_apply_update(optimizer)

    def update(learner: Learner, batch: Batch, count: jax.Array, ready: jax.Array):
        grads, (error, stats) = gradients(learner.params, learner.target_params, batch.experience, batch.weight)
        params, opt_state = apply_update(learner.params, learner.opt_state, grads, learning_rate(count), ready)
        rate = jnp.where(ready & ((count + 1) % config.target_period == 0), jnp.float32(config.tau), 0.0)
        return Learner(params, track(learner.target_params, params, rate), opt_state), error, stats

    return update
