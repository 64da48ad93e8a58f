"""Proximal policy optimisation (Schulman et al., 2017, arXiv 1707.06347) with generalised advantage estimation.

In the shape descriptions, `T` is `unroll_length`, `E` is `num_envs` and `B` is `T / num_minibatches`: a minibatch holds
some time steps of all environments, so a shuffle moves nothing along `E`, which may be split over devices.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from msrl_jax.algorithms import config as check
from msrl_jax.algorithms.base import Agent, Algorithm, Metrics, register, training_environment
from msrl_jax.algorithms.losses import approximate_kl, clipped_surrogate_loss, clipped_value_loss, value_loss
from msrl_jax.algorithms.networks import ACTIVATIONS, NETWORKS, action_transform, actor_critic
from msrl_jax.algorithms.returns import gae
from msrl_jax.envs import Environment
from msrl_jax.fragments import fragment


@dataclasses.dataclass(frozen=True)
class PPOConfig:
    """Everything about what PPO computes; where it runs is a distribution policy's concern.

    Attributes:
      num_envs: environments stepped in parallel, `E`. Usual: 8 to 4096.
      unroll_length: steps of every environment per iteration, `T`; a multiple of `num_minibatches`. Usual: 16 to 2048.
      num_epochs: passes over the batch per iteration. Usual: 3 to 10.
      num_minibatches: updates per pass. Usual: 4 to 32.
      learning_rate: step size of Adam. Usual: 1e-4 to 1e-3.
      anneal_learning_rate: whether the learning rate falls linearly to 0 over `total_steps`. Usual: True.
      discount: the factor per step. Usual: 0.99.
      gae_lambda: bias (0) against variance (1) of the advantages. Usual: 0.95.
      clip_ratio: how far from 1 the probability ratio still pays off. Usual: 0.1 to 0.3.
      clip_value: how far a value may move to its profit, in units of the return; None does not clip. Usual: None.
      entropy_coef: weight of the entropy bonus. Usual: 0 to 0.01.
      value_coef: weight of the value loss, which is half a squared error. Usual: 0.5 to 1.
      max_grad_norm: gradients are scaled down to this global norm. Usual: 0.5.
      target_kl: the rest of an iteration's updates is skipped once the estimated divergence from the policy that acted
        exceeds this, in nats; None never skips. Usual: None, or 0.01 to 0.03.
      normalize_advantage: whether advantages are standardised per minibatch. Usual: True.
      normalize_observations: whether observations are standardised by running statistics. Usual: True for locomotion.
      normalize_rewards: whether rewards are divided by the running deviation of the return. Usual: True for locomotion.
      hidden_sizes: widths of the dense layers. Usual: (64, 64), or (128,) after a convolution.
      activation: "tanh", "relu", "elu", "gelu" or "silu". Usual: "tanh", or "relu" after a convolution.
      network: "mlp", "cnn", or "auto", which convolves observations of three dimensions. Usual: "auto".
      shared_torso: whether policy and value share all but their last layers. Usual: False, or True for images.
      total_steps: environment steps over which the learning rate falls; needed only if it does.
    """

    num_envs: int = 32
    unroll_length: int = 64
    num_epochs: int = 4
    num_minibatches: int = 8
    learning_rate: float = 1e-3
    anneal_learning_rate: bool = False
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip_ratio: float = 0.2
    clip_value: float | None = None
    entropy_coef: float = 0.01
    value_coef: float = 0.5
    max_grad_norm: float = 0.5
    target_kl: float | None = None
    normalize_advantage: bool = True
    normalize_observations: bool = False
    normalize_rewards: bool = False
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    network: str = "auto"
    shared_torso: bool = False
    total_steps: int | None = None

    def __post_init__(self):
        check.check_integers(self, 1, "num_envs", "unroll_length", "num_epochs", "num_minibatches", "total_steps")
        check.check_numbers(self, "learning_rate", "clip_ratio", "max_grad_norm", "clip_value", "target_kl", above=0.0)
        check.check_numbers(self, "discount", "gae_lambda", low=0.0, high=1.0)
        check.check_numbers(self, "entropy_coef", "value_coef", low=0.0)
        check.check_booleans(self, "anneal_learning_rate", "normalize_advantage", "normalize_observations")
        check.check_booleans(self, "normalize_rewards", "shared_torso")
        check.check_sizes(self, "hidden_sizes")
        check.check_choice(self, "activation", ACTIVATIONS)
        check.check_choice(self, "network", NETWORKS)
        if self.unroll_length % self.num_minibatches:
            below = self.unroll_length - self.unroll_length % self.num_minibatches
            raise ValueError(
                f"PPOConfig.unroll_length={self.unroll_length} cannot be split into num_minibatches="
                f"{self.num_minibatches} groups of time steps; use unroll_length={below + self.num_minibatches}, or "
                f"a num_minibatches that divides it"
            )


class PPOState(NamedTuple):
    """All of a run.

    Attributes:
      params: parameters of the `ActorCritic`.
      opt_state: state of the optimiser.
      iteration: iterations done. shape=(), dtype=int32
      key: the learner's key, which shuffles. shape=()
      actor_keys: one key per environment, which samples actions. shape=(E,)
      env_state: state of the vector environment.
      obs: the observations to act on next. shape=(E, ...)
    """

    params: Any
    opt_state: optax.OptState
    iteration: jax.Array
    key: jax.Array
    actor_keys: jax.Array
    env_state: Any
    obs: jax.Array


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


def build(env: Environment, config: PPOConfig) -> Agent:
    """Builds PPO for one environment.

    Args:
      env: the environment; its action space is `Discrete` or a `Box` of floats.
      config: what to compute.

    Returns:
      The agent.

    Raises:
      ValueError: if the learning rate is to be annealed and `config.total_steps` is None, or if the network does not fit.
      TypeError: if a space is not supported.
    """
    if config.anneal_learning_rate and config.total_steps is None:
        raise ValueError("PPOConfig.anneal_learning_rate needs total_steps; give it, or set anneal_learning_rate=False")
    venv = training_environment(
        env, config.num_envs, normalize_observations=config.normalize_observations,
        normalize_rewards=config.normalize_rewards, discount=config.discount,
    )  # fmt: skip
    network = actor_critic(
        venv.observation_space, venv.action_space, hidden_sizes=config.hidden_sizes,
        activation=config.activation, network=config.network, shared_torso=config.shared_torso,
    )  # fmt: skip
    to_env_action = action_transform(venv.action_space)
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=1e-5))
    steps_per_iteration = config.num_envs * config.unroll_length

    def init(key: jax.Array) -> PPOState:
        params_key, env_key, actor_key, learner_key = jax.random.split(key, 4)
        env_state, obs = venv.reset(env_key)
        params = network.init(params_key, obs)
        actor_keys = jax.random.split(actor_key, config.num_envs)
        return PPOState(params, optimizer.init(params), jnp.int32(0), learner_key, actor_keys, env_state, obs)

    def unroll_values(params, obs):
        value = network.value(params, flatten(obs))
        return value.reshape(obs.shape[1], obs.shape[0]).T

    # The actors evaluate the observations that ended episodes: a number crosses to the learner, not an observation.
    bootstrap = fragment(role="actor", name="bootstrap")(unroll_values)

    @fragment(role="actor")
    def draw_keys(keys):
        keys = jax.vmap(lambda key: jax.random.split(key, config.unroll_length + 1), out_axes=1)(keys)
        return keys[0], keys[1:]

    @fragment(role="actor")
    def act(params, obs, keys):
        policy = network.policy(params, obs)
        action = policy.sample(keys)
        return action, policy.log_prob(action)

    @fragment(role="env")
    def env_step(env_state, action):
        return venv.step(env_state, to_env_action(action))

    drain = fragment(role="env", name="drain")(venv.drain)

    @fragment(role="learner")
    def estimate_advantages(params, trajectory, last_obs, final_value):
        value = unroll_values(params, trajectory.obs)
        last_value = network.value(params, last_obs)
        next_value = jnp.concatenate([value[1:], last_value[None]])
        next_value = jnp.where(trajectory.truncated, final_value, next_value)
        advantage = gae(
            trajectory.reward, value, next_value, trajectory.terminated, trajectory.truncated,
            discount=config.discount, gae_lambda=config.gae_lambda,
        )  # fmt: skip
        return value, advantage

    @fragment(role="learner")
    def gradients(params, batch, times):
        batch, old_value, advantage = jax.tree.map(lambda x: flatten(x[times]), batch)
        target = old_value + advantage
        if config.normalize_advantage:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)

        def loss(params):
            policy, value = network.apply(params, batch.obs)
            log_ratio = policy.log_prob(batch.action) - batch.log_prob
            if config.clip_value is None:
                value_losses = value_loss(value, target)
            else:
                value_losses = clipped_value_loss(value, old_value, target, config.clip_value)
            stats = {
                "policy_loss": clipped_surrogate_loss(log_ratio, advantage, config.clip_ratio).mean(),
                "value_loss": value_losses.mean(),
                "entropy": policy.entropy().mean(),
                "approx_kl": approximate_kl(log_ratio).mean(),
                "clip_fraction": (jnp.abs(jnp.expm1(log_ratio)) > config.clip_ratio).mean(dtype=jnp.float32),
            }
            total = stats["policy_loss"] + config.value_coef * stats["value_loss"]
            return total - config.entropy_coef * stats["entropy"], stats

        return jax.grad(loss, has_aux=True)(params)

    @fragment(role="server")
    def apply_update(params, opt_state, grads, learning_rate, skip):
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new_params = jax.tree.map(lambda p, u: p - learning_rate * u, params, updates)
        old, new = (params, opt_state), (new_params, new_opt_state)
        if skip is not None:
            new = jax.tree.map(lambda old, new: jnp.where(skip, old, new), old, new)
        return *new, optax.tree.norm(grads)

    @fragment(role="learner")
    def learn(params, opt_state, iteration, key, trajectory, last_obs, final_value):
        batch = (trajectory, *estimate_advantages(params, trajectory, last_obs, final_value))
        key, *epoch_keys = jax.random.split(key, config.num_epochs + 1)
        times = jnp.stack([jax.random.permutation(k, config.unroll_length) for k in epoch_keys])
        times = times.reshape(config.num_epochs * config.num_minibatches, -1)
        learning_rate = jnp.float32(config.learning_rate)
        if config.anneal_learning_rate and config.total_steps is not None:
            learning_rate *= jnp.maximum(1 - iteration / math.ceil(config.total_steps / steps_per_iteration), 0)

        def update(carry, times):
            params, opt_state, skip = carry
            grads, stats = gradients(params, batch, times)
            if config.target_kl is not None:
                skip |= stats["approx_kl"] > config.target_kl
            params, opt_state, grad_norm = apply_update(params, opt_state, grads, learning_rate, skip)
            return (params, opt_state, skip), stats | {"grad_norm": grad_norm}

        skip = None if config.target_kl is None else jnp.bool(False)
        (params, opt_state, _), stats = jax.lax.scan(update, (params, opt_state, skip), times)
        metrics = jax.tree.map(jnp.mean, stats) | {"learning_rate": learning_rate}
        return params, opt_state, iteration + 1, key, metrics

    def iteration(state: PPOState) -> tuple[PPOState, Metrics]:
        def step(carry, keys):
            env_state, obs = carry
            action, log_prob = act(state.params, obs, keys)
            env_state, t = env_step(env_state, action)
            seen = Trajectory(obs, action, log_prob, t.reward, t.terminated, t.truncated)
            return (env_state, t.obs), (seen, t.final_obs)

        actor_keys, keys = draw_keys(state.actor_keys)
        (env_state, obs), (trajectory, final_obs) = jax.lax.scan(step, (state.env_state, state.obs), keys)
        final_value = bootstrap(state.params, final_obs)
        params, opt_state, count, key, metrics = learn(
            state.params, state.opt_state, state.iteration, state.key, trajectory, obs, final_value
        )
        env_state, episodes = drain(env_state)
        return PPOState(params, opt_state, count, key, actor_keys, env_state, obs), metrics | episodes

    def choose_action(state: PPOState, obs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        policy = network.policy(state.params, obs)
        return to_env_action(policy.mode() if key is None else policy.sample(jax.random.split(key, obs.shape[0])))

    axes = PPOState._make([P(), P(), P(), P(), P("env"), venv.axes, P("env")])
    return Agent(init, iteration, choose_action, axes, steps_per_iteration, venv)


def flatten(x: jax.Array) -> jax.Array:
    """Merges `[T, E, ...]` into `[E * T, ...]`: a dimension split over devices stays split if it is the outermost."""
    return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])


PPO = register(Algorithm("ppo", PPOConfig, build))
