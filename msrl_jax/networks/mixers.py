"""Mixers: networks from the values of the agents of a team to the value of their joint action."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from msrl_jax.networks.layers import dense
from msrl_jax.networks.network import Network


def sum_mixer() -> Network:
    """Makes the mixer of VDN: the sum (Sunehag et al., 2017, arXiv 1706.05296). It has no parameters."""
    return Network(lambda key: {}, lambda params, values, state: values.sum(-1))


def monotonic_mixer(num_agents: int, state_size: int, *, mixing_size: int, hyper_size: int) -> Network:
    """Makes the mixer of QMIX, of values `[..., A]` and states `[..., S]`, monotonic in every value (1803.11485, 4.1)."""
    module = _Monotonic(num_agents, mixing_size, hyper_size)
    inputs = [jnp.zeros((1, size), jnp.float32) for size in (num_agents, state_size)]
    init = lambda key: module.init(key, *inputs)
    return Network(init, module.apply)


class _Monotonic(nn.Module):
    """The mixer of QMIX, with `h + elu(h)` instead of the paper's `elu(h)`.

    `elu(h)` is flat where values are negative, for example if rewards are costs, and agents learn little there.
    """

    num_agents: int
    mixing_size: int
    hyper_size: int

    @nn.compact
    def __call__(self, values: jax.Array, state: jax.Array) -> jax.Array:
        """Maps values `[..., A]` and states `[..., S]` to `[...]`."""

        def hyper(size: int) -> jax.Array:
            return dense(size, 0.1)(nn.relu(dense(self.hyper_size, math.sqrt(2))(state)))

        start = 1 / math.sqrt(self.mixing_size)  # `mixing_size` products of two weights make a slope, of 1 to 2 at first
        weights = jnp.abs(start + hyper(self.num_agents * self.mixing_size))
        weights = weights.reshape(*weights.shape[:-1], self.num_agents, self.mixing_size)
        mixed = jnp.sum(values[..., None] * weights, axis=-2) + dense(self.mixing_size, 0.1)(state)
        hidden = mixed + nn.elu(mixed)
        return jnp.sum(hidden * jnp.abs(start + hyper(self.mixing_size)), axis=-1) + hyper(1)[..., 0]
