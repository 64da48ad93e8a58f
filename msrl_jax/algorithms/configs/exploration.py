"""Fields that say how agents with discrete actions explore."""

import dataclasses
from typing import Literal

from msrl_jax.algorithms.configs.base import Config
from msrl_jax.algorithms.configs.checks import check_integers, check_numbers, check_periods


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplorationConfig(Config):
    """Random actions with some probability, the best action otherwise.

    Attributes:
      exploration: "annealed", by one probability of random actions that falls; or "per_env", by one for each environment.
        Usual: "annealed", or "per_env" with many environments.
      exploration_steps: environment steps over which the probability falls from 1, linearly. Usual: a tenth of the run.
      final_epsilon: the probability it falls to. Usual: 0.01 to 0.1.
      base_epsilon: of "per_env", where environment `i` acts at random with probability `base_epsilon ** (1 + 7 i / (E - 1))`
        (Horgan et al., 2018, arXiv 1803.00933, section 4.1). Usual: 0.4.
      actor_period: iterations between two refreshes of the parameters that act. Usual: 1.
    """

    exploration: Literal["annealed", "per_env"] = "annealed"
    exploration_steps: int = 10_000
    final_epsilon: float = 0.05
    base_epsilon: float = 0.4
    actor_period: int = 1

    def check(self) -> None:
        """Raises ValueError unless periods are positive integers and probabilities in [0, 1]."""
        check_integers(self, 1, "exploration_steps")
        check_periods(self, "actor_period")
        check_numbers(self, "final_epsilon", "base_epsilon", low=0.0, high=1.0)
