"""Proximal policy optimization (Schulman et al., 2017, arXiv 1707.06347) with generalized advantage estimation.

In the shape descriptions, `T` is `unroll_length` and `E` is `num_envs`. A minibatch holds `T / num_minibatches` time steps of
all environments, so a shuffle moves nothing along `E`, which may be split over devices.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import PartitionSpec as P

from msrl_jax.algorithms.base import Agent, Algorithm, Metrics, logical_axes, register, training_environment
from msrl_jax.algorithms.configs.base import Tunable
from msrl_jax.algorithms.configs.loss import ProximalConfig
from msrl_jax.algorithms.configs.network import ActorCriticConfig
from msrl_jax.algorithms.configs.optimizer import OptimizerConfig
from msrl_jax.algorithms.configs.rollout import OnPolicyConfig
from msrl_jax.algorithms.loops.acting import (
    Trajectory,
    flatten,
    next_values,
    parameter_age,
    parameter_version,
    split_keys,
    values,
)
from msrl_jax.algorithms.loops.optimizer import annealed_learning_rate, make_optimizer
from msrl_jax.algorithms.loops.proximal import proximal_updates, shuffled_times
from msrl_jax.algorithms.loops.unrolling import unroll
from msrl_jax.algorithms.losses.policy_gradient import ppo_loss
from msrl_jax.algorithms.networks.actor_critic import action_probabilities, action_transform, actor_critic
from msrl_jax.algorithms.networks.distributions import choose
from msrl_jax.algorithms.returns import gae, standardize
from msrl_jax.counters import Counter, advance, counter
from msrl_jax.envs import Environment
from msrl_jax.fragments import fragment


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOConfig(ActorCriticConfig, OptimizerConfig, ProximalConfig, OnPolicyConfig):
    """What PPO computes; a distribution policy decides where it runs.

    Attributes:
      unroll_length: steps of every environment per iteration, `T`; a multiple of `num_minibatches`. Usual: 16 to 2048.
    """

    unroll_length: int = 128
    learning_rate: Tunable = 3e-3
    max_grad_norm: Tunable = 0.5

    def check(self) -> None:
        """Raises ValueError unless `num_minibatches` divides `unroll_length`."""
        if self.unroll_length % self.num_minibatches:
            below = self.unroll_length - self.unroll_length % self.num_minibatches
            raise ValueError(
                f"{type(self).__name__}.unroll_length={self.unroll_length} cannot be split into num_minibatches="
                f"{self.num_minibatches} groups of time steps; use unroll_length={below + self.num_minibatches}, or "
                f"a num_minibatches that divides it"
            )


class PPOState(NamedTuple):
    """The state of a run.

    Attributes:
      params: parameters of the `ActorCritic`.
      opt_state: state of the optimizer.
      iteration: iterations done.
      key: the learner's key, which shuffles. shape=()
      actor_keys: one key per environment, which samples actions. shape=(E,)
      env_state: state of the vector environment.
      obs: the observations for the next actions. shape=(E, ...)
    """

    params: Any
    opt_state: optax.OptState
    iteration: Counter
    key: jax.Array
    actor_keys: jax.Array
    env_state: Any
    obs: jax.Array


class Batch(NamedTuple):
    """The data of an iteration's updates.

    Attributes:
      trajectory: the experience. shape=(T, E, ...)
      advantage: the estimated advantages. shape=(T, E)
      old_value: values of the observations, before the updates. shape=(T, E)
      target: targets of the values. shape=(T, E)
    """

    trajectory: Trajectory
    advantage: jax.Array
    old_value: jax.Array
    target: jax.Array


def build(env: Environment, config: PPOConfig) -> Agent:
    """Builds PPO for one environment.

    Args:
      env: the environment; its action space is `Discrete`, or a `Box` of floats or of integers.
      config: the settings of the algorithm.

    Returns:
      The agent.

    Raises:
      ValueError: if the config anneals the learning rate without `total_steps`, or if the network does not fit.
      TypeError: if a space is not supported.
    """
    config.check_annealing()
    venv = training_environment(env, config)
    network = actor_critic(venv.observation_space, venv.action_space, config, shared_torso=config.shared_torso)
    to_env_action = action_transform(venv.action_space)
    optimizer = make_optimizer("adam", max_grad_norm=config.max_grad_norm, epsilon=1e-5)

    def init(key: jax.Array) -> PPOState:
        params_key, env_key, actor_key, learner_key = jax.random.split(key, 4)
        env_state, obs = venv.reset(env_key)
        params = network.init(params_key, obs)
        return PPOState(
            params=params,
            opt_state=optimizer.init(params),
            iteration=counter(),
            key=learner_key,
            actor_keys=jax.random.split(actor_key, config.num_envs),
            env_state=env_state,
            obs=obs,
        )

    axes = logical_axes(
        PPOState, params=P(), opt_state=P(), iteration=P(), key=P(), actor_keys=P("env"), env_state=venv.axes, obs=P("env")
    )

    @fragment(role="actor")
    def draw_keys(keys):
        return split_keys(keys, config.unroll_length)

    @fragment(role="actor")
    def act(params, obs, keys):
        policy = network.policy(params, obs)
        action = policy.sample(keys)
        return action, policy.log_prob(action)

    @fragment(role="env")
    def env_step(env_state, action):
        return venv.step(env_state, to_env_action(action))

    # The actors compute the values of the last observations, so that numbers cross to the learner and observations do not.
    @fragment(role="actor")
    def bootstrap(params, final_obs):
        return values(network, params, final_obs)

    pop_episodes = fragment(role="env", name="pop_episodes")(venv.pop_episodes)

    @fragment(role="learner")
    def estimate_advantages(params, trajectory, last_obs, bootstrap_value):
        t = trajectory
        value = values(network, params, t.obs)
        next_value = next_values(value, network.value(params, last_obs), bootstrap_value, t.truncated)
        advantage = gae(
            t.reward, value, next_value, t.terminated, t.truncated, t.present,
            discount=config.discount, gae_lambda=config.gae_lambda,
        )  # fmt: skip
        target = value + advantage
        if config.normalize_advantage == "batch":
            advantage = standardize(advantage, t.present)
        return Batch(trajectory, advantage, value, target)

    @fragment(role="learner")
    def gradients(params, batch, times):
        minibatch, advantage, old_value, target = jax.tree.map(lambda x: flatten(x[times]), batch)
        if config.normalize_advantage == "minibatch":
            advantage = standardize(advantage, minibatch.present)

        def loss(params):
            policy, value = network.apply(params, minibatch.obs)
            return ppo_loss(
                policy,
                value,
                action=minibatch.action,
                log_prob=minibatch.log_prob,
                advantage=advantage,
                old_value=old_value,
                target=target,
                config=config,
                counts=minibatch.present,
            )

        return jax.grad(loss, has_aux=True)(params)

    run_updates = proximal_updates(optimizer, gradients, config.target_kl)

    @fragment(role="learner")
    def learn(params, opt_state, iteration, key, trajectory, last_obs, bootstrap_value, version):
        batch = estimate_advantages(params, trajectory, last_obs, bootstrap_value)
        learning_rate = annealed_learning_rate(config, iteration, config.steps_per_iteration)
        key, minibatches = shuffled_times(
            key,
            unroll_length=config.unroll_length,
            num_epochs=config.num_epochs,
            num_minibatches=config.num_minibatches,
        )
        params, opt_state, metrics = run_updates(params, opt_state, minibatches, learning_rate, batch)
        metrics |= {"learning_rate": learning_rate, "parameter_age": parameter_age(iteration, version)}
        return params, opt_state, advance(iteration), key, metrics

    def iteration(state: PPOState) -> tuple[PPOState, Metrics]:
        def step(carry, keys):
            env_state, obs = carry
            action, log_prob = act(state.params, obs, keys)
            env_state, t = env_step(env_state, action)
            experience = Trajectory(obs, action, log_prob, t.reward, t.terminated, t.truncated, t.present)
            return (env_state, t.obs), (experience, t.final_obs)

        version = parameter_version(state.iteration)
        actor_keys, keys = draw_keys(state.actor_keys)
        (env_state, obs), (trajectory, final_obs) = unroll(
            step, (state.env_state, state.obs), keys, axes=(venv.axes, P("env")), groups=config.env_groups
        )
        bootstrap_value = bootstrap(state.params, final_obs)
        env_state, episodes = pop_episodes(env_state)
        params, opt_state, count, key, metrics = learn(
            state.params, state.opt_state, state.iteration, state.key, trajectory, obs, bootstrap_value, version
        )
        after = state._replace(
            params=params, opt_state=opt_state, iteration=count, key=key, actor_keys=actor_keys, env_state=env_state, obs=obs
        )
        return after, {**metrics, **episodes}

    def choose_action(state: PPOState, obs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        return to_env_action(choose(network.policy(state.params, obs), key))

    return Agent(
        init=init,
        iteration=iteration,
        act=choose_action,
        axes=axes,
        steps_per_iteration=config.steps_per_iteration,
        updates_per_iteration=config.num_epochs * config.num_minibatches,
        env=venv,
        env_group=config.env_groups,
        probabilities=action_probabilities(venv.action_space, lambda s, obs: network.policy(s.params, obs)),
    )


PPO = register(Algorithm("ppo", PPOConfig, build))
