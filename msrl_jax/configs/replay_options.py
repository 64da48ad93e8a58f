"""Options of replay buffers."""

from msrl_jax.configs.config import Tunable, TunableOrNone, field, tunable
from msrl_jax.configs.options import option
from msrl_jax.fragments import codecs
from msrl_jax.replay.relabelling import Strategy


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
    storage: str | None = field(
        default=None, doc='codec of observations: "uint8", "scaled_uint8" (x / 255), "frame_stack(4)". Usual: None.'
    )
    shards: int | None = field(default=None, doc="parts of the buffer; None: gcd of `batch_size`, `num_envs`, 8. Usual: None.")
    priorities: Prioritized | None = field(default=None, doc="whether larger TD errors are drawn more often. Usual: None.")

    def check(self) -> None:
        """Raises ValueError if there is no such codec for storage."""
        if self.storage is not None:
            try:
                codecs.get(self.storage, stored=True)
            except ValueError as error:
                raise ValueError(f"Replay.storage: {error}") from None


@option
class Hindsight:
    """Replaces the goals of some sampled steps with goals achieved later (HER, Andrychowicz et al., 2017, arXiv 1707.01495)."""

    share: float = field(default=0.8, above=0, high=1, doc="share of sampled steps with such goals. Usual: 0.8.")
    by: Strategy = field(default="future", doc='"future", "final", "episode" or "geometric" goal. Usual: "future".')
