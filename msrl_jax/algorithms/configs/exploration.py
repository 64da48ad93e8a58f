"""Fields for exploration with discrete actions."""

import dataclasses
from typing import Literal

from msrl_jax.algorithms.configs.base import Config, Tunable
from msrl_jax.algorithms.configs.checks import check_integers, check_numbers, check_periods


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplorationConfig(Config):
    """Epsilon-greedy exploration: a random action with probability epsilon, otherwise the best action.

    Attributes:
      exploration: "annealed" uses one epsilon that falls during training; "per_env" uses a constant epsilon for each
        environment. Usual: "annealed", or "per_env" with many environments.
      exploration_steps: environment steps over which epsilon falls linearly from 1; for "annealed". Usual: a tenth of the run.
      final_epsilon: epsilon after `exploration_steps`; for "annealed". Usual: 0.01 to 0.1.
      base_epsilon: environment `i` has epsilon `base_epsilon ** (1 + 7 i / (E - 1))` (Horgan et al., 2018, arXiv 1803.00933,
        section 4.1); for "per_env". Usual: 0.4.
      actor_period: iterations between two copies of the learner's parameters to the actors. Usual: 1.
    """

    exploration: Literal["annealed", "per_env"] = "annealed"
    exploration_steps: int = 10_000
    final_epsilon: Tunable = 0.05
    base_epsilon: Tunable = 0.4
    actor_period: int = 1

    def check(self) -> None:
        """Raises ValueError unless periods are positive integers and probabilities in [0, 1]."""
        check_integers(self, 1, "exploration_steps")
        check_periods(self, "actor_period")
        check_numbers(self, "final_epsilon", "base_epsilon", low=0.0, high=1.0)
