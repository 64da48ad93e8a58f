"""Attention over the last steps of an episode: the gated transformer of Parisotto et al., 2019 (GTrXL, arXiv 1910.06764).

In the shape descriptions, `T` denotes the length of an unroll, `E` the number of environments, `L` the number of layers, `N`
the number of heads, `M` the number of previous steps that a layer sees and `D` the size of the network. A carry holds the
inputs of all layers in the last `M` steps `[..., L, M, D]`, and a mask of the steps in the current episode `[..., M]`: 1 or 0.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from msrl_jax.configs.fields import field
from msrl_jax.configs.options import option
from msrl_jax.kernels.networks import matmul
from msrl_jax.networks.core import Core, CoreKind
from msrl_jax.networks.unrolls import Carry


@option(of=CoreKind)
class GTrXL:
    """Attention to the last steps of the same episode; its gates start almost closed (arXiv 1910.06764)."""

    option = "gtrxl"

    size: int = field(default=64, doc="size of the state, in gtrxl an even multiple of `heads`. Usual: 64 to 512.")
    layers: int = field(default=2, doc="layers of attention. Usual: 1 to 12.")
    heads: int = field(default=4, doc="attention heads per layer. Usual: 4 to 8.")
    context: int = field(default=64, doc="previous steps that a layer sees. Usual: 16 to 512.")

    def check(self) -> None:
        """Raises ValueError unless `size` is an even multiple of `heads`."""
        if self.size % self.heads or self.size % 2:
            fits = 2 * self.heads * max(1, self.size // (2 * self.heads))
            raise ValueError(f"GTrXL.size={self.size} is not an even multiple of heads={self.heads}; use {fits}")

    def make(self, input_size: int) -> Core:
        """Makes the core."""
        return _gtrxl(self.size, self.layers, self.heads, self.context)


def _gtrxl(size: int, layers: int, heads: int, context: int) -> Core:
    def init(key: jax.Array, input_size: int) -> dict[str, Any]:
        input_key, *keys = jax.random.split(key, 1 + layers)
        return {
            "input": nn.initializers.lecun_normal(dtype=jnp.float32)(input_key, (input_size, size)),
            "layers": [_init_layer(k, size) for k in keys],
        }

    def initial_carry(batch_shape: tuple[int, ...]) -> Carry:
        return jnp.zeros((*batch_shape, layers, context, size), jnp.float32), jnp.zeros((*batch_shape, context), jnp.float32)

    def step(params: Any, inputs: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        memory, mask = carry
        x = matmul(inputs, params["input"])[..., None, :]  # a sequence of one
        mask = jnp.concatenate([mask, jnp.ones_like(mask[..., :1])], -1)
        layer_inputs = []
        for i, layer in enumerate(params["layers"]):
            layer_inputs.append(jnp.concatenate([memory[..., i, :, :], x], -2))
            x = _layer(layer, heads, x, layer_inputs[-1], mask[..., None, :] > 0)
        return x[..., 0, :], (jnp.stack([s[..., 1:, :] for s in layer_inputs], -3), mask[..., 1:])

    def unroll(params: Any, inputs: jax.Array, is_first: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        memory, mask = carry
        x = jnp.swapaxes(matmul(inputs, params["input"]), 0, 1)  # [E, T, D]
        episode = jnp.cumsum(is_first.T, axis=1)  # [E, T]; the episode of the carry is 0
        episodes = jnp.concatenate([jnp.where(mask > 0, 0, -1), episode], 1)  # [E, M + T]
        time, times = jnp.arange(len(inputs))[:, None], jnp.arange(-context, len(inputs))
        near = (times <= time) & (times >= time - context)  # [T, M + T]
        layer_inputs = []
        for i, layer in enumerate(params["layers"]):
            layer_inputs.append(jnp.concatenate([memory[:, i], x], 1))
            x = _layer(layer, heads, x, layer_inputs[-1], near & (episode[:, :, None] == episodes[:, None, :]))
        # The last `M` steps up to each step, without those of other episodes.
        last = time + 1 + jnp.arange(context)  # [T, M]
        is_same_episode = (jnp.swapaxes(episodes[:, last], 0, 1) == episode.T[:, :, None]).astype(x.dtype)  # [T, E, M]
        windows = jnp.stack([jnp.swapaxes(s[:, last], 0, 1) for s in layer_inputs], 2)  # [T, E, L, M, D]
        return jnp.swapaxes(x, 0, 1), (windows * is_same_episode[:, :, None, :, None], is_same_episode)

    return Core(init, initial_carry, step, unroll, size)


def _init_layer(key: jax.Array, size: int) -> dict[str, Any]:
    lecun = nn.initializers.lecun_normal(dtype=jnp.float32)
    qkv, position, out, wide, narrow, *gates = jax.random.split(key, 9)
    gate = lambda new, old: {"new": lecun(new, (size, 3 * size)), "old": lecun(old, (size, 3 * size))}
    return {
        "qkv": lecun(qkv, (size, 3 * size)),
        "position": lecun(position, (size, size)),
        "content_bias": jnp.zeros(size, jnp.float32),
        "position_bias": jnp.zeros(size, jnp.float32),
        "out": lecun(out, (size, size)),
        "wide": lecun(wide, (size, 4 * size)),
        "narrow": lecun(narrow, (4 * size, size)),
        "scales": jnp.ones((2, size), jnp.float32),
        "shifts": jnp.zeros((2, size), jnp.float32),
        "gates": [gate(*gates[:2]), gate(*gates[2:])],
    }


def _layer(params: Any, heads: int, x: jax.Array, sources: jax.Array, visible: jax.Array) -> jax.Array:
    """Applies a layer to steps `x` `[..., Q, D]`, the last of `sources` `[..., K, D]`; `visible` is a mask `[..., Q, K]`."""
    normalized = lambda x, i: _standardize(x) * params["scales"][i] + params["shifts"][i]
    x = _gate(params["gates"][0], x, nn.relu(_attention(params, heads, normalized(x, 0), normalized(sources, 0), visible)))
    y = matmul(nn.relu(matmul(normalized(x, 1), params["wide"])), params["narrow"])
    return _gate(params["gates"][1], x, nn.relu(y))


def _standardize(x: jax.Array) -> jax.Array:
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-6)


def _gate(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Applies a GRU gate, which initially keeps most of `x` (arXiv 1910.06764, eq. 9)."""
    new, old = jnp.split(matmul(y, params["new"]), 3, -1), jnp.split(params["old"], 3, -1)
    reset = jax.nn.sigmoid(new[0] + matmul(x, old[0]))
    change = jax.nn.sigmoid(new[1] + matmul(x, old[1]) - 2)
    return (1 - change) * x + change * jnp.tanh(new[2] + matmul(reset * x, old[2]))


