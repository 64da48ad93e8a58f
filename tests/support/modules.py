"""Modules of a user's own: one of each library, and a pair of functions."""

import equinox
import jax
import jax.numpy as jnp
from flax import linen, nnx


class Linen(linen.Module):
    width: int = 8

    @linen.compact
    def __call__(self, obs):
        return linen.LayerNorm()(linen.tanh(linen.Dense(self.width)(obs.reshape(len(obs), -1))))


class Nnx(nnx.Module):
    def __init__(self, size, rngs):
        self.layers = nnx.List([nnx.Linear(size, 12, rngs=rngs), nnx.Linear(12, 8, rngs=rngs)])

    def __call__(self, obs):
        x = obs.reshape(len(obs), -1)
        for layer in self.layers:
            x = nnx.silu(layer(x))
        return x


linen_module = Linen()


def nnx_module(key, obs) -> Nnx:
    return Nnx(obs[0].size, nnx.Rngs(key))


def equinox_module(key, obs) -> equinox.nn.MLP:
    return equinox.nn.MLP(obs[0].size, 8, 12, depth=1, activation=jnp.tanh, final_activation=jnp.tanh, key=key)


def _init(key, obs):
    return {"kernel": jax.random.normal(key, (obs[0].size, 8)) / 2}


PAIR = (_init, lambda params, obs: jnp.tanh(obs.reshape(len(obs), -1) @ params["kernel"]))
FORMS = {"linen": linen_module, "nnx": nnx_module, "equinox": equinox_module, "pair": PAIR}


class Head(linen.Module):
    """A whole network of one's own, of observations, or of observations and actions."""

    size: int

    @linen.compact
    def __call__(self, *inputs):
        return linen.Dense(self.size)(linen.tanh(linen.Dense(8)(jnp.concatenate(inputs, axis=-1))))


class Fading:
    """A core of one's own: a mean of all inputs, later ones with more weight, and the number of steps it sums up."""

    size = 6

    def init(self, key, inputs):
        return {"kernel": jax.random.normal(key, (inputs.shape[-1], self.size)) / 2}

    def initial(self, batch_size):
        return {"sum": jnp.zeros((batch_size, self.size)), "weight": jnp.zeros(batch_size)}

    def step(self, params, inputs, carry):
        weight = 0.8 * carry["weight"] + 1
        total = 0.8 * carry["sum"] + jnp.tanh(inputs @ params["kernel"])
        return total / weight[:, None], {"sum": total, "weight": weight}
