"""Behavior cloning: maximizes the likelihood of a data set's actions under the policy (Pomerleau, 1991).

Efficient training of artificial neural networks for autonomous navigation, https://doi.org/10.1162/neco.1991.3.1.88
This file has the loss and the update; the loop is in `loops/offline.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from msrl_jax.algorithms.base import Agent, Algorithm, register
from msrl_jax.algorithms.configs.offline import OfflineConfig
from msrl_jax.algorithms.configs.spaces import check_bounded
from msrl_jax.algorithms.loops.offline import offline_agent, read_data
from msrl_jax.algorithms.loops.optimizer import annealed_learning_rate, make_optimizer
from msrl_jax.algorithms.loops.replaying import Batch, Learner, Progress, Rule, make_apply_update
from msrl_jax.algorithms.networks.action_heads import check_policy_space, has_scale
from msrl_jax.algorithms.networks.cores import Carry
from msrl_jax.algorithms.networks.policies import log_likelihood, make_policy
from msrl_jax.envs import Environment
from msrl_jax.fragments import fragment


@dataclasses.dataclass(frozen=True, kw_only=True)
class BCConfig(OfflineConfig):
    """What behavior cloning computes; a distribution policy decides where it runs."""


def build(env: Environment, config: BCConfig) -> Agent:
    """Builds behavior cloning for one environment.

    Args:
      env: the environment; its action space is `Discrete`, a `Box` of integers, or a bounded `Box` of floats.
      config: the settings of the algorithm.

    Returns:
      The agent.

    Raises:
      ValueError: if the data do not fit the environment, if sizes do not fit, if actions are not bounded, or if an integer of
        an action has too many values.
      TypeError: if a space is not supported.
    """
    space = check_policy_space(env.action_space)
    policy = make_policy(env.observation_space, check_bounded("bc", space) if has_scale(space) else space, config)
    optimizer = make_optimizer("adam", max_grad_norm=config.max_grad_norm, epsilon=1e-8)
    apply_update = make_apply_update(optimizer)

    def init(key: jax.Array, obs: jax.Array) -> Learner:
        params = policy.init(key, obs)
        return Learner(params, (), optimizer.init(params))

    @fragment(role="learner")
    def gradients(params, experience):
        def loss(params):
            distribution = policy.apply(params, experience.obs)
            losses = -log_likelihood(distribution, experience.action)
            return losses.mean(), (losses, {"loss": losses.mean(), "entropy": distribution.entropy().mean()})

        return jax.grad(loss, has_aux=True)(params)

    def update(learner: Learner, batch: Batch, progress: Progress) -> tuple[Learner, jax.Array, Mapping[str, jax.Array]]:
        grads, (losses, stats) = gradients(learner.params, batch.experience)
        rate = annealed_learning_rate(config, progress.update, 1)
        params, opt_state = apply_update(learner.params, learner.opt_state, grads, rate, progress.ready)
        return Learner(params, (), opt_state), losses, stats

    def choose_action(params: Any, obs: jax.Array, key: jax.Array | None, carry: Carry) -> tuple[jax.Array, Carry]:
        return policy.choose_action(params, obs, key), carry

    return offline_agent(env, config, Rule(init, update, choose_action), read_data(env, config))


BC = register(Algorithm("bc", BCConfig, build))
