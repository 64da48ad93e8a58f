"""Learning rates that adapt to the KL divergence of updates (`kl:TARGET`)."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class AdaptiveRate(NamedTuple):
    """The adaptive learning rate in the state of an optimizer."""

    rate: jax.Array  # shape=(), dtype=float32


@dataclasses.dataclass(frozen=True)
class KL:
    """A learning rate that keeps the KL divergence of updates near a target, as in rsl_rl."""

    target: float
    start: float = 1e-3
    low: float = 1e-5
    high: float = 1e-2

    def transformation(self) -> optax.GradientTransformation:
        """Returns the transformation that multiplies updates by the adaptive rate, which it keeps in its state."""
        return optax.GradientTransformation(
            lambda params: AdaptiveRate(jnp.float32(self.start)),
            lambda updates, state, params=None: (jax.tree.map(lambda u: state.rate * u, updates), state),  # type: ignore[arg-type]
        )

    def adapted(self, opt_state: Any, kl: jax.Array) -> Any:
        """Adapts the learning rate in an optimizer state to the divergence of an update (nats, `[]`).

        Divides the rate by 1.5 if the divergence is above twice the target, and multiplies it by 1.5 if the divergence is below
        half the target. As in rsl_rl (Schwarke et al., 2025, arXiv 2509.10771), a divergence of 0 or nan changes nothing.
        """

        def new(state: Any) -> Any:
            if not _is_rate(state):
                return state
            slower, faster = jnp.maximum(state.rate / 1.5, self.low), jnp.minimum(state.rate * 1.5, self.high)
            is_small = (kl > 0) & (kl < self.target / 2)
            return AdaptiveRate(jnp.where(kl > self.target * 2, slower, jnp.where(is_small, faster, state.rate)))

        return jax.tree.map(new, opt_state, is_leaf=_is_rate)

    def rate_in(self, opt_state: Any) -> jax.Array:
        """Returns the learning rate in an optimizer state."""
        return next(x.rate for x in jax.tree.leaves(opt_state, is_leaf=_is_rate) if _is_rate(x))


def _is_rate(state: Any) -> bool:
    return isinstance(state, AdaptiveRate)
