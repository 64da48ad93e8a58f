"""Twin delayed deep deterministic policy gradients (Fujimoto et al., 2018, arXiv 1802.09477).

In the shape descriptions, `T` denotes `unroll_length`, `E` `num_envs`, `B` `batch_size`, `C` the number of critics and `D` the
length of an action. All gradients of an update are taken at the same parameters, where the paper updates the critics
first: so devices exchange gradients once per update.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from msrl_jax.algorithms.base import Agent, Algorithm, register, training_environment
from msrl_jax.algorithms.configs import checks as check
from msrl_jax.algorithms.loops.mixing import make_mixture, split_batch
from msrl_jax.algorithms.loops.off_policy import Batch, Learner, make_apply_update, off_policy_agent, track
from msrl_jax.algorithms.loops.optimizer import learning_rate_at, make_optimizer
from msrl_jax.algorithms.losses import value_loss
from msrl_jax.algorithms.losses.soft_actor_critic import pessimistic_value, smoothed_action
from msrl_jax.algorithms.networks.actor_and_critics import (
    check_bounded,
    check_config,
    make_actor,
    make_buffer,
    make_critics,
    uniform_actions,
)
from msrl_jax.algorithms.networks.actor_critic import action_transform
from msrl_jax.envs import Environment
from msrl_jax.fragments import fragment


@dataclasses.dataclass(frozen=True)
class TD3Config:
    """Everything about what TD3 computes; where it runs is a distribution policy's concern.

    The defaults are the paper's but for the updates per step, 1/4 instead of 1, and the learning rate.

    Attributes:
      num_envs: environments stepped in parallel, `E`. Usual: 1 to 128.
      unroll_length: steps of every environment per iteration, `T`. Usual: 1 to 8.
      num_updates: updates per iteration, so `num_updates / (num_envs * unroll_length)` per step. Usual: 1/8 to 1 per step.
      batch_size: transitions per update, `B`. Usual: 256.
      capacity: steps that the buffer holds. Usual: 1e5 to 1e6.
      learning_starts: steps, of uniformly random actions, before the first update. Usual: 1e3 to 25e3.
      n_step: rewards in a target. Usual: 1.
      learning_rate: step size of Adam, for actor and critics. Usual: 3e-4 to 1e-3.
      anneal_learning_rate: whether the learning rate falls linearly to 0 over `total_steps`. Usual: False.
      discount: the factor per step. Usual: 0.99.
      tau: by which share the targets move towards actor and critics. Usual: 0.005.
      num_critics: critics, the least of whose values counts in a target, `C`. Usual: 2.
      policy_period: updates of the critics per update of the actor and the targets. Usual: 2.
      exploration_noise: deviation of the noise on actions, which reach from -1 to 1. Usual: 0.1.
      policy_noise: deviation of the noise on the target actor's actions. Usual: 0.2, or 0.
      noise_clip: how far that noise may reach. Usual: 0.5.
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
    num_updates: int = 8
    batch_size: int = 256
    capacity: int = 200_000
    learning_starts: int = 1000
    n_step: int = 1
    learning_rate: float = 1e-3
    anneal_learning_rate: bool = False
    discount: float = 0.99
    tau: float = 0.005
    num_critics: int = 2
    policy_period: int = 2
    exploration_noise: float = 0.1
    policy_noise: float = 0.2
    noise_clip: float = 0.5
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
        check.check_integers(self, 1, "num_critics", "policy_period")
        check.check_numbers(self, "exploration_noise", "policy_noise", "noise_clip", low=0.0)


