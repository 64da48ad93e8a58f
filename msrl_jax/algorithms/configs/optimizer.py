"""Fields of the optimizer."""

import dataclasses
from typing import Literal

from msrl_jax.algorithms.configs.base import Config, Tunable
from msrl_jax.algorithms.configs.checks import check_integers, check_numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningRateConfig(Config):
    """The learning rate and its schedule.

    Attributes:
      learning_rate: step size of Adam. Usual: 1e-4 to 1e-3.
      anneal_learning_rate: whether the learning rate falls linearly to 0 over `total_steps`. Usual: True.
      total_steps: environment steps over which the learning rate falls; needed only if it does.
    """

    learning_rate: Tunable
    anneal_learning_rate: bool = False
    total_steps: int | None = None

    def check(self) -> None:
        """Raises ValueError unless the rate is above 0 and the number of steps a positive integer."""
        check_numbers(self, "learning_rate", above=0.0)
        check_integers(self, 1, "total_steps")

    def check_annealing(self) -> None:
        """Raises ValueError if `anneal_learning_rate` is set and `total_steps` is not given.

        This is no part of `check`, because a run fills in `total_steps` after the config is made.
        """
        if self.anneal_learning_rate and self.total_steps is None:
            raise ValueError(
                f"{type(self).__name__}.anneal_learning_rate needs total_steps; give it, or set anneal_learning_rate=False"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(LearningRateConfig):
    """An optimizer with clipped gradients.

    Attributes:
      max_grad_norm: largest global norm of the gradients; larger gradients are scaled down to it. Usual: 0.5.
    """

    max_grad_norm: Tunable | None = None

    def check(self) -> None:
        """Raises ValueError unless the norm is above 0."""
        check_numbers(self, "max_grad_norm", above=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSPropConfig(OptimizerConfig):
    """RMSProp or Adam.

    Attributes:
      optimizer: "rmsprop" or "adam". Usual: "rmsprop".
      learning_rate: step size of the optimizer. Usual: 1e-4 to 7e-3.
      rms_decay: decay per update of RMSProp's running mean of squared gradients. Usual: 0.99.
      epsilon: small number added to the denominator of the update, against division by zero. Usual: 1e-5 to 0.1 for
        RMSProp, 1e-8 to 1e-5 for Adam.
    """

    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    rms_decay: Tunable = 0.99
    epsilon: Tunable = 1e-5

    def check(self) -> None:
        """Raises ValueError unless the decay is in [0, 1] and epsilon above 0."""
        check_numbers(self, "rms_decay", low=0.0, high=1.0)
        check_numbers(self, "epsilon", above=0.0)
