"""Implicit Q-learning (Kostrikov et al., 2021, arXiv 2110.06169): values of the better actions in the data, and no others.

In the shape descriptions, `B` is `batch_size`, `K` is `num_updates` and `C` denotes the two critics. All gradients of an update
are taken at the same parameters, where the paper's code updates one network after another: so devices exchange gradients once
per update.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from msrl_jax.algorithms.base import Agent, Algorithm, register
from msrl_jax.algorithms.configs import checks as check
from msrl_jax.algorithms.loops.off_policy import Batch, Learner, Rule, make_apply_update, track
from msrl_jax.algorithms.loops.offline import check_actions, check_config, learning_rate_of, log_likelihood, offline_agent
from msrl_jax.algorithms.loops.optimizer import make_optimizer
from msrl_jax.algorithms.losses import value_loss
from msrl_jax.algorithms.losses.offline import advantage_weight, expectile_loss
from msrl_jax.algorithms.losses.soft_actor_critic import pessimistic_value
from msrl_jax.algorithms.networks.actor_and_critics import init_critics, make_critics, make_policy, make_value, taken_value
from msrl_jax.envs import Environment
from msrl_jax.fragments import fragment


@dataclasses.dataclass(frozen=True)
class IQLConfig:
    """Everything about what IQL computes; where it runs is a distribution policy's concern.

    The defaults are the paper's for locomotion but for smaller networks, which learn faster. The deviation of the policy
    depends on the observation, where the paper's does not.

    Attributes:
      data: a data set, by its path (`msrl_jax.data.load`); from Python, a `msrl_jax.data.Dataset` too.
        Training needs it. Usual: a path.
      validation_fraction: which part of the episodes is held out, for metrics that start with `validation_`. Usual: 0.1.
      num_updates: updates per iteration, `K`. Usual: 10 to 100.
      batch_size: transitions per update, `B`. Usual: 256.
      learning_rate: step size of Adam, for all networks. Usual: 3e-4 to 1e-3.
      anneal_learning_rate: whether the learning rate falls linearly to 0 over `total_steps`, if they are given. Usual: True.
      normalize_rewards: whether rewards are divided by the range of the returns of the data's episodes per step of the longest
        one (the paper's for locomotion, whose episodes have 1000 steps), so that `inverse_temperature` depends on the units of
        rewards no more. Usual: True.
      discount: the factor per step. Usual: 0.99.
      tau: by which share the target critics move towards the critics per update. Usual: 0.005.
      expectile: which expectile of the values of the data's actions is learned. Usual: 0.7 to 0.9.
      inverse_temperature: how much better actions are imitated more; 0 clones the behavior. Usual: 3 to 10.
      max_weight: no action is imitated more than this many times as much as one of advantage 0. Usual: 100.
      max_grad_norm: gradients of each network are scaled down to this norm; None leaves them. Usual: None.
      hidden_sizes: widths of the dense layers. Usual: (64, 64) to (256, 256).
      activation: "tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".
      network: "mlp", "cnn", or "auto", which convolves observations of three dimensions. Usual: "auto".
      storage: codec of stored observations: "bfloat16", "uint8" or "scaled_uint8"; None stores them as they are. Usual: None.
      shards: parts of the data, which may lie on devices of their own; None for the greatest common divisor of `batch_size`
        and 8. Usual: None.
      total_steps: updates over which the learning rate falls; it stays as it is if that is None.
    """

    data: str | None = None
    validation_fraction: float = 0.1
    num_updates: int = 20
    batch_size: int = 256
    learning_rate: float = 1e-3
    anneal_learning_rate: bool = True
    normalize_rewards: bool = True
    discount: float = 0.99
    tau: float = 0.005
    expectile: float = 0.7
    inverse_temperature: float = 3.0
    max_weight: float = 100.0
    max_grad_norm: float | None = None
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "relu"
    network: str = "auto"
    storage: str | None = None
    shards: int | None = None
    total_steps: int | None = None

    def __post_init__(self):
        check_config(self)
        check.check_numbers(self, "tau", above=0.0, high=1.0)
        check.check_numbers(self, "expectile", low=0.0, high=1.0)
        check.check_numbers(self, "inverse_temperature", low=0.0)
        check.check_numbers(self, "max_weight", above=0.0)


def build(env: Environment, config: IQLConfig) -> Agent:
    """Builds IQL for one environment.

    Args:
      env: the environment; its action space is `Discrete` or a bounded `Box` of floats.
      config: what to compute.

    Returns:
      The agent.

    Raises:
      ValueError: if the data do not fit the environment, if sizes do not fit, or if actions are not bounded.
      TypeError: if a space is not supported.
    """
    check_actions("iql", env.action_space)
    policy = make_policy(env.observation_space, env.action_space, config)
    critics = make_critics(env.observation_space, env.action_space, 2, config)
    value = make_value(env.observation_space, config)
    optimizer = make_optimizer("adam", max_grad_norm=config.max_grad_norm, epsilon=1e-8)
    apply_update, learning_rate = make_apply_update(optimizer), learning_rate_of(config)

    def init(key: jax.Array, obs: jax.Array) -> Learner:
        actor_key, critic_key, value_key = jax.random.split(key, 3)
        params = {
            "actor": policy.init(actor_key, obs),
            "critic": init_critics(critics, critic_key, env.action_space, obs),
            "value": value.init(value_key, obs),
        }
        return Learner(params, params["critic"], {name: optimizer.init(p) for name, p in params.items()})

    @fragment(role="learner")
    def gradients(params, target_critic, seen):
        target = seen.reward + seen.discount * value.apply(params["value"], seen.next_obs)
        outcome = pessimistic_value(taken_value(critics, target_critic, seen.obs, seen.action))
        advantage = outcome - value.apply(params["value"], seen.obs)
        weight = advantage_weight(advantage, config.inverse_temperature, config.max_weight)

        def loss(trained):
            q = taken_value(critics, trained["critic"], seen.obs, seen.action)
            losses = {
                "critic_loss": value_loss(q, target).sum(0).mean(),
                "value_loss": expectile_loss(outcome - value.apply(trained["value"], seen.obs), config.expectile).mean(),
                "actor_loss": -(weight * log_likelihood(policy.apply(trained["actor"], seen.obs), seen.action)).mean(),
            }
            total = jnp.stack([*losses.values()]).sum()
            stats = losses | {"loss": total, "q": q.mean(), "advantage": advantage.mean(), "weight": weight.mean()}
            return total, (target - q.mean(0), stats)

        grads, (td_error, stats) = jax.grad(loss, has_aux=True)(params)
        return grads, td_error, stats

    def update(learner: Learner, batch: Batch, count: jax.Array, ready: jax.Array):
        grads, td_error, stats = gradients(learner.params, learner.target_params, batch.experience)
        params, opt_state, rate = {}, {}, learning_rate(count)
        for name, old in learner.params.items():
            params[name], opt_state[name] = apply_update(old, learner.opt_state[name], grads[name], rate, ready)
        target = track(learner.target_params, params["critic"], jnp.where(ready, config.tau, 0.0))
        return Learner(params, target, opt_state), td_error, stats

    def measure(learner: Learner, batch: Batch) -> Mapping[str, jax.Array]:
        return gradients(learner.params, learner.target_params, batch.experience)[2]

    def choose_action(params, obs, key):
        return policy.choose_action(params["actor"], obs, key)

    return offline_agent(env, config, Rule(init, update, measure, choose_action), "iql")


IQL = register(Algorithm("iql", IQLConfig, build))