def _attention(params: Any, heads: int, x: jax.Array, sources: jax.Array, visible: jax.Array) -> jax.Array:
    """Attention with relative positions (Transformer-XL; Dai et al., 2019, arXiv 1901.02860, 3.3)."""
    queries, size = x.shape[-2:]
    keys = sources.shape[-2]
    split = lambda x: x.reshape(*x.shape[:-1], heads, size // heads)
    by_use = jnp.split(params["qkv"], 3, -1)
    q, k, v = split(matmul(x, by_use[0])), split(matmul(sources, by_use[1])), split(matmul(sources, by_use[2]))
    position_keys = split(matmul(_sinusoids(keys, size), params["position"]))  # by distance, [K, N, D / N]
    distance = jnp.arange(queries)[:, None] + keys - queries - jnp.arange(keys)  # [Q, K]; negative distances are masked
    by_distance = jnp.einsum("...qnd,mnd->...nqm", q + split(params["position_bias"]), position_keys)
    index = jnp.broadcast_to(jnp.maximum(distance, 0), by_distance.shape)
    score = jnp.einsum("...qnd,...knd->...nqk", q + split(params["content_bias"]), k)
    score += jnp.take_along_axis(by_distance, index, -1, mode="promise_in_bounds")
    score = jnp.where(visible[..., None, :, :], score * (size // heads) ** -0.5, -jnp.inf)
    values = jnp.einsum("...nqk,...knd->...qnd", jax.nn.softmax(score), v)
    return matmul(values.reshape(x.shape), params["out"])


def _sinusoids(length: int, size: int) -> jax.Array:
    """Computes sines and cosines of distances (Vaswani et al., 2017, arXiv 1706.03762, 3.5). `[length, size]`"""
    angle = jnp.arange(length)[:, None] * jnp.exp(-math.log(1e4) * jnp.arange(0, size, 2) / size)
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)