def build(env: Environment, config: TD3Config, name: str = "td3") -> Agent:
    """Builds TD3 for one environment.

    Args:
      env: the environment; its action space is a bounded `Box` of floats.
      config: what to compute.
      name: what errors call the algorithm.

    Returns:
      The agent. It is deterministic outside of training: a key does not change how it acts.

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
    check_bounded(name, space)
    size: int = math.prod(space.shape)  # pyright: ignore[reportAssignmentType]
    actor = make_actor(venv.observation_space, size, config)
    critics = make_critics(venv.observation_space, space, config.num_critics, config)
    buffer = make_buffer(venv, jax.ShapeDtypeStruct((size,), jnp.float32), split_batch(config)[0])
    optimizer = make_optimizer("adam", max_grad_norm=config.max_grad_norm, epsilon=1e-8)
    apply_update = make_apply_update(optimizer)
    steps_per_iteration = config.num_envs * config.unroll_length

    def policy(actor_params, obs):
        return jnp.tanh(actor.apply(actor_params, obs))

    def noise(keys):
        return jax.vmap(lambda key: jax.random.normal(key, (size,)))(keys)

    def init(key: jax.Array, obs: jax.Array) -> Learner:
        actor_key, critic_key = jax.random.split(key)
        params = {
            "actor": actor.init(actor_key, obs),
            "critic": critics.init(critic_key, obs, jnp.zeros((config.num_envs, size))),
        }
        return Learner(params, params, {name: optimizer.init(p) for name, p in params.items()})

    def act(params, obs, keys, steps):
        explored = jnp.clip(policy(params["actor"], obs) + config.exploration_noise * noise(keys), -1.0, 1.0)
        return jnp.where(steps < config.learning_starts, uniform_actions(keys, space), explored)

    @fragment(role="learner")
    def gradients(params, target_params, batch, moves):
        seen = batch.experience
        next_action = policy(target_params["actor"], seen.next_obs)
        if config.policy_noise:
            smoothing = config.policy_noise * noise(jax.random.split(batch.key, config.batch_size))
            next_action = smoothed_action(next_action, smoothing, config.noise_clip)
        next_q = pessimistic_value(critics.apply(target_params["critic"], seen.next_obs, next_action))
        target = seen.reward + seen.discount * next_q

        def critic_loss(critic):
            q = critics.apply(critic, seen.obs, seen.action)
            losses = batch.weight * value_loss(q, target).sum(0)
            return losses.mean(), (target - q.mean(0), q.mean())

        def actor_loss(actor):
            first = jax.tree.map(lambda x: x[:1], params["critic"])
            return -critics.apply(first, seen.obs, policy(actor, seen.obs)).mean()

        (critic, (td_error, q)), critic_grads = jax.value_and_grad(critic_loss, has_aux=True)(params["critic"])
        loss, actor_grads = jax.lax.cond(
            moves, jax.value_and_grad(actor_loss), lambda p: (jnp.float32(0), jax.tree.map(jnp.zeros_like, p)), params["actor"]
        )
        stats = {"critic_loss": critic, "actor_loss": loss * config.policy_period, "q": q}
        return {"actor": actor_grads, "critic": critic_grads}, td_error, stats

    def update(learner: Learner, batch: Batch, count: jax.Array, ready: jax.Array):
        moves = ready & (count % config.policy_period == 0)
        grads, td_error, stats = gradients(learner.params, learner.target_params, batch, moves)
        anneal_over = config.total_steps if config.anneal_learning_rate else None
        rate = learning_rate_at(count // config.num_updates, config.learning_rate, steps_per_iteration, anneal_over)
        params, opt_state = {}, {}
        for part, due in (("actor", moves), ("critic", ready)):
            params[part], opt_state[part] = apply_update(
                learner.params[part], learner.opt_state[part], grads[part], rate, due
            )
        target = track(learner.target_params, params, jnp.where(moves, config.tau, 0.0))
        return Learner(params, target, opt_state), td_error, stats

    return off_policy_agent(
        venv, buffer, init=init, act=act, update=update, choose_action=lambda params, obs, key: policy(params["actor"], obs),
        to_env_action=action_transform(space), unroll_length=config.unroll_length, num_updates=config.num_updates,
        batch_size=config.batch_size, mixture=make_mixture(env, config),
    )  # fmt: skip


TD3 = register(Algorithm("td3", TD3Config, build))
