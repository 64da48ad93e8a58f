"""Fields shared by the algorithms that learn action values online."""

import dataclasses

from msrl_jax.algorithms.configs.base import Tunable
from msrl_jax.algorithms.configs.checks import check_numbers
from msrl_jax.algorithms.configs.exploration import ExplorationConfig
from msrl_jax.algorithms.configs.optimizer import OptimizerConfig
from msrl_jax.algorithms.configs.replay import OffPolicyConfig, PriorityConfig
from msrl_jax.algorithms.configs.targets import PeriodicTargetConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class QLearningConfig(PeriodicTargetConfig, ExplorationConfig, PriorityConfig, OptimizerConfig, OffPolicyConfig):
    """Action values, learned with Adam from replayed experience.

    Attributes:
      dueling: whether the network has separate streams for values and for advantages. Usual: True for images and sequences.
      huber_delta: the loss is quadratic for errors below this size and linear above it (Huber loss); None is always
        quadratic. Usual: None, or 1 if rewards are clipped.
      adam_epsilon: small number added to Adam's denominator; larger values shorten the steps along small gradients.
        Usual: 1e-8 to 1e-3.
      max_grad_norm: largest global norm of the gradients; larger gradients are scaled down to it. Usual: 10 to 40.
    """

    dueling: bool = False
    huber_delta: Tunable | None = None
    adam_epsilon: Tunable = 1e-5
    max_grad_norm: Tunable = 10.0

    def check(self) -> None:
        """Raises ValueError unless the numbers are above 0."""
        check_numbers(self, "huber_delta", "adam_epsilon", above=0.0)
