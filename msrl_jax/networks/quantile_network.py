"""The network of quantiles at fractions that it takes as inputs (IQN; Dabney et al., 2018, arXiv 1806.06923).

In the shape descriptions, `A` denotes the number of actions and `N` the number of fractions.
"""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from msrl_jax.envs import Discrete
from msrl_jax.networks.layers import dense
from msrl_jax.networks.network import Network
from msrl_jax.networks.q_network import ActionValues, split_torso
from msrl_jax.networks.torso import Torso


class QuantilesAtFractions(ActionValues):
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


def quantile_network(torso: Torso, action_space: Discrete, *, dueling: bool = False, num_outputs: int = 1) -> Network:
    """Makes the network of quantiles `[..., A, N]` at fractions `[..., N]`, with two streams if `dueling`."""
    torso, size = split_torso(torso.of("critic"))
    module = QuantilesAtFractions(torso, action_space.n, num_outputs, size, dueling)
    return Network(module.init, module.apply)
