"""Fields shared by the algorithms that learn from a data set alone."""

import dataclasses

from msrl_jax.algorithms.configs.base import Tunable
from msrl_jax.algorithms.configs.checks import check_numbers
from msrl_jax.algorithms.configs.network import Activation, NetworkConfig
from msrl_jax.algorithms.configs.optimizer import OptimizerConfig
from msrl_jax.algorithms.configs.replay import BatchConfig, DataConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfflineConfig(NetworkConfig, OptimizerConfig, BatchConfig, DataConfig):
    """Batches from a data set; some of its episodes are held out for validation.

    Attributes:
      data: path of the data set, for `msrl_jax.data.load`; in Python also a `msrl_jax.data.Dataset`. Training needs it.
        Usual: a path.
      validation_fraction: share of the episodes held out for the `validation_` metrics. Usual: 0.1.
      anneal_learning_rate: whether the learning rate falls linearly to 0 over `total_steps`; constant if they are not given.
        Usual: True.
      max_grad_norm: largest norm of each network's gradients; larger gradients are scaled down to it. None does not clip.
        Usual: None.
      hidden_sizes: widths of the dense layers. Usual: (64, 64) to (256, 256).
      activation: "tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".
      total_steps: updates over which the learning rate falls; None keeps it constant.
    """

    validation_fraction: float = 0.1
    num_updates: int = 20
    learning_rate: Tunable = 1e-3
    anneal_learning_rate: bool = True
    activation: Activation = "relu"

    def check(self) -> None:
        """Raises ValueError unless the share is in [0, 1)."""
        check_numbers(self, "validation_fraction", low=0.0)
        if self.validation_fraction >= 1:
            raise ValueError(
                f"{type(self).__name__}.validation_fraction={self.validation_fraction!r} holds everything out; use less than 1"
            )
