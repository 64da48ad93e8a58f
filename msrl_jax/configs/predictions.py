"""Options for what critics predict of a return, and for the targets of their predictions."""

from msrl_jax.configs.choices import option
from msrl_jax.configs.config import Tunable, TunableOrNone, field, tunable


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
