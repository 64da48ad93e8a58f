"""Implicit Q-learning (Kostrikov et al., 2021, arXiv 2110.06169): learns from the actions in the data, and values no others.

This file has the losses and the update; the loop is in `loops/offline.py`. In the shape descriptions, `B` is `batch_size` and
`C` denotes the two critics. One update takes all gradients at the same parameters, so that devices exchange gradients once.
The paper's code updates one network after another.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.algorithms.agent import Agent
from msrl_jax.algorithms.config import Activation, Codec, NetworkKind, config, field, tunable
from msrl_jax.algorithms.loops.offline import offline_agent, read_data
from msrl_jax.algorithms.loops.replaying import Batch, Learner, Progress, Rule, make_apply_update, polyak_update
from msrl_jax.algorithms.loops.updates import annealed, make_optimizer
from msrl_jax.algorithms.losses import value_loss
from msrl_jax.algorithms.losses.offline import advantage_weight, expectile_loss
from msrl_jax.algorithms.losses.soft_actor_critic import pessimistic_value
from msrl_jax.algorithms.networks.actions import check_discrete_or_bounded
from msrl_jax.algorithms.networks.cores import Carry
from msrl_jax.algorithms.networks.critics import init_critics, make_critics, make_value, taken_value
from msrl_jax.algorithms.networks.policies import log_likelihood, make_policy
from msrl_jax.envs import Environment
from msrl_jax.fragments import fragment


@config("iql", offline=True)
class IQL:
    """What IQL computes; a distribution policy decides where it runs.

    The defaults are the paper's for locomotion, except for smaller networks, which learn faster. The policy's standard
    deviation depends on the observation; the paper's does not."""

    tau: float = tunable(
        default=0.005, above=0, high=1,
        doc="share of the way that target networks move towards the trained ones per update. Usual: 0.001 to 0.05.",
    )
    discount: float = tunable(default=0.99, doc="discount factor per step. Usual: 0.99.", low=0, high=1)
    data: str | None = field(default=None, doc="path of the data set, or a `msrl_jax.data.Dataset`; training needs it.")
    num_updates: int = field(default=20, doc="updates per iteration, `K`. Usual: 10 to 100.")
    batch_size: int = field(default=256, doc="transitions or windows per update, `B`. Usual: 32 to 512.")
    storage: Codec | None = field(
        default=None,
        doc='codec of stored observations: "uint8" (whole numbers), "scaled_uint8" (those over 255) or "bfloat16". Usual: None, '
        'or "uint8" for images.',
    )
    shards: int | None = field(
        default=None,
        doc="parts of the buffer, for different devices; None: greatest common divisor of `batch_size`, `num_envs` and 8. "
        "Usual: None.",
    )
    learning_rate: float = tunable(default=0.001, doc="step size of Adam. Usual: 1e-4 to 1e-3.", above=0)
    anneal_learning_rate: bool = field(default=True, doc="whether the learning rate falls linearly to 0. Usual: True.")
    max_grad_norm: float | None = tunable(
        default=None, doc="largest norm of each network's gradients; larger ones are scaled down to it. Usual: None.", above=0
    )
    hidden_sizes: tuple[int, ...] = field(default=(64, 64), doc="widths of the dense layers. Usual: (64, 64) to (256, 256).")
    activation: Activation = field(default="relu", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".')
    network: NetworkKind = field(
        default="auto",
        doc='"mlp": dense layers; "cnn": convolutions first; "auto": "cnn" for observations with three dimensions. Usual: '
        '"auto".',
    )
    validation_fraction: float = field(
        default=0.1, doc="share of the episodes held out for the `validation_` metrics. Usual: 0.1.", low=0, below=1
    )
    normalize_rewards: bool = field(
        default=True,
        doc="whether rewards are scaled so that `inverse_temperature` does not depend on their units. The divisor is the range "
        "of the episodes' returns, divided by the length of the longest episode (the paper's rule for locomotion, where the "
        "longest episode has 1000 steps). Usual: True.",
    )
    expectile: float = tunable(
        default=0.7, low=0, high=1,
        doc="the value function learns this expectile of the data's action values; 0.5 is their mean. Usual: 0.7 to 0.9.",
    )
    inverse_temperature: float = tunable(
        default=3.0, doc="weight of the advantage in imitation; 0 clones the behavior. Usual: 3 to 10.", low=0
    )
    max_weight: float = tunable(
        default=100.0, above=0,
        doc="largest weight of an action in imitation; an action with advantage 0 has weight 1. Usual: 100.",
    )


    def build(self, env: Environment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space or a size does not fit."""
        return build(env, self)


def build(env: Environment, config: IQL) -> Agent:
    """Builds IQL for one environment.

    Args:
      env: the environment; its action space is `Discrete` or a bounded `Box` of floats.
      config: the settings of the algorithm.

    Returns:
      The agent.

    Raises:
      ValueError: if the data do not fit the environment, if sizes do not fit, or if actions are not bounded.
      TypeError: if a space is not supported.
    """
    action_space = check_discrete_or_bounded("iql", env.action_space)
    policy = make_policy(env.observation_space, action_space, config)
    critics = make_critics(env.observation_space, action_space, 2, config)
    value = make_value(env.observation_space, config)
    optimizer = make_optimizer("adam", max_grad_norm=config.max_grad_norm, epsilon=1e-8)
    apply_update = make_apply_update(optimizer)

    def init(key: jax.Array, obs: jax.Array) -> Learner:
        actor_key, critic_key, value_key = jax.random.split(key, 3)
        params = {
            "actor": policy.init(actor_key, obs),
            "critic": init_critics(critics, critic_key, action_space, obs),
            "value": value.init(value_key, obs),
        }
        return Learner(params, params["critic"], {name: optimizer.init(p) for name, p in params.items()})

    @fragment(role="learner")
    def gradients(params, target_critic, e):
        target = e.reward + e.discount * value.apply(params["value"], e.next_obs)
        outcome = pessimistic_value(taken_value(critics, target_critic, e.obs, e.action))
        advantage = outcome - value.apply(params["value"], e.obs)
        weight = advantage_weight(advantage, config.inverse_temperature, config.max_weight)

        def loss(trained):
            q = taken_value(critics, trained["critic"], e.obs, e.action)
            losses = {
                "critic_loss": jax.vmap(value_loss, (0, None))(q, target).sum(0).mean(),
                "value_loss": expectile_loss(outcome - value.apply(trained["value"], e.obs), config.expectile).mean(),
                "actor_loss": -(weight * log_likelihood(policy.apply(trained["actor"], e.obs), e.action)).mean(),
            }
            total = jnp.stack([*losses.values()]).sum()
            stats = losses | {"loss": total, "q": q.mean(), "advantage": advantage.mean(), "weight": weight.mean()}
            return total, (target - q.mean(0), stats)

        return jax.grad(loss, has_aux=True)(params)

    def update(learner: Learner, batch: Batch, progress: Progress) -> tuple[Learner, jax.Array, Mapping[str, jax.Array]]:
        grads, (td_error, stats) = gradients(learner.params, learner.target_params, batch.experience)
        params, opt_state, rate = {}, {}, annealed(config, progress.update, 1)
        for name, old in learner.params.items():
            params[name], opt_state[name] = apply_update(old, learner.opt_state[name], grads[name], rate, progress.ready)
        share = jnp.where(progress.ready, config.tau, 0.0)
        return Learner(params, polyak_update(learner.target_params, params["critic"], share), opt_state), td_error, stats

    def choose_action(params: Any, obs: jax.Array, key: jax.Array | None, carry: Carry) -> tuple[jax.Array, Carry]:
        return policy.choose_action(params["actor"], obs, key), carry

    source = read_data(env, config, discount=config.discount, normalize_rewards=config.normalize_rewards)
    return offline_agent(env, config, Rule(init, update, choose_action), source)

