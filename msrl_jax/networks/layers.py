"""Layers, torsos, and the interfaces of networks and cores."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from msrl_jax.envs import Box, Space, spaces
from msrl_jax.envs.masks import unmasked
from msrl_jax.envs.privileged import PrivilegedObservation, are_privileged
from msrl_jax.fragments.support.checks import shown
from msrl_jax.kernels.networks import convolve, matmul


def dense(size: int, scale: float, name: str | None = None) -> nn.Dense:
    """Makes a dense layer of width `size`; its kernel is initialized to `scale` times an orthogonal matrix."""
    kernel_init = nn.initializers.orthogonal(scale)
    return nn.Dense(size, kernel_init=kernel_init, dot_general=lambda x, w, *_, **__: matmul(x, w), name=name)


def convolution(size: int, window: int, stride: int = 1) -> nn.Conv:
    """Makes a convolution with `size` square filters, without padding; its kernel starts orthogonal, scaled for ReLUs."""
    kernel_init = nn.initializers.orthogonal(math.sqrt(2))
    general = lambda x, w, *_, **__: convolve(x, w, stride)  # noqa: E731
    return nn.Conv(
        size, (window, window), strides=stride, padding="VALID", kernel_init=kernel_init, conv_general_dilated=general
    )


Activate = Callable[[jax.Array], jax.Array]
ACTIVATIONS: dict[str, Activate] = {
    "tanh": nn.tanh, "relu": nn.relu, "elu": nn.elu, "gelu": nn.gelu, "silu": nn.silu,
}  # fmt: skip

_LARGE = 36
"""Images of this height and width have something left after the three convolutions."""
_FILTERS = {False: ((16, 3, 1),), True: ((32, 8, 4), (64, 4, 2), (64, 3, 1))}
"""Number, size and stride of filters, by whether images are large."""


def hidden(x: jax.Array, size: int, activation: Activate, layer_norm: bool, name: str | None = None) -> jax.Array:
    """Applies a dense layer of width `size`, optionally LayerNorm, and the activation."""
    x = dense(size, math.sqrt(2), name)(x)
    return activation(nn.LayerNorm(name=name and f"{name}_norm")(x) if layer_norm else x)


def _cnn(x: jax.Array, activation: Activate, large: bool) -> jax.Array:
    """Three convolutions (Mnih et al., 2015, doi:10.1038/nature14236); for small images, MinAtar's 16 filters (1903.03176)."""
    for size, window, stride in _FILTERS[large]:
        x = activation(convolution(size, window, stride)(x))
    return x


def _impala_cnn(x: jax.Array, activation: Activate, large: bool) -> jax.Array:
    """The 15 layers of IMPALA (Espeholt et al., 2018, arXiv 1802.01561, figure 3), which halve the image size three times."""
    same = lambda x, size: convolution(size, 3)(jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))))  # noqa: E731
    for size in (16, 32, 32):
        x = nn.max_pool(same(x, size), (3, 3), (2, 2), "SAME")
        for _ in range(2):
            x += same(activation(same(activation(x), size)), size)
    return activation(x)


_CONVOLUTIONS = {"cnn": _cnn, "impala_cnn": _impala_cnn}


def _residual(x: jax.Array, activation: Activate, sizes: tuple[int, ...]) -> jax.Array:
    """SimBa: a residual block for each of the equal sizes, and a final LayerNorm (Lee et al., 2024, arXiv 2410.09754)."""
    if sizes:
        x = dense(sizes[0], 1.0)(x)
    for size in sizes:
        x += dense(size, math.sqrt(2))(activation(dense(4 * size, math.sqrt(2))(nn.LayerNorm()(x))))
    return nn.LayerNorm()(x)


class Network(NamedTuple):
    """A network as pure functions of its parameters, from any network library."""

    init: Callable[..., Any]  # (key, *inputs) -> params
    apply: Callable[..., Any]  # (params, *inputs) -> outputs, arrays or distributions
    core: Any = None  # the `RecurrentNetwork` before it, if any


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


