"""Advantage actor-critic (A2C): the synchronous form of A3C (Mnih et al., 2016, arXiv 1602.01783).

Every iteration makes one update from the unrolls of all environments. In the shape descriptions, `T` is `unroll_length`
and `E` is `num_envs`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax

from msrl_jax.algorithms.base import Agent, Algorithm, register, training_environment
from msrl_jax.algorithms.configs.loss import ActorCriticLossConfig, AdvantageConfig
from msrl_jax.algorithms.configs.network import ActorCriticConfig
from msrl_jax.algorithms.configs.optimizer import RMSPropConfig
from msrl_jax.algorithms.configs.rollout import OnPolicyConfig
from msrl_jax.algorithms.loops.acting import Trajectory, evaluate, next_values
from msrl_jax.algorithms.loops.optimizer import make_optimizer
from msrl_jax.algorithms.loops.single_update import single_update_agent
from msrl_jax.algorithms.losses import policy_gradient_loss, value_loss
from msrl_jax.algorithms.networks.actor_critic import ActorCritic, actor_critic
from msrl_jax.algorithms.returns import gae, standardize
from msrl_jax.envs import Environment
from msrl_jax.fragments import fragment


@dataclasses.dataclass(frozen=True, kw_only=True)
class A2CConfig(ActorCriticConfig, RMSPropConfig, AdvantageConfig, ActorCriticLossConfig, OnPolicyConfig):
    """Everything about what A2C computes; where it runs is a distribution policy's concern.

    Attributes:
      unroll_length: steps of every environment per iteration, `T`. Usual: 5 to 32.
      gae_lambda: bias (0) against variance (1) of the advantages; 1 makes them the n-step advantages of the paper, as
        long as the unroll allows. Usual: 1, or 0.95.
      normalize_advantage: over what advantages are standardized: the "batch" of an update, or "none". Usual: "none".
    """

    unroll_length: int = 16
    learning_rate: float = 2e-3
    max_grad_norm: float = 0.5
    normalize_advantage: Literal["batch", "none"] = "none"


def make_gradients(
    network: ActorCritic,
    *,
    discount: float,
    gae_lambda: float,
    entropy_coef: float,
    value_coef: float,
    normalize_advantage: bool,
) -> Callable[[Any, Trajectory, jax.Array, jax.Array], tuple[Any, dict[str, jax.Array]]]:
    """Makes the function that computes the gradient of an advantage actor-critic, A2C's and A3C's alike.

    Args:
      network: the network.
      discount: the factor per step.
      gae_lambda: bias (0) against variance (1) of the advantages.
      entropy_coef: weight of the entropy bonus.
      value_coef: weight of the value loss.
      normalize_advantage: whether advantages are standardized over the trajectory.

    Returns:
      `(params, trajectory [T, E, ...], last_obs [E, ...], final_value [T, E]) -> (gradient, statistics)`.
    """

    def gradients(params, trajectory, last_obs, final_value):
        def loss(params):
            log_prob, entropy, value = evaluate(network, params, trajectory)
            now = jax.lax.stop_gradient(value)
            last_value = jax.lax.stop_gradient(network.value(params, last_obs))
            advantage = gae(
                trajectory.reward, now, next_values(now, last_value, final_value, trajectory.truncated),
                trajectory.terminated, trajectory.truncated, discount=discount, gae_lambda=gae_lambda,
            )  # fmt: skip
            target = now + advantage
            if normalize_advantage:
                advantage = standardize(advantage)
            stats = {
                "policy_loss": policy_gradient_loss(log_prob, advantage).mean(),
                "value_loss": value_loss(value, target).mean(),
                "entropy": entropy.mean(),
            }
            total = stats["policy_loss"] + value_coef * stats["value_loss"]
            return total - entropy_coef * stats["entropy"], stats

        return jax.grad(loss, has_aux=True)(params)

    return gradients


def build(env: Environment, config: A2CConfig) -> Agent:
    """Builds A2C for one environment.

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
    optimizer = make_optimizer(
        config.optimizer, max_grad_norm=config.max_grad_norm, epsilon=config.epsilon, rms_decay=config.rms_decay
    )
    gradients = fragment(role="learner", name="gradients")(
        make_gradients(
            network, discount=config.discount, gae_lambda=config.gae_lambda, entropy_coef=config.entropy_coef,
            value_coef=config.value_coef, normalize_advantage=config.normalize_advantage == "batch",
        )
    )  # fmt: skip

    return single_update_agent(
        venv, network, optimizer, gradients, unroll_length=config.unroll_length, learning_rate=config.learning_rate,
        anneal_over=config.total_steps if config.anneal_learning_rate else None,
    )  # fmt: skip


A2C = register(Algorithm("a2c", A2CConfig, build))
