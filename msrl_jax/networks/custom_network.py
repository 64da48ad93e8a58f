"""Torsos of custom modules, from any network library."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from msrl_jax.envs import Space, spaces
from msrl_jax.networks.torso import NetworkFields, NetworkPart, Torso


class CustomNetwork(NamedTuple):
    """A custom module of features as pure functions; dense layers follow if actions are inputs too."""

    init: Callable[..., Any]  # (key, obs [B, ...]) -> params
    apply: Callable[..., Any]  # (params, obs [B, ...]) -> features [B, F]

    def torso(self, observation_space: Space, config: NetworkFields) -> Torso:
        """Makes the torso of a config."""
        layers = config.hidden_sizes, config.activation
        return CustomTorso(observation_space, *layers, layer_norm=config.layer_norm, network=self)


class CustomNetworks(NamedTuple):
    """Complete networks with their output layers, instead of a torso to which the algorithm adds heads.

    Attributes:
      actor: maps observations `[B, ...]` to the policy's parameters `[B, N]`: logits, means, or means and log scales.
      critic: maps observations, and continuous actions `[B, D]` if any, to `[B, N]`: one value, or one per discrete action.
      value: maps observations to values `[B, 1]`, for algorithms with critics and a value function.
    """

    actor: Any = None
    critic: Any = None
    value: Any = None

    @property
    def is_whole(self) -> bool:
        """Whether no heads follow: True."""
        return True

    def torso(self, observation_space: Space, config: NetworkFields) -> Torso:
        """Makes the torso of a config, with a network for each part."""
        return WholeTorso(observation_space, config.hidden_sizes, config.activation, network=self)


class CustomTorso(Torso):
    """Computes features with a custom module."""

    network: Any = None  # a `CustomNetwork`

    @property
    def is_batched(self) -> bool:
        """Whether it takes observations with exactly one leading dimension: True."""
        return True

    @property
    def num_features(self) -> int:
        """Returns the number of features, `F`."""
        example = spaces.zeros(self.observation_space)
        params = jax.eval_shape(self.network.init, jax.random.key(0), example)
        return jax.eval_shape(self.network.apply, params, example).shape[-1]

    @nn.compact
    def __call__(self, obs: jax.Array, action: jax.Array | None = None) -> jax.Array:
        """Maps observations `[..., *observation_shape]`, with or without actions `[..., D]`, to features `[..., F]`."""
        obs, action = self._inputs(obs, action)
        features = self._outputs(obs)
        return features if action is None else self._layers(features, action)

    def _outputs(self, obs: Any, *action: jax.Array) -> jax.Array:
        example = spaces.zeros(self.observation_space)
        params = self.param("module", self.network.init, example, *(jnp.zeros((1, a.shape[-1]), jnp.float32) for a in action))
        first, example_leaf = jax.tree.leaves(obs)[0], jax.tree.leaves(example)[0]
        batch = first.shape[: first.ndim - example_leaf.ndim + 1]
        x = self.network.apply(params, *jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(batch) :]), (obs, *action)))
        return x.reshape(*batch, x.shape[-1])


class WholeTorso(CustomTorso):
    """Computes the outputs of a part with its own custom network, which no head follows."""

    network: Any = None  # a `CustomNetworks`; after `of`, a `CustomNetwork`

    is_whole = True

    def of(self, part: NetworkPart) -> Torso:
        """Returns the torso of a part; raises ValueError if there is no network for it."""
        if (network := getattr(self.network, part)) is None:
            raise ValueError(f"network=CustomNetworks(...) has no {part}, which this algorithm needs; give {part}=...")
        return self.clone(network=network)

    @nn.nowrap
    def head(self, size: int, scale: float, name: str | None = None) -> Callable[[jax.Array], jax.Array]:
        """Makes a check of the number of outputs instead of a layer."""

        def check(outputs: jax.Array) -> jax.Array:
            if (num_outputs := outputs.shape[-1]) != size:
                raise ValueError(f"network=CustomNetworks(...): one returns {num_outputs} numbers where {size} are needed")
            return outputs

        return check

    @nn.compact
    def __call__(self, obs: jax.Array, action: jax.Array | None = None) -> jax.Array:
        """Maps observations `[..., *observation_shape]`, with or without actions `[..., D]`, to outputs `[..., N]`."""
        obs, action = self._inputs(obs, action)
        return self._outputs(obs) if action is None else self._outputs(obs, action)
