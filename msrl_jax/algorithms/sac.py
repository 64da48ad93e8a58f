"""Soft actor-critic (Haarnoja et al., 2018, arXiv 1801.01290 and 1812.05905), and its variant for choices (1910.07207).

In the shape descriptions, `T` denotes `unroll_length`, `E` `num_envs`, `B` `batch_size`, `C` the two critics, `N` the number
of choices and `D` the length of an action. All gradients of an update are taken at the same parameters, where the papers
update the critics first: so devices exchange gradients once per update.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.algorithms.base import Agent, Algorithm, register, training_environment
from msrl_jax.algorithms.configs import checks as check
from msrl_jax.algorithms.loops.mixing import make_mixture, split_batch
from msrl_jax.algorithms.loops.off_policy import Batch, Learner, Rule, make_apply_update, off_policy_agent, track
from msrl_jax.algorithms.loops.optimizer import learning_rate_at, make_optimizer
from msrl_jax.algorithms.losses import value_loss
from msrl_jax.algorithms.losses.soft_actor_critic import expected_soft_value, pessimistic_value, soft_value, temperature_loss
from msrl_jax.algorithms.networks.actor_and_critics import (
    Network,
    Policy,
    action_type,
    check_bounded,
    check_config,
    init_critics,
    make_buffer,
    make_critics,
    make_policy,
    taken_value,
    uniform_actions,
)
from msrl_jax.algorithms.networks.actor_critic import action_transform
from msrl_jax.algorithms.networks.distributions import Categorical
from msrl_jax.envs import Discrete, Environment, Space
from msrl_jax.fragments import fragment

Penalty = Callable[[Any, Any, Batch, jax.Array], tuple[jax.Array, Mapping[str, jax.Array]]]
"""`(trained, params, batch, values [C, B]) -> (loss, statistics)`: what else the critics cost; the first two are equal, but a
gradient is taken with respect to `trained` only."""


@dataclasses.dataclass(frozen=True)
class SACConfig:
    """Everything about what SAC computes; where it runs is a distribution policy's concern.

    The defaults are the papers' but for the updates per step, 1/2 instead of 1, and the learning rate.

    Attributes:
      num_envs: environments stepped in parallel, `E`. Usual: 1 to 128.
      unroll_length: steps of every environment per iteration, `T`. Usual: 1 to 8.
      num_updates: updates per iteration, so `num_updates / (num_envs * unroll_length)` per step. Usual: 1/8 to 1 per step.
      batch_size: transitions per update, `B`. Usual: 256.
      capacity: steps that the buffer holds. Usual: 1e5 to 1e6.
      learning_starts: steps, of uniformly random actions, before the first update. Usual: 1e3 to 1e4.
      n_step: rewards in a target. Usual: 1.
      learning_rate: step size of Adam, for all that is trained. Usual: 3e-4 to 1e-3.
      anneal_learning_rate: whether the learning rate falls linearly to 0 over `total_steps`. Usual: False.
      discount: the factor per step. Usual: 0.99.
      tau: by which share the target critics move towards the critics per update. Usual: 0.005.
      initial_temperature: what a nat of entropy is worth at first. Usual: 0.1 to 1.
      learn_temperature: whether the temperature is learned; else it stays. Usual: True.
      target_entropy: the entropy to hold, in nats; None for minus the length of an action, or half the logarithm of the
        number of choices (the paper's 98 % of it leave little but chance). Usual: None.
      max_grad_norm: gradients of each network are scaled down to this norm; None leaves them. Usual: None.
      hidden_sizes: widths of the dense layers. Usual: (256, 256).
      activation: "tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".
      network: "mlp", "cnn", or "auto", which convolves observations of three dimensions. Usual: "auto".
      storage: codec of stored observations: "bfloat16", "uint8" or "scaled_uint8"; None stores them as they are. Usual: None.
      shards: parts of the buffer, which may lie on devices of their own; None for the greatest common divisor of `num_envs`,
        `batch_size` and 8. Usual: None.
      data: a data set to learn from as well, by its path (`msrl_jax.data.load`); from Python, a `msrl_jax.data.Dataset` too.
        Usual: None.
      data_fraction: share of every batch that comes from it, rounded to whole rows of each of the `shards`. Usual: 0.5.
      total_steps: environment steps over which the learning rate falls; needed only if it does.
    """

    num_envs: int = 16
    unroll_length: int = 2
    num_updates: int = 16
    batch_size: int = 256
    capacity: int = 200_000
    learning_starts: int = 1000
    n_step: int = 1
    learning_rate: float = 1e-3
    anneal_learning_rate: bool = False
    discount: float = 0.99
    tau: float = 0.005
    initial_temperature: float = 1.0
    learn_temperature: bool = True
    target_entropy: float | None = None
    max_grad_norm: float | None = None
    hidden_sizes: tuple[int, ...] = (256, 256)
    activation: str = "relu"
    network: str = "auto"
    storage: str | None = None
    shards: int | None = None
    data: str | None = None
    data_fraction: float = 0.5
    total_steps: int | None = None

    def __post_init__(self):
        check_config(self)
        check.check_numbers(self, "initial_temperature", above=0.0)
        check.check_numbers(self, "target_entropy")


def build(env: Environment, config: SACConfig) -> Agent:
    """Builds SAC for one environment.

    Args:
      env: the environment; its action space is `Discrete` or a bounded `Box` of floats.
      config: what to compute.

    Returns:
      The agent.

    Raises:
      ValueError: if the buffer's sizes do not fit each other, if the network does not fit, if actions are not bounded, or if
        the learning rate is to be annealed and `config.total_steps` is None.
      TypeError: if a space is not supported.
    """
    check.check_annealing(config)
    venv = training_environment(
        env, config.num_envs, normalize_observations=False, normalize_rewards=False, discount=config.discount
    )
    space = venv.action_space
    if not isinstance(space, Discrete):
        check_bounded("sac", space)
    policy = make_policy(venv.observation_space, space, config)
    critics = make_critics(venv.observation_space, space, 2, config)
    buffer = make_buffer(venv, action_type(space), split_batch(config)[0])
    anneal_over, steps = config.total_steps if config.anneal_learning_rate else None, config.num_envs * config.unroll_length
    rule = soft_actor_critic(
        policy, critics, space, config,
        lambda count: learning_rate_at(count // config.num_updates, config.learning_rate, steps, anneal_over),
    )  # fmt: skip

    def act(params, obs, keys, steps):
        explored = policy.apply(params["actor"], obs).sample(keys)
        return jnp.where(steps < config.learning_starts, uniform_actions(keys, space), explored)

    return off_policy_agent(
        venv, buffer, init=rule.init, act=act, update=rule.update, choose_action=rule.choose_action,
        to_env_action=action_transform(space), unroll_length=config.unroll_length, num_updates=config.num_updates,
        batch_size=config.batch_size, mixture=make_mixture(env, config),
    )  # fmt: skip


def soft_actor_critic(
    policy: Policy,
    critics: Network,
    space: Space,
    config: Any,
    learning_rate: Callable[[jax.Array], jax.Array],
    penalty: Penalty | None = None,
    more_params: Mapping[str, Any] | None = None,
) -> Rule:
    """Makes the rule by which a policy and critics are learned from n-step transitions.

    Args:
      policy: the policy.
      critics: two critics.
      space: of actions; `Discrete`, or a bounded `Box`.
      config: with the fields of `SACConfig` that say what is learned and how fast.
      learning_rate: of update number `count`.
      penalty: adds to the loss of the critics.
      more_params: what else is trained, for the penalty to use.

    Returns:
      The rule. A learner's parameters have the entries "actor", "critic", "log_temperature" and those of `more_params`; the
      target is of the critics.
    """
    target_entropy = config.target_entropy
    if target_entropy is None:
        target_entropy = 0.5 * math.log(space.n) if isinstance(space, Discrete) else -float(math.prod(space.shape))
    optimizer = make_optimizer("adam", max_grad_norm=config.max_grad_norm, epsilon=1e-8)
    apply_update = make_apply_update(optimizer)

    def init(key: jax.Array, obs: jax.Array) -> Learner:
        actor_key, critic_key = jax.random.split(key)
        params = {
            "actor": policy.init(actor_key, obs),
            "critic": init_critics(critics, critic_key, space, obs),
            "log_temperature": jnp.log(jnp.float32(config.initial_temperature)),
            **(more_params or {}),
        }
        return Learner(params, params["critic"], {name: optimizer.init(p) for name, p in params.items()})

    def value(critic_params, distribution, obs, temperature, keys):
        """Soft values `[B]` of a policy, and log-probabilities, drawn or expected."""
        if isinstance(distribution, Categorical):
            q = pessimistic_value(critics.apply(critic_params, obs))
            return expected_soft_value(q, jax.nn.log_softmax(distribution.logits), temperature)
        action, log_prob = distribution.sample_and_log_prob(keys)
        q = pessimistic_value(critics.apply(critic_params, obs, action))
        return soft_value(q, log_prob, temperature), log_prob

    @fragment(role="learner")
    def gradients(params, target_critic, batch):
        seen, temperature = batch.experience, jnp.exp(params["log_temperature"])
        next_keys, keys = jax.random.split(batch.key, (2, len(seen.reward)))
        next_policy = policy.apply(params["actor"], seen.next_obs)
        next_value, _ = value(target_critic, next_policy, seen.next_obs, temperature, next_keys)
        target = seen.reward + seen.discount * next_value

        # What the loss takes from `params` is a constant to it; what it takes from `trained` is not.
        def loss(trained):
            q = taken_value(critics, trained["critic"], seen.obs, seen.action)
            critic_loss = (batch.weight * value_loss(q, target).sum(0)).mean()
            soft, log_prob = value(params["critic"], policy.apply(trained["actor"], seen.obs), seen.obs, temperature, keys)
            temperature_losses = temperature_loss(trained["log_temperature"], log_prob, target_entropy)
            total = critic_loss - soft.mean() + (temperature_losses.mean() if config.learn_temperature else 0.0)
            stats = {
                "critic_loss": critic_loss, "actor_loss": -soft.mean(), "q": q.mean(), "entropy": -log_prob.mean(),
                "temperature": temperature,
            }  # fmt: skip
            if penalty is not None:
                more_loss, more_stats = penalty(trained, params, batch, q)
                total, stats = total + more_loss, {**stats, **more_stats, "loss": total + more_loss}
            return total, (target - q.mean(0), stats)

        grads, (td_error, stats) = jax.grad(loss, has_aux=True)(params)
        return grads, td_error, stats

    def update(learner: Learner, batch: Batch, count: jax.Array, ready: jax.Array):
        grads, td_error, stats = gradients(learner.params, learner.target_params, batch)
        params, opt_state, rate = {}, {}, learning_rate(count)
        for name, old in learner.params.items():
            params[name], opt_state[name] = apply_update(old, learner.opt_state[name], grads[name], rate, ready)
        target = track(learner.target_params, params["critic"], jnp.where(ready, config.tau, 0.0))
        return Learner(params, target, opt_state), td_error, stats

    def measure(learner: Learner, batch: Batch) -> Mapping[str, jax.Array]:
        return gradients(learner.params, learner.target_params, batch)[2]

    def choose_action(params, obs, key):
        return policy.choose_action(params["actor"], obs, key)

    return Rule(init, update, measure, choose_action)


SAC = register(Algorithm("sac", SACConfig, build))
