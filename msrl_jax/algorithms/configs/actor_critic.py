"""Fields shared by off-policy actor-critics: SAC, TD3 and DDPG."""

import dataclasses

from msrl_jax.algorithms.configs.base import Tunable
from msrl_jax.algorithms.configs.network import Activation, NetworkConfig
from msrl_jax.algorithms.configs.optimizer import OptimizerConfig
from msrl_jax.algorithms.configs.replay import MixingConfig
from msrl_jax.algorithms.configs.rollout import EnvGroupsConfig
from msrl_jax.algorithms.configs.targets import TargetConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffPolicyActorCriticConfig(NetworkConfig, TargetConfig, OptimizerConfig, MixingConfig, EnvGroupsConfig):
    """Fields shared by SAC, TD3 and DDPG; all networks have the same learning rate.

    Attributes:
      learning_starts: environment steps before the first update; they take uniformly random actions. Usual: 1e3 to 1e4.
      anneal_learning_rate: whether the learning rate falls linearly to 0 over `total_steps`. Usual: False.
      max_grad_norm: largest norm of each network's gradients; larger gradients are scaled down to it. None does not clip.
        Usual: None.
      hidden_sizes: widths of the dense layers. Usual: (256, 256).
      activation: "tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".
    """

    learning_starts: int = 1_000
    learning_rate: Tunable = 1e-3
    hidden_sizes: tuple[int, ...] = (256, 256)
    activation: Activation = "relu"
