"""Conservative Q-learning (Kumar et al., 2020, arXiv 2006.04779), on double DQN for choices and on SAC for vectors.

The values of all actions are pushed down, softly the highest most, and those of the actions in the data up. In the shape
descriptions, `B` is `batch_size`, `K` is `num_updates`, `C` denotes the two critics of SAC and `S` is `num_samples`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.algorithms.base import Agent, Algorithm, register
from msrl_jax.algorithms.configs import checks as check
from msrl_jax.algorithms.dqn import DQNConfig
from msrl_jax.algorithms.loops.off_policy import Batch, Rule
from msrl_jax.algorithms.loops.offline import check_actions, check_config, learning_rate_of, offline_agent
from msrl_jax.algorithms.loops.q_learning import q_learning
from msrl_jax.algorithms.losses.offline import conservative_gap, log_partition
from msrl_jax.algorithms.losses.soft_actor_critic import temperature_loss
from msrl_jax.algorithms.networks.actor_and_critics import make_critics, make_policy, uniform_actions
from msrl_jax.algorithms.networks.distributions import TanhNormal
from msrl_jax.algorithms.sac import SACConfig, soft_actor_critic
from msrl_jax.envs import Discrete, Environment


@dataclasses.dataclass(frozen=True)
class CQLConfig:
    """Everything about what CQL computes; where it runs is a distribution policy's concern.

    What the paper's code does otherwise: it learns the policy at a lower rate than the critics.

    Attributes:
      data: a data set, by its path (`msrl_jax.data.load`); from Python, a `msrl_jax.data.Dataset` too.
        Training needs it. Usual: a path.
      validation_fraction: which part of the episodes is held out, for metrics that start with `validation_`. Usual: 0.1.
      num_updates: updates per iteration, `K`. Usual: 10 to 100.
      batch_size: transitions per update, `B`. Usual: 256.
      learning_rate: step size of Adam, for all that is trained. Usual: 3e-4 to 1e-3.
      anneal_learning_rate: whether the learning rate falls linearly to 0 over `total_steps`, if they are given. Usual: True.
      discount: the factor per step. Usual: 0.99.
      tau: by which share target networks move per update. Usual: 0.005.
      conservative_weight: what it costs that values of other actions lie above those of the data's; None for 0.5 for choices
        and 5 for vectors. The larger rewards are, the larger it should be. Usual: 0.1 to 10.
      target_gap: if given, the weight starts at `conservative_weight` and is learned, so that the values of other actions lie
        that far above those of the data's (the paper's Lagrange variant); for vectors only. Usual: None, or 5 to 10.
      num_samples: actions drawn of each kind (uniform, of the policy now, of the policy one step later) to estimate how high
        values of vectors are, `S`. Usual: 4 to 10.
      initial_temperature: what a nat of entropy is worth at first; for vectors. Usual: 0.1 to 1.
      learn_temperature: whether the temperature is learned; else it stays. Usual: True.
      target_entropy: the entropy to hold, in nats; None for minus the length of an action. Usual: None.
      double: whether the online network chooses the choice that the target network values. Usual: True.
      max_grad_norm: gradients of each network are scaled down to this norm. Usual: 10.
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
    discount: float = 0.99
    tau: float = 0.005
    conservative_weight: float | None = None
    target_gap: float | None = None
    num_samples: int = 4
    initial_temperature: float = 1.0
    learn_temperature: bool = True
    target_entropy: float | None = None
    double: bool = True
    max_grad_norm: float = 10.0
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "relu"
    network: str = "auto"
    storage: str | None = None
    shards: int | None = None
    total_steps: int | None = None

    def __post_init__(self):
        check_config(self)
        check.check_integers(self, 1, "num_samples")
        check.check_numbers(self, "tau", above=0.0, high=1.0)
        check.check_numbers(self, "conservative_weight", low=0.0)
        check.check_numbers(self, "initial_temperature", above=0.0)
        check.check_numbers(self, "target_gap", "target_entropy")
        if self.target_gap is not None and self.conservative_weight == 0:
            raise ValueError("CQLConfig.conservative_weight=0 is no weight to learn from; use one above 0, or target_gap=None")