class Torso(nn.Module):
    """Computes features of observations: convolutions for images, then dense layers; or a custom network."""

    observation_space: Space  # of one observation; images [H, W, C] with convolutions
    hidden_sizes: tuple[int, ...]  # widths of the dense layers
    activation: str  # a key of `ACTIVATIONS`
    kind: Literal["mlp", "cnn", "impala_cnn", "simba"] = "mlp"
    layer_norm: bool = False  # whether a LayerNorm comes between a dense layer and its activation
    # (key, obs [B, ...]) -> params and (params, obs [B, ...]) -> features [B, F]; dense layers follow if actions are inputs
    network: Network | CustomNetworks | None = None
    is_whole: bool = False  # whether the network is from a `CustomNetworks`, so that no head follows
    # its inputs from a `PrivilegedObservation`; "both": the privileged state, with the observation passed as an action
    input_part: Literal["obs", "privileged_state", "both"] = "obs"
    batch_norm: bool = False  # whether to normalize the dense layers' inputs and outputs

    def of(self, part: Literal["actor", "critic", "value"]) -> "Torso":
        """Returns the torso of a part: this one, except with `CustomNetworks`."""
        if not isinstance(self.network, CustomNetworks):
            return self
        if (network := getattr(self.network, part)) is None:
            raise ValueError(f"network=CustomNetworks(...) has no {part}, which this algorithm needs; give {part}=...")
        return self.clone(network=network, is_whole=True)

    @property
    def is_batched(self) -> bool:
        """Whether it takes observations with exactly one leading dimension."""
        return self.kind in _CONVOLUTIONS or self.network is not None

    @property
    def num_features(self) -> int:
        """Returns the number of features, `F`."""
        if self.network is None:
            return self.hidden_sizes[-1]
        assert isinstance(self.network, Network)
        example = spaces.zeros(self.observation_space)
        params = jax.eval_shape(self.network.init, jax.random.key(0), example)
        return jax.eval_shape(self.network.apply, params, example).shape[-1]

    @nn.compact
    def __call__(self, obs: jax.Array, action: jax.Array | None = None) -> jax.Array:
        """Maps observations `[..., *observation_shape]`, with or without actions `[..., D]`, to features `[..., F]`."""
        obs = unmasked(obs)
        if isinstance(obs, PrivilegedObservation):
            if self.input_part == "both":
                action = obs.obs if action is None else jnp.concatenate([obs.obs, action], axis=-1)
            obs = obs.obs if self.input_part == "obs" else obs.privileged_state
        activation = ACTIVATIONS[self.activation]
        if self.is_whole:
            return self._outputs(obs) if action is None else self._outputs(obs, action)
        if self.network is not None:
            x = self._outputs(obs)
            if action is None:
                return x
        elif self.kind in _CONVOLUTIONS:
            large = min(obs.shape[-3:-1]) >= _LARGE
            x = obs.astype(jnp.float32)
            if large and obs.dtype == jnp.uint8:  # small images may hold tile indices
                x /= 255
            if is_unroll := obs.ndim == 5:  # [T, E, H, W, C]; a convolution takes one batch dimension
                x = flatten(x)
            x = _CONVOLUTIONS[self.kind](x, activation, large)
            x = x.reshape(*x.shape[: x.ndim - len(self.observation_space.shape)], -1)
            x = unflatten(x, obs.shape[0]) if is_unroll else x
        else:
            x = spaces.flatten(self.observation_space, obs)
        if action is not None:
            x = jnp.concatenate([x, action], axis=-1)
        if self.kind == "simba":
            return _residual(x, activation, self.hidden_sizes)
        x = self._normalized(x)
        for size in self.hidden_sizes:
            x = self._normalized(hidden(x, size, activation, self.layer_norm))
        return x

    def _normalized(self, x: jax.Array) -> jax.Array:
        """Normalizes by the batch's statistics if the caller makes `batch_stats` mutable, else by the given statistics."""
        if not self.batch_norm:
            return x
        given = not self.is_mutable_collection("batch_stats")
        return nn.BatchNorm(given, momentum=0.0, epsilon=1e-3, use_fast_variance=False)(x)

    def _outputs(self, obs: Any, *action: jax.Array) -> jax.Array:
        assert isinstance(self.network, Network)
        example = spaces.zeros(self.observation_space)
        params = self.param("module", self.network.init, example, *(jnp.zeros((1, a.shape[-1]), jnp.float32) for a in action))
        first, one = jax.tree.leaves(obs)[0], jax.tree.leaves(example)[0]
        batch = first.shape[: first.ndim - one.ndim + 1]
        x = self.network.apply(params, *jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(batch) :]), (obs, *action)))
        return x.reshape(*batch, x.shape[-1])


class AsymmetricTorso(NamedTuple):
    """The torsos of an actor, and of critics that see a privileged state instead of the observation."""

    actor: Torso
    critic: Torso

    def of(self, part: Literal["actor", "critic", "value"]) -> Torso:
        """Returns the torso of a part."""
        return (self.actor if part == "actor" else self.critic).of(part)


Seen = Space | Torso | AsymmetricTorso
"""The input of a network: a space of observations, or torsos that are already made."""


