"""Predictions of a return's distribution as quantiles, of actions (QR-DQN) and of several critics (TQC).

In the shape descriptions, `B` denotes the batch size and `N` the number of quantiles.
"""

import chex
import jax
import jax.numpy as jnp
import optax

from msrl_jax.configs.config import field
from msrl_jax.configs.options import option
from msrl_jax.losses.predictions import ActionPrediction, ActionReturns, Backup, CriticPrediction, CriticReturns


@option(of=ActionReturns)
class QR:
    """Predicts quantiles (Dabney et al., 2017, arXiv 1710.10044), which need a higher learning rate and a slower target.

    For CartPole-v1, use `learning_rate=5e-4` and `tau=0.005`.
    """

    num_quantiles: int = field(default=51, low=2, doc="number of quantiles, `N`. Usual: 32 to 200.")

    def of_actions(self, discount: float) -> ActionPrediction:
        """Returns the functions of quantiles at midpoints."""
        return ActionPrediction(self.num_quantiles, lambda outputs: outputs.mean(-1), quantile_loss)


@option(of=CriticReturns)
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

    def of_critics(self, discount: float) -> CriticPrediction:
        """Returns the functions of quantiles; targets drop the largest ones of all critics, `num_dropped` per critic."""

        def target(quantiles: jax.Array, backup: Backup) -> jax.Array:
            num_targets = len(quantiles) * (self.num_quantiles - self.num_dropped)
            pooled = jnp.moveaxis(quantiles, -1, 0).reshape(-1, quantiles.shape[1])
            return jax.vmap(backup, out_axes=1)(jnp.sort(pooled, 0)[:num_targets])

        def loss(quantiles: jax.Array, target: jax.Array) -> jax.Array:
            return jax.vmap(jax.vmap(quantile_huber_loss), (0, None))(quantiles, target)

        return CriticPrediction(
            num_outputs=self.num_quantiles,
            expected=lambda quantiles: quantiles.mean(-1),
            value=lambda quantiles: quantiles.mean((0, -1)),
            target=target,
            loss=loss,
            error=lambda quantiles, target: loss(quantiles, target).mean(0),
        )


def quantile_loss(
    quantile: jax.Array, next_quantile: jax.Array, reward: jax.Array, discount: jax.Array, *fraction: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the loss and the TD error of an action's quantiles `[N]`, at the midpoints or at `fraction` `[N]`."""
    target = reward + discount * next_quantile
    error = target.mean() - quantile.mean()
    return quantile_huber_loss(quantile, target, 1.0, *fraction), error


def quantile_huber_loss(
    quantile: jax.Array, target: jax.Array, delta: float = 1.0, fraction: jax.Array | None = None
) -> jax.Array:
    """Returns the quantile Huber loss of quantiles `[N]` for samples `[M]` (arXiv 1710.10044, eq. 10; 1806.06923, eq. 3).

    The quantiles are at `fraction` `[N]`; if it is None, at the midpoints `(i + 1/2) / N`.
    """
    chex.assert_rank((quantile, target), 1)
    if fraction is None:
        fraction = (jnp.arange(quantile.shape[-1], dtype=jnp.float32) + 0.5) / quantile.shape[-1]
    error = target[None, :] - quantile[:, None]
    weight = jnp.abs(fraction[:, None] - (jax.lax.stop_gradient(error) < 0).astype(fraction.dtype))
    return (weight * optax.huber_loss(error, delta=delta) / delta).mean(1).sum(0)
