"""Soft actor-critic (Haarnoja et al., 2018, arXiv 1801.01290 and 1812.05905), and its variant for choices (1910.07207).

In the shape descriptions, `T` denotes `unroll_length`, `E` `num_envs`, `B` `batch_size`, `C` the two critics, `N` the number
of choices and `D` the length of an action. All gradients of an update are taken at the same parameters, where the papers
update the critics first: so devices exchange gradients once per update.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from msrl_jax.algorithms import config as check
from msrl_jax.algorithms.actor_and_critics import (
    check_bounded,
    check_config,
    make_actor,
    make_buffer,
    make_critics,
    uniform_actions,
)
from msrl_jax.algorithms.actor_critic_losses import expected_soft_value, pessimistic_value, soft_value, temperature_loss
from msrl_jax.algorithms.base import Agent, Algorithm, register, training_environment
from msrl_jax.algorithms.distributions import Categorical, Normal, TanhNormal
from msrl_jax.algorithms.losses import value_loss
from msrl_jax.algorithms.networks import action_transform
from msrl_jax.algorithms.off_policy import Batch, Learner, make_apply_update, off_policy_agent, track
from msrl_jax.algorithms.optimizer import learning_rate_at, make_optimizer
from msrl_jax.envs import Discrete, Environment
from msrl_jax.fragments import fragment


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
    discrete = isinstance(space, Discrete)
    if not discrete:
        check_bounded("sac", space)
    size: int = space.n if isinstance(space, Discrete) else math.prod(space.shape)  # pyright: ignore[reportAssignmentType]
    target_entropy = config.target_entropy
    if target_entropy is None:
        target_entropy = 0.5 * math.log(size) if discrete else -float(size)
    actor = make_actor(venv.observation_space, size if discrete else 2 * size, config)
    critics = make_critics(venv.observation_space, space, 2, config)
    action = jax.ShapeDtypeStruct(() if discrete else (size,), jnp.int32 if discrete else jnp.float32)
    buffer = make_buffer(venv, action, config)
    optimizer = make_optimizer("adam", max_grad_norm=config.max_grad_norm, epsilon=1e-8)
    apply_update = make_apply_update(optimizer)
    steps_per_iteration = config.num_envs * config.unroll_length

    def policy(params, obs):
        outputs = actor.apply(params["actor"], obs)
        if discrete:
            return Categorical(outputs)
        loc, log_scale = jnp.split(outputs, 2, axis=-1)
        return TanhNormal(Normal(loc, jnp.clip(log_scale, -20.0, 2.0)))

    def init(key: jax.Array, obs: jax.Array) -> Learner:
        actor_key, critic_key = jax.random.split(key)
        inputs = (obs,) if discrete else (obs, jnp.zeros((config.num_envs, size)))
        params = {
            "actor": actor.init(actor_key, obs),
            "critic": critics.init(critic_key, *inputs),
            "log_temperature": jnp.log(jnp.float32(config.initial_temperature)),
        }
        return Learner(params, params["critic"], {name: optimizer.init(p) for name, p in params.items()})

    def act(params, obs, keys, steps):
        return jnp.where(steps < config.learning_starts, uniform_actions(keys, space), policy(params, obs).sample(keys))

    def value(critic_params, policy, obs, temperature, keys):
        """Soft values `[B]` of a policy, and log-probabilities, drawn or expected."""
        if isinstance(policy, Categorical):
            q = pessimistic_value(critics.apply(critic_params, obs))
            return expected_soft_value(q, jax.nn.log_softmax(policy.logits), temperature)
        action, log_prob = policy.sample_and_log_prob(keys)
        q = pessimistic_value(critics.apply(critic_params, obs, action))
        return soft_value(q, log_prob, temperature), log_prob

    def action_value(critic_params, obs, action):
        if discrete:
            return jnp.take_along_axis(critics.apply(critic_params, obs), action[None, :, None], axis=-1)[..., 0]
        return critics.apply(critic_params, obs, action)

    @fragment(role="learner")
    def gradients(params, target_critic, batch):
        seen, temperature = batch.experience, jnp.exp(params["log_temperature"])
        next_keys, keys = jax.random.split(batch.key, (2, config.batch_size))
        next_value, _ = value(target_critic, policy(params, seen.next_obs), seen.next_obs, temperature, next_keys)
        target = seen.reward + seen.discount * next_value

        # What the loss takes from `params` is a constant to it; what it takes from `trained` is not.
        def loss(trained):
            q = action_value(trained["critic"], seen.obs, seen.action)
            critic_loss = (batch.weight * value_loss(q, target).sum(0)).mean()
            soft, log_prob = value(params["critic"], policy(trained, seen.obs), seen.obs, temperature, keys)
            temperature_losses = temperature_loss(trained["log_temperature"], log_prob, target_entropy)
            total = critic_loss - soft.mean() + (temperature_losses.mean() if config.learn_temperature else 0.0)
            stats = {
                "critic_loss": critic_loss, "actor_loss": -soft.mean(), "q": q.mean(), "entropy": -log_prob.mean(),
                "temperature": temperature,
            }  # fmt: skip
            return total, (target - q.mean(0), stats)

        grads, (td_error, stats) = jax.grad(loss, has_aux=True)(params)
        return grads, td_error, stats

    def update(learner: Learner, batch: Batch, count: jax.Array, ready: jax.Array):
        grads, td_error, stats = gradients(learner.params, learner.target_params, batch)
        anneal_over = config.total_steps if config.anneal_learning_rate else None
        rate = learning_rate_at(count // config.num_updates, config.learning_rate, steps_per_iteration, anneal_over)
        params, opt_state = {}, {}
        for name, old in learner.params.items():
            params[name], opt_state[name] = apply_update(old, learner.opt_state[name], grads[name], rate, ready)
        target = track(learner.target_params, params["critic"], jnp.where(ready, config.tau, 0.0))
        return Learner(params, target, opt_state), td_error, stats

    def choose_action(params, obs, key):
        distribution = policy(params, obs)
        return distribution.mode() if key is None else distribution.sample(jax.random.split(key, obs.shape[0]))

    return off_policy_agent(
        venv, buffer, init=init, act=act, update=update, choose_action=choose_action, to_env_action=action_transform(space),
        unroll_length=config.unroll_length, num_updates=config.num_updates, batch_size=config.batch_size,
    )  # fmt: skip


SAC = register(Algorithm("sac", SACConfig, build))
