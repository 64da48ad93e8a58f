"""Options of off-policy algorithms: exploration, predictions, targets and replay.

In the shape descriptions, `E` denotes the number of environments.
"""

import jax
import jax.numpy as jnp

from msrl_jax.configs.fields import Codec, Tunable, TunableOrNone, field, option, tunable
from msrl_jax.fragments.counters import Counter, fraction
from msrl_jax.replay.relabelling import Strategy


@option
class Annealed:
    """Epsilon falls linearly from 1 over the first steps."""

    steps: int = field(default=10_000, doc="environment steps until epsilon is final. Usual: a tenth of the run.")
    final: Tunable = tunable(default=0.05, low=0, high=1, doc="epsilon after these steps. Usual: 0.01 to 0.1.")

    def epsilon(self, steps: Counter, num_envs: int) -> jax.Array:
        """Returns the probability of random actions after `steps`. `[]`"""
        left = 1 - fraction(steps, 1, self.steps)  # a fraction, because a count may overflow
        return (1.0 - self.final) * left + self.final


@option
class PerEnv:
    """Epsilon is constant, with a different value in every environment (Horgan et al., 2018, arXiv 1803.00933)."""

    base: Tunable = tunable(default=0.4, low=0, high=1, doc="environment `i` has `base ** (1 + 7i/(E - 1))`. Usual: 0.4.")

    def epsilon(self, steps: Counter, num_envs: int) -> jax.Array:
        """Returns the probabilities of random actions. `[E]`"""
        return self.base ** (1 + 7 * jnp.arange(num_envs) / max(num_envs - 1, 1))


@option
class Expected:
    """Predicts the expected return; with several critics, uses the lowest (arXiv 1802.09477)."""

    huber_delta: TunableOrNone = tunable(
        default=None, above=0, doc="errors above it count linearly (Huber). Usual: None, or 1."
    )


@option
class C51:
    """Predicts probabilities of atoms (Bellemare et al., 2017, arXiv 1707.06887)."""

    v_min: TunableOrNone = tunable(default=None, doc="lowest atom; None: `-1 / (1 - discount)`. Usual: lowest return.")
    v_max: TunableOrNone = tunable(default=None, doc="highest atom; None: `1 / (1 - discount)`. Usual: highest return.")
    num_atoms: int = field(default=51, low=2, doc="number of atoms, `N`. Usual: 51 to 251.")

    def support(self, discount: float) -> tuple[float, float]:
        """Returns the lowest and the highest atom."""
        v_min = -1 / (1 - discount) if self.v_min is None else self.v_min
        return v_min, 1 / (1 - discount) if self.v_max is None else self.v_max


@option
class QR:
    """Predicts quantiles (Dabney et al., 2017, arXiv 1710.10044), which need a higher learning rate and a slower target.

    For CartPole-v1, use `learning_rate=5e-4` and `tau=0.005`.
    """

    num_quantiles: int = field(default=51, low=2, doc="number of quantiles, `N`. Usual: 32 to 200.")


@option
class IQN:
    """Predicts quantiles at random fractions (Dabney et al., 2018, arXiv 1806.06923)."""

    num_fractions: int = field(default=8, doc="random fractions of an example, `N` in the paper. Usual: 8 to 64.")
    num_target_fractions: int = field(default=8, doc="random fractions of its target, `N'`. Usual: 8 to 64.")
    num_choice_fractions: int = field(default=32, doc="midpoints whose mean is the value that chooses, `K`. Usual: 32.")


@option
class TQC:
    """Predicts quantiles; targets drop the largest ones (Kuznetsov et al., 2020, arXiv 2005.04269)."""

    num_quantiles: int = field(default=25, low=2, doc="quantiles of a critic, `N`. Usual: 25, with 5 critics.")
    num_dropped: int = field(default=2, low=0, doc="largest quantiles per critic that targets ignore. Usual: 2.")

    def check(self) -> None:
        """Raises ValueError if targets would drop all quantiles."""
        if self.num_dropped >= self.num_quantiles:
            raise ValueError(
                f"TQC.num_dropped={self.num_dropped} leaves no target of the num_quantiles={self.num_quantiles} quantiles of a "
                "critic; use a smaller num_dropped"
            )


@option
class Greedy:
    """Targets use the largest value of the target network."""


@option
class Double:
    """Targets use the target network's value of the online network's greedy action (arXiv 1509.06461)."""


@option
class Munchausen:
    """Adds the log-policy to rewards; targets average over all actions (M-DQN, Vieillard et al., 2020, arXiv 2007.14430)."""

    scale: Tunable = tunable(default=0.9, low=0, high=1, doc="weight of the log-policies. Usual: 0.9.")
    temperature: Tunable = tunable(default=0.03, above=0, doc="of the policy, in units of values. Usual: 0.03.")
    clip: Tunable = tunable(default=-1.0, high=0, doc="smallest log-policy times temperature. Usual: -1.")


@option
class Prioritized:
    """Samples steps with larger TD errors more often (Schaul et al., 2016, arXiv 1511.05952)."""

    alpha: Tunable = tunable(default=0.4, low=0, doc="exponent of priorities; 0 draws uniformly. Usual: 0.4 to 0.9.")
    beta: TunableOrNone = tunable(
        default=0.4, low=0, high=1, doc="exponent of importance weights, rising to 1; None: all are 1. Usual: 0.4 to 0.6."
    )


@option
class Replay:
    """A buffer of steps, from which batches are sampled."""

    capacity: int = field(default=20_000, doc="environment steps that the buffer holds. Usual: 1e4 to 1e6.")
    n_step: int = field(default=1, doc="rewards that a target sums up before it bootstraps. Usual: 1 to 5.")
    learning_starts: int | None = field(default=1000, doc="random steps first; None: enough for a batch. Usual: 1e3 to 5e4.")
    storage: Codec | None = field(default=None, doc='codec of observations ("scaled_uint8": x / 255). Usual: None, "uint8".')
    shards: int | None = field(default=None, doc="parts of the buffer; None: gcd of `batch_size`, `num_envs`, 8. Usual: None.")
    priorities: Prioritized | None = field(default=None, doc="whether larger TD errors are drawn more often. Usual: None.")


@option
class Hindsight:
    """Replaces the goals of some sampled steps with goals achieved later (HER, Andrychowicz et al., 2017, arXiv 1707.01495)."""

    share: float = field(default=0.8, above=0, high=1, doc="share of sampled steps with such goals. Usual: 0.8.")
    by: Strategy = field(default="future", doc='"future", "final", "episode" or "geometric" goal. Usual: "future".')
