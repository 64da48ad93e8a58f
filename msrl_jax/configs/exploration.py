"""Options for exploration by random actions.

In the shape descriptions, `E` denotes the number of environments.
"""

from typing import Protocol

import jax
import jax.numpy as jnp

from msrl_jax.configs.config import Tunable, field, tunable
from msrl_jax.configs.options import option
from msrl_jax.fragments.counters import Counter, fraction


class Exploration(Protocol):
    """The options for the rate of random actions."""

    def epsilon(self, steps: Counter, num_envs: int) -> jax.Array:
        """Returns the probability of random actions after `steps`: `[]`, or `[E]` for one per environment.

        A number below 0 counts as 0, and one above 1 as 1.
        """
        ...


@option(of=Exploration)
class Annealed:
    """Epsilon falls linearly from 1 over the first steps."""

    steps: int = field(default=10_000, doc="environment steps until epsilon is final. Usual: a tenth of the run.")
    final: Tunable = tunable(default=0.05, low=0, high=1, doc="epsilon after these steps. Usual: 0.01 to 0.1.")

    def epsilon(self, steps: Counter, num_envs: int) -> jax.Array:
        """Returns the probability of random actions after `steps`. `[]`"""
        remaining = 1 - fraction(steps, self.steps)  # a fraction, because a count may overflow
        return (1.0 - self.final) * remaining + self.final


@option(of=Exploration)
class PerEnv:
    """Epsilon is constant, with a different value in every environment (Horgan et al., 2018, arXiv 1803.00933)."""

    base: Tunable = tunable(default=0.4, low=0, high=1, doc="environment `i` has `base ** (1 + 7i/(E - 1))`. Usual: 0.4.")

    def epsilon(self, steps: Counter, num_envs: int) -> jax.Array:
        """Returns the probabilities of random actions. `[E]`"""
        return self.base ** (1 + 7 * jnp.arange(num_envs) / max(num_envs - 1, 1))
