"""A model of an environment in a learned latent space: MuZero's three networks (Schrittwieser et al., 2020).

arXiv 1911.08265. In the shape descriptions, `H` denotes the size of a latent state and `A` the number of actions.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from msrl_jax.envs import Box, Discrete
from msrl_jax.envs.base import PyTree
from msrl_jax.networks.layers import dense
from msrl_jax.networks.torso import Torso


class _Model(nn.Module):
    """The networks of `latent_model`."""

    torso: Torso
    latent_size: int
    num_actions: int

    def setup(self):
        """Makes the networks."""
        latents = Box(0.0, 1.0, (self.latent_size,))
        of_obs = self.torso
        of_latents = Torso(latents, of_obs.hidden_sizes, of_obs.activation, layer_norm=of_obs.layer_norm, parent=None)
        self.representation, self.dynamics, self.prediction = of_obs, of_latents.clone(), of_latents.clone()
        self.first_latent, self.next_latent = dense(self.latent_size, 1.0), dense(self.latent_size, 1.0)
        self.reward_head, self.value_head = dense(1, 0.01), dense(1, 0.01)
        self.policy_head = dense(self.num_actions, 0.01)

    def __call__(self, obs: jax.Array) -> Any:
        """Calls all networks, to initialize their parameters."""
        latent = self.represent(obs)
        return self.predict(latent), self.step(latent, jnp.zeros(latent.shape[:-1], jnp.int32))

    def represent(self, obs: jax.Array) -> jax.Array:
        """Maps observations `[..., *observation_shape]` to latent states `[..., H]`."""
        return _rescale(self.first_latent(self.representation(obs)))

    def step(self, latent: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps latent states `[..., H]` and actions `[...]` to the next latent states, and rewards `[...]`."""
        features = self.dynamics(latent, jax.nn.one_hot(action, self.num_actions, dtype=jnp.float32))
        return _rescale(latent + self.next_latent(features)), self.reward_head(features)[..., 0]

    def predict(self, latent: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps latent states `[..., H]` to logits of actions `[..., A]`, and values `[...]`."""
        features = self.prediction(latent)
        return self.policy_head(features), self.value_head(features)[..., 0]


def _rescale(x: jax.Array) -> jax.Array:
    """Latent states `[..., H]` scaled to [0, 1], like actions (arXiv 1911.08265, appendix G)."""
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    return (x - low) / (high - low + 1e-5)


class LatentModel(NamedTuple):
    """The networks as pure functions of their parameters."""

    init: Callable[[jax.Array, PyTree], PyTree]  # (key, obs [..., *observation_shape]) -> params
    represent: Callable[[PyTree, PyTree], jax.Array]  # (params, obs) -> latent states [..., H]
    # (params, latent [..., H], action [...]) -> (next latent states [..., H], rewards [...])
    step: Callable[[PyTree, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    # (params, latent [..., H]) -> (logits [..., A], values [...])
    predict: Callable[[PyTree, jax.Array], tuple[jax.Array, jax.Array]]


def latent_model(torso: Torso, action_space: Discrete, *, latent_size: int) -> LatentModel:
    """Makes the networks: a torso for observations, and one hidden dense layer of it each for the model and the predictions."""
    if torso.is_whole:
        raise ValueError("network=CustomNetworks(...) does not support a model; use a module that returns features")
    module = _Model(torso, latent_size, action_space.n)
    methods = (functools.partial(module.apply, method=method) for method in ("represent", "step", "predict"))
    return LatentModel(module.init, *(cast(Any, method) for method in methods))
