"""Fields that algorithms share in which an actor climbs critics that learn from replayed experience."""

import dataclasses

from msrl_jax.algorithms.configs.network import Activation, NetworkConfig
from msrl_jax.algorithms.configs.optimizer import OptimizerConfig
from msrl_jax.algorithms.configs.replay import MixingConfig
from msrl_jax.algorithms.configs.targets import TargetConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffPolicyActorCriticConfig(NetworkConfig, TargetConfig, OptimizerConfig, MixingConfig):
    """What SAC, TD3 and DDPG share. The learning rate is that of all networks.

    Attributes:
      learning_starts: environment steps, of uniformly random actions, before the first update. Usual: 1e3 to 1e4.
      anneal_learning_rate: whether the learning rate falls linearly to 0 over `total_steps`. Usual: False.
      max_grad_norm: gradients of each network are scaled down to this norm; None leaves them. Usual: None.
      hidden_sizes: widths of the dense layers. Usual: (256, 256).
      activation: "tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".
    """

    learning_starts: int = 1_000
    learning_rate: float = 1e-3
    hidden_sizes: tuple[int, ...] = (256, 256)
    activation: Activation = "relu"
