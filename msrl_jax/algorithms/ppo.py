"""Proximal policy optimization (Schulman et al., 2017, arXiv 1707.06347) with generalized advantage estimation.

In the shape descriptions, `T` is `unroll_length`, `E` is `num_envs` and `B` is `T / num_minibatches`: a minibatch holds
some time steps of all environments, so a shuffle moves nothing along `E`, which may be split over devices.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from msrl_jax.algorithms.base import Agent, Algorithm, Metrics, register, training_environment
from msrl_jax.algorithms.configs.loss import ProximalConfig
from msrl_jax.algorithms.configs.network import ActorCriticConfig
from msrl_jax.algorithms.configs.optimizer import OptimizerConfig
from msrl_jax.algorithms.configs.rollout import OnPolicyConfig
from msrl_jax.algorithms.loops import proximal
from msrl_jax.algorithms.loops.acting import flatten, make_choose_action, make_unroll, next_values, stamp, values
from msrl_jax.algorithms.loops.optimizer import learning_rate_at, make_optimizer
from msrl_jax.algorithms.networks.actor_critic import actor_critic
from msrl_jax.algorithms.returns import gae, standardize
from msrl_jax.envs import Environment
from msrl_jax.fragments import fragment


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOConfig(ActorCriticConfig, OptimizerConfig, ProximalConfig, OnPolicyConfig):
    """Everything about what PPO computes; where it runs is a distribution policy's concern.

    Attributes:
      unroll_length: steps of every environment per iteration, `T`; a multiple of `num_minibatches`. Usual: 16 to 2048.
    """

    unroll_length: int = 64
    learning_rate: float = 1e-3
    max_grad_norm: float = 0.5

    def check(self) -> None:
        """Raises ValueError unless the minibatches divide the time steps."""
        if self.unroll_length % self.num_minibatches:
            below = self.unroll_length - self.unroll_length % self.num_minibatches
            raise ValueError(
                f"{type(self).__name__}.unroll_length={self.unroll_length} cannot be split into num_minibatches="
                f"{self.num_minibatches} groups of time steps; use unroll_length={below + self.num_minibatches}, or "
                f"a num_minibatches that divides it"
            )


class PPOState(NamedTuple):
    """All of a run.

    Attributes:
      params: parameters of the `ActorCritic`.
      opt_state: state of the optimizer.
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
    config.check_annealing()
    venv = training_environment(
        env, config.num_envs, normalize_observations=config.normalize_observations,
        normalize_rewards=config.normalize_rewards, discount=config.discount,
    )  # fmt: skip
    network = actor_critic(venv.observation_space, venv.action_space, config, shared_torso=config.shared_torso)
    optimizer = make_optimizer("adam", max_grad_norm=config.max_grad_norm, epsilon=1e-5)
    unroll = make_unroll(venv, network, config.unroll_length)
    steps_per_iteration = config.num_envs * config.unroll_length
    anneal_over = config.total_steps if config.anneal_learning_rate else None

    def init(key: jax.Array) -> PPOState:
        params_key, env_key, actor_key, learner_key = jax.random.split(key, 4)
        env_state, obs = venv.reset(env_key)
        params = network.init(params_key, obs)
        actor_keys = jax.random.split(actor_key, config.num_envs)
        return PPOState(params, optimizer.init(params), jnp.int32(0), learner_key, actor_keys, env_state, obs)

    @fragment(role="learner")
    def estimate_advantages(params, trajectory, last_obs, final_value):
        value = values(network, params, trajectory.obs)
        next_value = next_values(value, network.value(params, last_obs), final_value, trajectory.truncated)
        advantage = gae(
            trajectory.reward, value, next_value, trajectory.terminated, trajectory.truncated,
            discount=config.discount, gae_lambda=config.gae_lambda,
        )  # fmt: skip
        target = value + advantage
        if config.normalize_advantage == "batch":
            advantage = standardize(advantage)
        return advantage, value, target

    @fragment(role="learner")
    def gradients(params, batch, times):
        seen, advantage, old_value, target = jax.tree.map(lambda x: flatten(x[times]), batch)
        if config.normalize_advantage == "minibatch":
            advantage = standardize(advantage)

        def loss(params):
            policy, value = network.apply(params, seen.obs)
            return proximal.surrogate_loss(
                policy, value, action=seen.action, log_prob=seen.log_prob, advantage=advantage, old_value=old_value,
                target=target, clip_ratio=config.clip_ratio, clip_value=config.clip_value, value_coef=config.value_coef,
                entropy_coef=config.entropy_coef,
            )  # fmt: skip

        return jax.grad(loss, has_aux=True)(params)

    @fragment(role="learner")
    def learn(params, opt_state, iteration, key, acted_at, trajectory, last_obs, final_value):
        batch = (trajectory, *estimate_advantages(params, trajectory, last_obs, final_value))
        key, *epoch_keys = jax.random.split(key, config.num_epochs + 1)
        times = jnp.stack([jax.random.permutation(k, config.unroll_length) for k in epoch_keys])
        times = times.reshape(config.num_epochs * config.num_minibatches, -1)
        params, opt_state, metrics = proximal.optimize(
            optimizer, lambda params, times: gradients(params, batch, times), params, opt_state, times,
            learning_rate=learning_rate_at(iteration, config.learning_rate, steps_per_iteration, anneal_over),
            target_kl=config.target_kl,
        )  # fmt: skip
        age = (iteration - acted_at).astype(jnp.float32)
        return params, opt_state, iteration + 1, key, metrics | {"parameter_age": age}

    def iteration(state: PPOState) -> tuple[PPOState, Metrics]:
        acted_at = stamp(state.iteration)
        acted = unroll(state.params, state.actor_keys, state.env_state, state.obs)
        params, opt_state, count, key, metrics = learn(
            state.params, state.opt_state, state.iteration, state.key,
            acted_at, acted.trajectory, acted.obs, acted.final_value,
        )  # fmt: skip
        after = PPOState(params, opt_state, count, key, acted.actor_keys, acted.env_state, acted.obs)
        return after, {**metrics, **acted.episodes}

    axes = PPOState._make([P(), P(), P(), P(), P("env"), venv.axes, P("env")])
    act = make_choose_action(network, venv.action_space)
    return Agent(
        init, iteration, act, axes, steps_per_iteration=steps_per_iteration,
        updates_per_iteration=config.num_epochs * config.num_minibatches, env=venv,
    )  # fmt: skip


PPO = register(Algorithm("ppo", PPOConfig, build))