def head(torso: Torso, size: int, scale: float, name: str | None = None) -> Callable[[jax.Array], jax.Array]:
    """Makes the output layer after a torso, a `dense` layer; the identity after a network that has its own."""
    if not torso.is_whole:
        return dense(size, scale, name)

    def check(outputs: jax.Array) -> jax.Array:
        if outputs.shape[-1] != size:
            raise ValueError(f"network=CustomNetworks(...): one returns {outputs.shape[-1]} numbers where {size} are needed")
        return outputs

    return check


def make_torsos(seen: Seen, config: Any) -> Torso | AsymmetricTorso:
    """Makes the torso of a config, or two with a privileged state; returns torsos unchanged; raises as `make_torso` does."""
    if isinstance(seen, Torso | AsymmetricTorso):
        return seen
    if not are_privileged(seen):
        return make_torso(seen, config)
    actor, critic = (make_torso(space, config) for space in seen.spaces)
    return AsymmetricTorso(actor, critic.clone(input_part="privileged_state"))


def make_torso(observation_space: Space, config: Any) -> Torso:
    """Makes the torso of a config.

    Raises:
      TypeError: if the network is neither a name nor an object with the functions `init` and `apply`.
      ValueError: if a convolution gets observations that are not images of at least 3x3, or if "simba" blocks differ in width.
    """
    network, sizes, layer_norm = config.network, config.hidden_sizes, config.layer_norm
    if isinstance(network, CustomNetworks):
        return Torso(observation_space, sizes, config.activation, network=network)
    if not isinstance(network, str):
        if not all(callable(getattr(network, function, None)) for function in ("init", "apply")):
            raise TypeError(f"network={shown(network)} has no init and apply; networks.modules.as_network makes such a pair")
        network = Network(network.init, network.apply)
        return Torso(observation_space, sizes, config.activation, layer_norm=layer_norm, network=network)
    shape = observation_space.shape if isinstance(observation_space, Box) else ()
    kind: Any = ("cnn" if len(shape) == 3 else "mlp") if network == "auto" else network
    if kind in _CONVOLUTIONS and (len(shape) != 3 or min(shape[:2]) < 3):
        raise ValueError(
            f"network={shown(network)} convolves images [H, W, C] of at least 3x3, got {shape or observation_space}; "
            "use network='mlp', or wrap the environment in msrl_jax.envs.AsImage"
        )
    if kind == "simba" and len(set(sizes)) > 1:
        raise ValueError(f"hidden_sizes={sizes}: the blocks of network='simba' have one width; use {sizes[:1] * len(sizes)}")
    return Torso(observation_space, sizes, config.activation, kind, layer_norm)


ArraysT = TypeVar("ArraysT")
Carry = tuple[jax.Array, ...]
"""A recurrent state: arrays `[..., H]`; empty for networks without one. An episode starts with zeros."""


def reset_carry(is_first: jax.Array, carry: ArraysT) -> ArraysT:
    """Clears carries `[..., H]` where an episode starts: where `is_first`, bool of their first dimensions, is True."""
    return jax.tree.map(lambda x: jnp.where(is_first.reshape(is_first.shape + (1,) * (x.ndim - is_first.ndim)), 0.0, x), carry)


def first_steps(ended: jax.Array) -> jax.Array:
    """Marks the steps after episode ends, `[T, ...]`, but never step 0, whose carry is already cleared."""
    return jnp.concatenate([jnp.zeros_like(ended[:1]), ended[:-1]])


class Core(NamedTuple):
    """A recurrent layer as pure functions of its parameters, with `I` inputs and `F` outputs."""

    init: Callable[[jax.Array, int], Any]  # (key, input_size) -> params
    initial_carry: Callable[[tuple[int, ...]], Carry]  # (batch_shape) -> zeros
    # (params, inputs [..., I], carry [..., H]) -> (outputs [..., F], carry)
    step: Callable[[Any, jax.Array, Carry], tuple[jax.Array, Carry]]
    # (params, inputs [T, E, I], is_first [T, E] bool, carry [E, H]) -> (outputs [T, E, F], carries after every step
    # [T, E, H]); clears the carry before the first step of every episode
    unroll: Callable[[Any, jax.Array, jax.Array, Carry], tuple[jax.Array, Carry]]
    num_outputs: int  # `F`


def flatten(tree: ArraysT) -> ArraysT:
    """Merges `[T, E, ...]` into `[E * T, ...]`; `E` comes first, so that arrays stay split over devices along `E`."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), tree)


def unflatten(x: jax.Array, unroll_length: int) -> jax.Array:
    """Splits `[E * T, ...]` into `[T, E, ...]`: the inverse of `flatten`."""
    return jnp.swapaxes(x.reshape(-1, unroll_length, *x.shape[1:]), 0, 1)
