"""PPO with a recurrent network, for tasks where one observation is not enough (arXiv 1707.06347).

In the shape descriptions, `T` is `unroll_length`, `E` is `num_envs`, `M` is `num_minibatches` and `H` is `memory_size`.
Sequences are whole unrolls; gradients flow back to the first step of an unroll. A minibatch holds one environment from every
group of `M` adjacent ones. So a shuffle stays within groups, and moves nothing between devices that hold whole groups.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from msrl_jax.algorithms.base import Agent, Algorithm, Metrics, logical_axes, register, training_environment
from msrl_jax.algorithms.configs.base import Tunable
from msrl_jax.algorithms.configs.loss import ProximalConfig
from msrl_jax.algorithms.configs.network import RecurrentConfig
from msrl_jax.algorithms.configs.optimizer import OptimizerConfig
from msrl_jax.algorithms.configs.rollout import OnPolicyConfig
from msrl_jax.algorithms.loops.acting import next_values, parameter_age, split_keys, truncated_values
from msrl_jax.algorithms.loops.optimizer import annealed_learning_rate, make_optimizer
from msrl_jax.algorithms.loops.proximal import pick, proximal_updates, shuffled_members
from msrl_jax.algorithms.loops.unrolling import unroll
from msrl_jax.algorithms.losses.policy_gradient import ppo_loss
from msrl_jax.algorithms.networks.actor_critic import action_transform
from msrl_jax.algorithms.networks.cores import Carry, forget
from msrl_jax.algorithms.networks.distributions import choose
from msrl_jax.algorithms.networks.recurrent import recurrent_actor_critic
from msrl_jax.algorithms.returns import gae, standardize
from msrl_jax.counters import Counter, advance, counter
from msrl_jax.envs import Environment
from msrl_jax.fragments import fragment


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentPPOConfig(RecurrentConfig, OptimizerConfig, ProximalConfig, OnPolicyConfig):
    """What recurrent PPO computes; a distribution policy decides where it runs.

    Attributes:
      num_envs: environments stepped in parallel, `E`; a multiple of `num_minibatches` times the number of devices that the
        environments are split over. Usual: 16 to 4096.
      unroll_length: steps of every environment per iteration, `T`; gradients flow back through at most as many steps.
        Usual: 16 to 256.
      num_minibatches: updates per pass. Usual: 1 to 8.
    """

    unroll_length: int = 64
    num_minibatches: int = 4
    learning_rate: Tunable = 1e-3
    max_grad_norm: Tunable = 0.5

    def check(self) -> None:
        """Raises ValueError unless `num_minibatches` divides `num_envs`."""
        if self.num_envs % self.num_minibatches:
            above = self.num_envs + -self.num_envs % self.num_minibatches
            raise ValueError(
                f"{type(self).__name__}.num_envs={self.num_envs} cannot be split into "
                f"num_minibatches={self.num_minibatches} groups of whole sequences; use num_envs={above}, or a "
                "num_minibatches that divides it"
            )


class RecurrentPPOState(NamedTuple):
    """The state of a run.

    Attributes:
      params: parameters of the `RecurrentNetwork`.
      opt_state: state of the optimizer.
      iteration: iterations done.
      key: the learner's key, which shuffles. shape=()
      actor_keys: one key per environment, which samples actions. shape=(E,)
      env_state: state of the vector environment.
      obs: the observations for the next actions. shape=(E, ...)
      is_first: whether these observations are the first of an episode. shape=(E,), dtype=bool
      carry: the recurrent state of the actors. shape=(E, H) each
    """

    params: Any
    opt_state: optax.OptState
    iteration: Counter
    key: jax.Array
    actor_keys: jax.Array
    env_state: Any
    obs: jax.Array
    is_first: jax.Array
    carry: Carry


class Sequences(NamedTuple):
    """The experience of an unroll; every leaf is `[T, E, ...]`.

    Attributes:
      obs: the observations at every step.
      is_first: whether an observation is the first of an episode.
      action: the policy's actions, before `action_transform`.
      log_prob: log-probabilities of the actions under the policy that acted.
      value: the values of the network that acted.
      reward: rewards.
      terminated: whether the episode ended in a terminal state.
      truncated: whether the episode was cut short.
      present: which steps count; all if None.
    """

    obs: jax.Array
    is_first: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    present: jax.Array | None


def build(env: Environment, config: RecurrentPPOConfig) -> Agent:
    """Builds recurrent PPO for one environment.

    Args:
      env: the environment; its action space is `Discrete`, or a `Box` of floats or of integers.
      config: the settings of the algorithm.

    Returns:
      The agent; it acts with a carry.

    Raises:
      ValueError: if the config anneals the learning rate without `total_steps`, or if the network does not fit.
      TypeError: if a space is not supported.
    """
    config.check_annealing()
    venv = training_environment(env, config)
    network = recurrent_actor_critic(venv.observation_space, venv.action_space, config)
    to_env_action = action_transform(venv.action_space)
    optimizer = make_optimizer("adam", max_grad_norm=config.max_grad_norm, epsilon=1e-5)

    def init(key: jax.Array) -> RecurrentPPOState:
        params_key, env_key, actor_key, learner_key = jax.random.split(key, 4)
        env_state, obs = venv.reset(env_key)
        params = network.init(params_key)
        return RecurrentPPOState(
            params=params,
            opt_state=optimizer.init(params),
            iteration=counter(),
            key=learner_key,
            actor_keys=jax.random.split(actor_key, config.num_envs),
            env_state=env_state,
            obs=obs,
            is_first=jnp.ones(config.num_envs, bool),
            carry=network.initial_carry((config.num_envs,)),
        )

    axes = logical_axes(
        RecurrentPPOState,
        params=P(),
        opt_state=P(),
        iteration=P(),
        key=P(),
        actor_keys=P("env"),
        env_state=venv.axes,
        obs=P("env"),
        is_first=P("env"),
        carry=P("env"),
    )

    @fragment(role="actor")
    def draw_keys(keys):
        return split_keys(keys, config.unroll_length)

    @fragment(role="actor")
    def act(params, obs, is_first, carry, keys):
        (policy, value), carry = network.step(params, obs, forget(is_first, carry))
        action = policy.sample(keys)
        return action, policy.log_prob(action), value, carry

    @fragment(role="env")
    def env_step(env_state, action):
        return venv.step(env_state, to_env_action(action))

    # The actors compute the values of the last observations, so that numbers cross to the learner and carries do not. The
    # actors also read the version of their parameters here, the lower word of the learner's counter.
    @fragment(role="actor")
    def bootstrap(params, version, final_obs, carries, truncated):
        value = lambda final: network.step(params, *final)[0][1]  # noqa: E731
        return truncated_values(value, (final_obs, carries), truncated, also_last=True), version

    pop_episodes = fragment(role="env", name="pop_episodes")(venv.pop_episodes)

    @fragment(role="learner")
    def estimate_advantages(experience, bootstrap_value):
        t = experience
        next_value = next_values(t.value, bootstrap_value[-1], bootstrap_value, t.truncated)
        advantage = gae(
            t.reward, t.value, next_value, t.terminated, t.truncated, t.present,
            discount=config.discount, gae_lambda=config.gae_lambda,
        )  # fmt: skip
        target = t.value + advantage
        if config.normalize_advantage == "batch":
            advantage = standardize(advantage, t.present)
        return advantage, target

    @fragment(role="learner")
    def gradients(params, batch, carry, chosen):
        minibatch, advantage, target = jax.tree.map(lambda x: pick(x, chosen), batch)
        carry = tuple(pick(array[None], chosen)[0] for array in carry)
        if config.normalize_advantage == "minibatch":
            advantage = standardize(advantage, minibatch.present)

        def loss(params):
            (policy, value), _ = network.unroll(params, minibatch.obs, minibatch.is_first, carry)
            return ppo_loss(
                policy,
                value,
                action=minibatch.action,
                log_prob=minibatch.log_prob,
                advantage=advantage,
                old_value=minibatch.value,
                target=target,
                config=config,
                counts=minibatch.present,
            )

        return jax.grad(loss, has_aux=True)(params)

    run_updates = proximal_updates(optimizer, gradients, config.target_kl)

    @fragment(role="learner")
    def learn(params, opt_state, iteration, key, experience, carry, bootstrap_value, version):
        batch = (experience, *estimate_advantages(experience, bootstrap_value))
        learning_rate = annealed_learning_rate(config, iteration, config.steps_per_iteration)
        key, minibatches = shuffled_members(
            key, num_envs=config.num_envs, num_epochs=config.num_epochs, num_minibatches=config.num_minibatches
        )
        params, opt_state, metrics = run_updates(params, opt_state, minibatches, learning_rate, batch, carry)
        metrics |= {"learning_rate": learning_rate, "parameter_age": parameter_age(iteration, version)}
        return params, opt_state, advance(iteration), key, metrics

    def iteration(state: RecurrentPPOState) -> tuple[RecurrentPPOState, Metrics]:
        def step(before, keys):
            env_state, obs, is_first, carry = before
            action, log_prob, value, carry = act(state.params, obs, is_first, carry, keys)
            env_state, t = env_step(env_state, action)
            experience = Sequences(obs, is_first, action, log_prob, value, t.reward, t.terminated, t.truncated, t.present)
            return (env_state, t.obs, t.terminated | t.truncated, carry), (experience, t.final_obs, carry)

        actor_keys, keys = draw_keys(state.actor_keys)
        start = state.env_state, state.obs, state.is_first, state.carry
        (env_state, obs, is_first, carry), (experience, final_obs, carries) = unroll(
            step, start, keys, axes=(venv.axes, *[P("env")] * 3), groups=config.env_groups
        )
        bootstrap_value, version = bootstrap(state.params, state.iteration.low, final_obs, carries, experience.truncated)
        env_state, episodes = pop_episodes(env_state)
        params, opt_state, count, key, metrics = learn(
            state.params, state.opt_state, state.iteration, state.key, experience, state.carry, bootstrap_value, version
        )
        after = RecurrentPPOState(
            params=params,
            opt_state=opt_state,
            iteration=count,
            key=key,
            actor_keys=actor_keys,
            env_state=env_state,
            obs=obs,
            is_first=is_first,
            carry=carry,
        )
        return after, {**metrics, **episodes}

    def choose_action(state: RecurrentPPOState, obs: jax.Array, key: jax.Array | None, carry: Carry):
        (policy, _), carry = network.step(state.params, obs, carry)
        return to_env_action(choose(policy, key)), carry

    return Agent(
        init=init,
        iteration=iteration,
        act=choose_action,
        axes=axes,
        steps_per_iteration=config.steps_per_iteration,
        updates_per_iteration=config.num_epochs * config.num_minibatches,
        env=venv,
        initial_carry=lambda num_envs: network.initial_carry((num_envs,)),
        env_group=math.lcm(config.num_minibatches, config.env_groups),
    )


RecurrentPPO = register(Algorithm("recurrent_ppo", RecurrentPPOConfig, build))
