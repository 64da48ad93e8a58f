"""Fields that algorithms share that learn from data alone."""

import dataclasses

from msrl_jax.algorithms.configs.checks import check_numbers
from msrl_jax.algorithms.configs.network import Activation, NetworkConfig
from msrl_jax.algorithms.configs.optimizer import OptimizerConfig
from msrl_jax.algorithms.configs.replay import BatchConfig, DataConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfflineConfig(NetworkConfig, OptimizerConfig, BatchConfig, DataConfig):
    """Batches of a data set, of which some episodes are held out.

    Attributes:
      data: a data set, by its path (`msrl_jax.data.load`); from Python, a `msrl_jax.data.Dataset` too. Training needs it.
        Usual: a path.
      validation_fraction: share of the episodes held out, for metrics that start with `validation_`. Usual: 0.1.
      anneal_learning_rate: whether the learning rate falls linearly to 0 over `total_steps`, if they are given. Usual: True.
      max_grad_norm: gradients of each network are scaled down to this norm; None leaves them. Usual: None.
      hidden_sizes: widths of the dense layers. Usual: (64, 64) to (256, 256).
      activation: "tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".
      total_steps: updates over which the learning rate falls; it stays as it is if that is None.
    """

    validation_fraction: float = 0.1
    num_updates: int = 20
    learning_rate: float = 1e-3
    anneal_learning_rate: bool = True
    activation: Activation = "relu"

    def check(self) -> None:
        """Raises ValueError unless the share is in [0, 1)."""
        check_numbers(self, "validation_fraction", low=0.0)
        if self.validation_fraction >= 1:
            raise ValueError(
                f"{type(self).__name__}.validation_fraction={self.validation_fraction!r} holds everything out; use less than 1"
            )
