"""Predictions of quantiles at random fractions, which the network takes as inputs (IQN; Dabney et al., 2018, 1806.06923).

In the shape descriptions, `B` denotes the batch size, `A` the number of actions and `N` the number of fractions.
"""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from msrl_jax.configs.choices import option
from msrl_jax.configs.config import field
from msrl_jax.envs import Discrete
from msrl_jax.losses.predictions import ActionPrediction, ActionReturns
from msrl_jax.losses.quantiles import quantile_loss
from msrl_jax.networks.layers import dense
from msrl_jax.networks.network import Network
from msrl_jax.networks.q_network import ActionValues, split_torso
from msrl_jax.networks.torso import Torso


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
            network=implicit_network,
            choice_inputs=(midpoints,),
            inputs=self._random_fractions,
        )

    def _random_fractions(self, key: jax.Array, batch_size: int) -> tuple[tuple[jax.Array], tuple[jax.Array]]:
        keys, sizes = jax.random.split(key), (self.num_fractions, self.num_target_fractions)
        one, other = (jax.random.uniform(k, (batch_size, n), jnp.float32) for k, n in zip(keys, sizes, strict=True))
        return (one,), (other,)


class _Quantiles(ActionValues):
    """Multiplies features of fractions by those of the observation before the last hidden layer."""

    @nn.compact
    def __call__(self, obs: jax.Array, *inputs: jax.Array) -> jax.Array:
        """Maps observations `[..., *observation_shape]` and fractions `[..., N]` to quantiles `[..., A, N]`."""
        (fraction,), features = inputs, self.torso(obs)
        features = features[..., None, :] * self._embedding(fraction, features.shape[-1])
        return jnp.swapaxes(self.outputs(features)[..., 0], -1, -2)

    def _embedding(self, fraction: jax.Array, size: int) -> jax.Array:
        """Computes features `[..., N, size]` of fractions `[..., N]`: a layer on 64 cosines (arXiv 1806.06923, eq. 4)."""
        cosines = jnp.cos(jnp.pi * jnp.arange(64, dtype=jnp.float32) * fraction[..., None])
        return nn.relu(dense(size, math.sqrt(2), "embedding")(cosines))


def implicit_network(torso: Torso, action_space: Discrete, *, dueling: bool = False, num_atoms: int = 1) -> Network:
    """Makes the network of quantiles `[..., A, N]` at fractions `[..., N]`, with two streams if `dueling`."""
    torso, size = split_torso(torso.of("critic"))
    module = _Quantiles(torso, action_space.n, num_atoms, size, dueling)
    return Network(module.init, module.apply)