def build(env: Environment, config: CQLConfig) -> Agent:
    """Builds CQL for one environment.

    Args:
      env: the environment; its action space is `Discrete` or a bounded `Box` of floats.
      config: what to compute.

    Returns:
      The agent.

    Raises:
      ValueError: if the data do not fit the environment, if sizes do not fit, if actions are not bounded, or if a weight is to
        be learned for choices.
      TypeError: if a space is not supported.
    """
    check_actions("cql", env.action_space)
    make_rule = _for_choices if isinstance(env.action_space, Discrete) else _for_vectors
    return offline_agent(env, config, make_rule(env, config), "cql")


def _for_choices(env: Environment, config: CQLConfig) -> Rule:
    if config.target_gap is not None:
        raise ValueError(
            f"CQLConfig.target_gap={config.target_gap} learns a weight, but not for choices ({env.action_space}); use "
            "target_gap=None and a conservative_weight"
        )
    assert isinstance(env.action_space, Discrete)
    weight = 0.5 if config.conservative_weight is None else config.conservative_weight

    def penalty(q: jax.Array, action: jax.Array):
        gap = conservative_gap(q, action)
        return weight * gap, {"conservative_gap": gap.mean()}

    learns = _common_fields(config, DQNConfig)
    return q_learning(env.observation_space, env.action_space, learns, learning_rate_of(config), penalty)


def _for_vectors(env: Environment, config: CQLConfig) -> Rule:
    policy = make_policy(env.observation_space, env.action_space, config)
    critics = make_critics(env.observation_space, env.action_space, 2, config)
    size: int = math.prod(env.action_space.shape)  # pyright: ignore[reportAssignmentType]
    first_weight = 5.0 if config.conservative_weight is None else config.conservative_weight

    def sample_actions(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Actions `[B, 3 * S, D]`, and the logarithms of the densities that they were drawn with."""
        seen, count = batch.experience, config.num_samples
        # The first two rows are the keys that SAC draws with.
        keys = jax.random.split(batch.key, (2 + 3 * count, len(seen.reward)))[2:].T
        uniform = jax.vmap(lambda keys: uniform_actions(keys, env.action_space))(keys[:, :count])
        drawn = [(uniform, jnp.full(uniform.shape[:-1], -size * math.log(2)))]
        for i, obs in enumerate((seen.obs, seen.next_obs), 1):
            distribution = policy.apply(params["actor"], obs[:, None])
            assert isinstance(distribution, TanhNormal)
            drawn.append(distribution.sample_and_log_prob(keys[:, i * count : (i + 1) * count]))
        action, log_prob = (jnp.concatenate(parts, 1) for parts in zip(*drawn, strict=True))
        return action, log_prob

    def penalty(trained: Any, params: Any, batch: Batch, q: jax.Array):
        action, log_prob = sample_actions(params, batch)
        obs = batch.experience.obs
        many = jnp.broadcast_to(obs[:, None], (*action.shape[:2], *obs.shape[1:]))
        gap = log_partition(critics.apply(trained["critic"], many, action), log_prob) - q
        if config.target_gap is None:
            return first_weight * gap.sum(0).mean(), {"conservative_gap": gap.mean()}
        weight = jnp.exp(params["log_weight"])
        weight_loss = temperature_loss(trained["log_weight"], gap, -config.target_gap).mean()
        loss = weight * (gap - config.target_gap).sum(0).mean() + weight_loss
        return loss, {"conservative_gap": gap.mean(), "conservative_weight": weight}

    more = {} if config.target_gap is None else {"log_weight": jnp.log(jnp.float32(first_weight))}
    learns = _common_fields(config, SACConfig)
    return soft_actor_critic(policy, critics, env.action_space, learns, learning_rate_of(config), penalty, more)


def _common_fields(config: CQLConfig, kind: type) -> Any:
    """A config of another algorithm with the fields that both have."""
    names = {field.name for field in dataclasses.fields(kind)} & {field.name for field in dataclasses.fields(config)}
    return kind(**{name: getattr(config, name) for name in names})


CQL = register(Algorithm("cql", CQLConfig, build))
