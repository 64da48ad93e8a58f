"""IMPALA (Espeholt et al., 2018, arXiv 1802.01561): an actor-critic whose actors may lag behind, corrected by V-trace.

Every iteration makes one update from the unrolls of all environments. With replay it makes several, each from a batch drawn
uniformly from those kept; V-trace corrects for the age of these batches too. How old the parameters are that acted is the
distribution policy's choice: its staleness, 0 under a synchronous one. In the shape descriptions, `T` is `unroll_length`
and `E` is `num_envs`.
"""

import dataclasses
from typing import Literal

import jax

from msrl_jax.algorithms.base import Agent, Algorithm, register, training_environment
from msrl_jax.algorithms.configs.checks import check_integers, check_numbers
from msrl_jax.algorithms.configs.loss import ActorCriticLossConfig
from msrl_jax.algorithms.configs.network import ActorCriticConfig
from msrl_jax.algorithms.configs.optimizer import RMSPropConfig
from msrl_jax.algorithms.configs.rollout import OnPolicyConfig
from msrl_jax.algorithms.loops.acting import evaluate, next_values
from msrl_jax.algorithms.loops.optimizer import make_optimizer
from msrl_jax.algorithms.loops.single_update import single_update_agent
from msrl_jax.algorithms.losses import approximate_kl, policy_gradient_loss, value_loss
from msrl_jax.algorithms.networks.actor_critic import actor_critic
from msrl_jax.algorithms.returns import standardize, vtrace
from msrl_jax.envs import Environment
from msrl_jax.fragments import fragment


@dataclasses.dataclass(frozen=True, kw_only=True)
class IMPALAConfig(ActorCriticConfig, RMSPropConfig, ActorCriticLossConfig, OnPolicyConfig):
    """Everything about what IMPALA computes; where it runs, and how stale its actors are, is a distribution policy's concern.

    Attributes:
      unroll_length: steps of every environment per iteration, `T`. Usual: 20 to 100.
      max_grad_norm: gradients are scaled down to this global norm. Usual: 0.5 to 40.
      entropy_coef: weight of the entropy bonus. Usual: 0.001 to 0.01.
      vtrace_lambda: the factor per step by which the traces fall beyond the discount. Usual: 1, or 0.95.
      clip_rho: largest importance weight of an error of the value function. Usual: 1.
      clip_c: largest importance weight of a trace. Usual: 1.
      clip_pg_rho: largest importance weight of a policy gradient. Usual: 1.
      normalize_advantage: over what advantages are standardized: the "batch" of an update, or "none". Usual: "none".
      replay_batches: batches that are kept for replay, the newest included; 0 keeps none. Usual: 0, or 10 to 1000.
      num_updates: updates per iteration, each from a batch drawn uniformly from those kept. Usual: 1, or 2 to 4 with replay.
    """

    unroll_length: int = 16
    learning_rate: float = 2e-3
    max_grad_norm: float = 0.5
    vtrace_lambda: float = 0.95
    clip_rho: float = 1.0
    clip_c: float = 1.0
    clip_pg_rho: float = 1.0
    normalize_advantage: Literal["batch", "none"] = "none"
    replay_batches: int = 0
    num_updates: int = 1

    def check(self) -> None:
        """Raises ValueError unless the weights' bounds are positive, and there is a batch for every update."""
        check_numbers(self, "vtrace_lambda", low=0.0, high=1.0)
        check_numbers(self, "clip_rho", "clip_c", "clip_pg_rho", above=0.0)
        check_integers(self, 0, "replay_batches")
        check_integers(self, 1, "num_updates")
        if self.num_updates > 1 and not self.replay_batches:
            raise ValueError(
                f"{type(self).__name__}.num_updates={self.num_updates}: without replay an iteration has one batch to learn "
                "from; use num_updates=1, or replay_batches of at least 1"
            )


def build(env: Environment, config: IMPALAConfig) -> Agent:
    """Builds IMPALA for one environment.

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

    @fragment(role="learner")
    def gradients(params, trajectory, last_obs, final_value):
        def loss(params):
            log_prob, entropy, value = evaluate(network, params, trajectory)
            now, log_ratio = jax.lax.stop_gradient((value, log_prob - trajectory.log_prob))
            last_value = jax.lax.stop_gradient(network.value(params, last_obs))
            target, advantage = vtrace(
                log_ratio, trajectory.reward, now, next_values(now, last_value, final_value, trajectory.truncated),
                trajectory.terminated, trajectory.truncated, discount=config.discount, lambda_=config.vtrace_lambda,
                clip_rho=config.clip_rho, clip_c=config.clip_c, clip_pg_rho=config.clip_pg_rho,
            )  # fmt: skip
            if config.normalize_advantage == "batch":
                advantage = standardize(advantage)
            stats = {
                "policy_loss": policy_gradient_loss(log_prob, advantage).mean(),
                "value_loss": value_loss(value, target).mean(),
                "entropy": entropy.mean(),
                "approx_kl": approximate_kl(log_ratio).mean(),
            }
            total = stats["policy_loss"] + config.value_coef * stats["value_loss"]
            return total - config.entropy_coef * stats["entropy"], stats

        return jax.grad(loss, has_aux=True)(params)

    return single_update_agent(
        venv, network, optimizer, gradients, unroll_length=config.unroll_length, learning_rate=config.learning_rate,
        anneal_over=config.total_steps if config.anneal_learning_rate else None,
        replay_batches=config.replay_batches, num_updates=config.num_updates,
    )  # fmt: skip


IMPALA = register(Algorithm("impala", IMPALAConfig, build))
