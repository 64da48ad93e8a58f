"""Predictions of quantiles at random fractions, which the network takes as inputs (IQN; Dabney et al., 2018, 1806.06923)."""

import jax
import jax.numpy as jnp

from msrl_jax.configs.config import field
from msrl_jax.configs.options import option
from msrl_jax.losses.predictions import ActionPrediction, ActionReturns
from msrl_jax.losses.quantiles import quantile_loss
from msrl_jax.networks.quantile_network import quantile_network


@option(of=ActionReturns)
class IQN:
    """Predicts quantiles at random fractions (Dabney et al., 2018, arXiv 1806.06923)."""

    num_fractions: int = field(default=8, doc="random fractions of an example, `N` in the paper. Usual: 8 to 64.")
    num_target_fractions: int = field(default=8, doc="random fractions of its target, `N'`. Usual: 8 to 64.")
    num_choice_fractions: int = field(default=32, doc="midpoints whose mean is the value that chooses, `K`. Usual: 32.")

    def of_actions(self, discount: float) -> ActionPrediction:
        """Returns the functions of quantiles at given fractions."""
        midpoints = (jnp.arange(self.num_choice_fractions) + 0.5) / self.num_choice_fractions
        return ActionPrediction(
            num_outputs=1,
            expected=lambda quantiles: quantiles.mean(-1),
            loss=quantile_loss,
            network=quantile_network,
            choice_inputs=(midpoints,),
            inputs=self._random_fractions,
        )

    def _random_fractions(self, key: jax.Array, batch_size: int) -> tuple[tuple[jax.Array], tuple[jax.Array]]:
        keys, sizes = jax.random.split(key), (self.num_fractions, self.num_target_fractions)
        fractions, target_fractions = (
            jax.random.uniform(k, (batch_size, n), jnp.float32) for k, n in zip(keys, sizes, strict=True)
        )
        return (fractions,), (target_fractions,)
