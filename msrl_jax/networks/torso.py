"""Torsos: the networks of a config up to the output layers, which the algorithms add."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import linen as nn

from msrl_jax.envs import Box, Space, spaces
from msrl_jax.envs.masks import unmasked
from msrl_jax.envs.privileged import PrivilegedObservation, are_privileged
from msrl_jax.fragments.support.checks import shown
from msrl_jax.networks.layers import ACTIVATIONS, Activate, dense, hidden

NetworkPart = Literal["actor", "critic", "value"]
Encoder = Callable[[Space, Any, Activate], jax.Array]
"""Maps observations `[..., *observation_shape]` of a space to features `[..., F]`, with layers of the calling module."""

IMAGE_ENCODERS: dict[str, Encoder] = {}
"""The networks of images by name; `networks/convolutions.py` adds its own."""


BLOCKS: dict[str, Callable[[jax.Array, Activate, tuple[int, ...]], jax.Array]] = {}
"""Layers that replace the dense layers, by name; `networks/simba.py` adds its own."""


class NetworkFields(Protocol):
    """What makes a network."""

    @property
    def network(self) -> Any:
        """A name, or a module."""
        ...

    @property
    def hidden_sizes(self) -> tuple[int, ...]:
        """The widths of the dense layers."""
        ...

    @property
    def activation(self) -> str:
        """A key of `networks.layers.ACTIVATIONS`."""
        ...

    @property
    def layer_norm(self) -> bool:
        """Whether hidden dense layers are normalized."""
        ...


class Torso(nn.Module):
    """Computes features of observations: convolutions for images, then dense layers."""

    observation_space: Space  # of one observation; images [H, W, C] with convolutions
    hidden_sizes: tuple[int, ...]  # widths of the dense layers
    activation: str  # a key of `ACTIVATIONS`
    kind: Literal["mlp", "cnn", "impala_cnn", "simba"] = "mlp"
    layer_norm: bool = False  # whether a LayerNorm comes between a dense layer and its activation
    # its inputs from a `PrivilegedObservation`; "both": the privileged state, with the observation passed as an action
    input_part: Literal["obs", "privileged_state", "both"] = "obs"
    normalize: Activate = lambda x: x  # of the input of the first dense layer, and of the output of each

    is_whole = False
    """Whether its outputs are those of a head already."""

    def of(self, part: NetworkPart) -> "Torso":
        """Returns the torso of a part: this one, if it is the same for all."""
        return self

    @property
    def is_batched(self) -> bool:
        """Whether it takes observations with exactly one leading dimension."""
        return self.kind in IMAGE_ENCODERS

    @property
    def num_features(self) -> int:
        """Returns the number of features, `F`."""
        return self.hidden_sizes[-1]

    @nn.nowrap
    def head(self, size: int, scale: float, name: str | None = None) -> Callable[[jax.Array], jax.Array]:
        """Makes the output layer that follows, a `dense` layer."""
        return dense(size, scale, name)

    @nn.compact
    def __call__(self, obs: jax.Array, action: jax.Array | None = None) -> jax.Array:
        """Maps observations `[..., *observation_shape]`, with or without actions `[..., D]`, to features `[..., F]`."""
        obs, action = self._inputs(obs, action)
        if self.is_batched:
            return self._layers(IMAGE_ENCODERS[self.kind](self.observation_space, obs, ACTIVATIONS[self.activation]), action)
        return self._layers(spaces.flatten(self.observation_space, obs), action)

    def _inputs(self, obs: Any, action: jax.Array | None) -> tuple[Any, jax.Array | None]:
        """Returns the observations or the privileged state that the torso sees, and the actions."""
        obs = unmasked(obs)
        if not isinstance(obs, PrivilegedObservation):
            return obs, action
        if self.input_part == "both":
            action = obs.obs if action is None else jnp.concatenate([obs.obs, action], axis=-1)
        return obs.obs if self.input_part == "obs" else obs.privileged_state, action

    def _layers(self, x: jax.Array, action: jax.Array | None) -> jax.Array:
        """Applies the dense layers to vectors `[..., N]` and actions `[..., D]`."""
        if action is not None:
            x = jnp.concatenate([x, action], axis=-1)
        activation = ACTIVATIONS[self.activation]
        if self.kind in BLOCKS:
            return BLOCKS[self.kind](x, activation, self.hidden_sizes)
        x = self.normalize(x)
        for size in self.hidden_sizes:
            x = self.normalize(hidden(x, size, activation, self.layer_norm))
        return x


class AsymmetricTorso(NamedTuple):
    """The torsos of an actor, and of critics that see a privileged state instead of the observation."""

    actor: Torso
    critic: Torso

    def of(self, part: NetworkPart) -> Torso:
        """Returns the torso of a part."""
        return (self.actor if part == "actor" else self.critic).of(part)


SpaceOrTorsos = Space | Torso | AsymmetricTorso
"""The input of a network: a space of observations, or torsos that are already made."""


def make_torsos(space_or_torsos: SpaceOrTorsos, config: NetworkFields) -> Torso | AsymmetricTorso:
    """Makes the torso of a config, or two with a privileged state; returns torsos unchanged; raises as `make_torso` does."""
    if isinstance(space_or_torsos, Torso | AsymmetricTorso):
        return space_or_torsos
    if not are_privileged(space_or_torsos):
        return make_torso(space_or_torsos, config)
    actor, critic = (make_torso(space, config) for space in space_or_torsos.spaces)
    return AsymmetricTorso(actor, critic.clone(input_part="privileged_state"))


def make_torso(observation_space: Space, config: NetworkFields) -> Torso:
    """Makes the torso of a config.

    Raises:
      TypeError: if the network is an object that `algorithms.build` has not resolved.
      ValueError: if a convolution gets observations that are not images of at least 3x3, or if "simba" blocks differ in width.
    """
    network, sizes = config.network, config.hidden_sizes
    if not isinstance(network, str):
        if not hasattr(network, "torso"):
            made_by = "msrl_jax.algorithms.build(config, env), or networks.modules.as_network, makes one of it"
            raise TypeError(f"network={shown(network)} is not a network yet; {made_by}")
        return network.torso(observation_space, config)
    shape = observation_space.shape if isinstance(observation_space, Box) else ()
    kind: Any = ("cnn" if len(shape) == 3 else "mlp") if network == "auto" else network
    if kind in IMAGE_ENCODERS and (len(shape) != 3 or min(shape[:2]) < 3):
        raise ValueError(
            f"network={shown(network)} convolves images [H, W, C] of at least 3x3, got {shape or observation_space}; "
            "use network='mlp', or wrap the environment in msrl_jax.envs.AsImage"
        )
    if kind == "simba" and len(set(sizes)) > 1:
        raise ValueError(f"hidden_sizes={sizes}: the blocks of network='simba' have one width; use {sizes[:1] * len(sizes)}")
    return Torso(observation_space, sizes, config.activation, kind, config.layer_norm)
