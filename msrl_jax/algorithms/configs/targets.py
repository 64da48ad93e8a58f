"""Fields of target networks."""

import dataclasses

from msrl_jax.algorithms.configs.base import Config, Tunable
from msrl_jax.algorithms.configs.checks import check_numbers, check_periods


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig(Config):
    """Target networks that follow the trained networks slowly (Polyak averaging).

    Attributes:
      tau: share of the way that target networks move towards the trained networks per update. Usual: 0.001 to 0.05.
    """

    tau: Tunable = 0.005

    def check(self) -> None:
        """Raises ValueError unless the share is in (0, 1]."""
        check_numbers(self, "tau", above=0.0, high=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeriodicTargetConfig(TargetConfig):
    """A target network that moves every few updates.

    Attributes:
      target_period: updates between two moves of the target network. Usual: 1 with a small `tau`, or 100 to 10,000.
      tau: share of the way that the target network moves towards the online network each time; 1 copies it. Usual: 1, or 0.005
        to 0.05 with a period of 1.
    """

    target_period: int = 1
    tau: Tunable = 0.02

    def check(self) -> None:
        """Raises ValueError unless the period is a positive integer."""
        check_periods(self, "target_period")
