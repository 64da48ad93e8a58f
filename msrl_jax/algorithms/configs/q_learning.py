"""Fields that algorithms share that learn action values online."""

import dataclasses

from msrl_jax.algorithms.configs.checks import check_numbers
from msrl_jax.algorithms.configs.exploration import ExplorationConfig
from msrl_jax.algorithms.configs.optimizer import OptimizerConfig
from msrl_jax.algorithms.configs.replay import OffPolicyConfig, PriorityConfig
from msrl_jax.algorithms.configs.targets import PeriodicTargetConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class QLearningConfig(PeriodicTargetConfig, ExplorationConfig, PriorityConfig, OptimizerConfig, OffPolicyConfig):
    """Action values, learned with Adam from replayed experience.

    Attributes:
      dueling: whether the network has streams for values and for advantages. Usual: True for images and sequences.
      huber_delta: the error from which on the loss of a value is no longer quadratic but linear; None never is. Usual: None, or
        1 if rewards are clipped.
      adam_epsilon: what keeps Adam's division finite; larger ones damp steps along small gradients. Usual: 1e-8 to 1e-3.
      max_grad_norm: gradients are scaled down to this global norm. Usual: 10 to 40.
    """

    dueling: bool = False
    huber_delta: float | None = None
    adam_epsilon: float = 1e-5
    max_grad_norm: float = 10.0

    def check(self) -> None:
        """Raises ValueError unless the numbers are above 0."""
        check_numbers(self, "huber_delta", "adam_epsilon", above=0.0)
