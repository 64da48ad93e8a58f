"""Behavior cloning: the policy under which the actions of a data set are most likely (Pomerleau, 1991).

Efficient training of artificial neural networks for autonomous navigation, https://doi.org/10.1162/neco.1991.3.1.88
In the shape descriptions, `B` is `batch_size` and `K` is `num_updates`.
"""

import dataclasses
from collections.abc import Mapping

import jax

from msrl_jax.algorithms.base import Agent, Algorithm, register
from msrl_jax.algorithms.loops.off_policy import Batch, Learner, Rule, make_apply_update
from msrl_jax.algorithms.loops.offline import check_actions, check_config, learning_rate_of, log_likelihood, offline_agent
from msrl_jax.algorithms.loops.optimizer import make_optimizer
from msrl_jax.algorithms.networks.actor_and_critics import make_policy
from msrl_jax.envs import Environment
from msrl_jax.fragments import fragment


@dataclasses.dataclass(frozen=True)
class BCConfig:
    """Everything about what behavior cloning computes; where it runs is a distribution policy's concern.

    Attributes:
      data: a data set, by its path (`msrl_jax.data.load`); from Python, a `msrl_jax.data.Dataset` too.
        Training needs it. Usual: a path.
      validation_fraction: which part of the episodes is held out, for metrics that start with `validation_`. Usual: 0.1.
      num_updates: updates per iteration, `K`. Usual: 10 to 100.
      batch_size: transitions per update, `B`. Usual: 128 to 512.
      learning_rate: step size of Adam. Usual: 1e-4 to 1e-3.
      anneal_learning_rate: whether the learning rate falls linearly to 0 over `total_steps`, if they are given. Usual: True.
      max_grad_norm: gradients are scaled down to this norm; None leaves them. Usual: None.
      hidden_sizes: widths of the dense layers. Usual: (64, 64) to (256, 256).
      activation: "tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".
      network: "mlp", "cnn", or "auto", which convolves observations of three dimensions. Usual: "auto".
      storage: codec of stored observations: "bfloat16", "uint8" or "scaled_uint8"; None stores them as they are. Usual: None.
      shards: parts of the data, which may lie on devices of their own; None for the greatest common divisor of `batch_size`
        and 8. Usual: None.
      total_steps: updates over which the learning rate falls; it stays as it is if that is None.
    """

    data: str | None = None
    validation_fraction: float = 0.1
    num_updates: int = 20
    batch_size: int = 256
    learning_rate: float = 1e-3
    anneal_learning_rate: bool = True
    max_grad_norm: float | None = None
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "relu"
    network: str = "auto"
    storage: str | None = None
    shards: int | None = None
    total_steps: int | None = None

    def __post_init__(self):
        check_config(self)


def build(env: Environment, config: BCConfig) -> Agent:
    """Builds behavior cloning for one environment.

    Args:
      env: the environment; its action space is `Discrete` or a bounded `Box` of floats.
      config: what to compute.

    Returns:
      The agent.

    Raises:
      ValueError: if the data do not fit the environment, if sizes do not fit, or if actions are not bounded.
      TypeError: if a space is not supported.
    """
    check_actions("bc", env.action_space)
    policy = make_policy(env.observation_space, env.action_space, config)
    optimizer = make_optimizer("adam", max_grad_norm=config.max_grad_norm, epsilon=1e-8)
    apply_update, learning_rate = make_apply_update(optimizer), learning_rate_of(config)

    def init(key: jax.Array, obs: jax.Array) -> Learner:
        params = policy.init(key, obs)
        return Learner(params, (), optimizer.init(params))

    @fragment(role="learner")
    def gradients(params, seen):
        def loss(params):
            distribution = policy.apply(params, seen.obs)
            losses = -log_likelihood(distribution, seen.action)
            return losses.mean(), (losses, {"loss": losses.mean(), "entropy": distribution.entropy().mean()})

        return jax.grad(loss, has_aux=True)(params)

    def update(learner: Learner, batch: Batch, count: jax.Array, ready: jax.Array):
        grads, (losses, stats) = gradients(learner.params, batch.experience)
        params, opt_state = apply_update(learner.params, learner.opt_state, grads, learning_rate(count), ready)
        return Learner(params, (), opt_state), losses, stats

    def measure(learner: Learner, batch: Batch) -> Mapping[str, jax.Array]:
        return gradients(learner.params, batch.experience)[1][1]

    return offline_agent(env, config, Rule(init, update, measure, policy.choose_action), "bc")


BC = register(Algorithm("bc", BCConfig, build))
