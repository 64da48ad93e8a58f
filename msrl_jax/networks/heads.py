"""Networks of a torso and a linear layer: actors, critics and value functions of off-policy and offline algorithms.

In the shape descriptions, `B` denotes the batch size, `C` the number of critics, `N` the number of outputs of a critic and `D`
the length of a continuous action. Continuous actions are in [-1, 1]; only the environment uses other units. Convolutional
networks raise ValueError if observations are not images of at least 3x3.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from msrl_jax.envs import Box, Space
from msrl_jax.networks.network import Network
from msrl_jax.networks.torso import NetworkFields, NetworkPart, SpaceOrTorsos, Torso, make_torsos


class _Linear(nn.Module):
    """A torso and a linear layer."""

    torso: Torso
    num_outputs: int
    scale: float

    @nn.compact
    def __call__(self, *inputs: jax.Array) -> jax.Array:
        """Maps the torso's inputs to `[..., num_outputs]`."""
        return self.torso.head(self.num_outputs, self.scale)(self.torso(*inputs))


def linear_network(
    part: NetworkPart, space_or_torsos: SpaceOrTorsos, config: NetworkFields, *, num_outputs: int, scale: float
) -> Network:
    """Makes a torso and a linear layer with weights of the given scale: `(params, obs [, action]) -> [..., num_outputs]`."""
    return linear_head(make_torsos(space_or_torsos, config).of(part).clone(), num_outputs, scale)


def linear_head(torso: Torso, num_outputs: int, scale: float) -> Network:
    """Adds a linear layer with weights of the given scale to a torso."""
    module = _Linear(torso, num_outputs, scale)
    return Network(module.init, module.apply)


def make_actor(space_or_torsos: SpaceOrTorsos, num_outputs: int, config: NetworkFields) -> Network:
    """Makes the network of a policy: a `linear_network` with initial outputs near 0."""
    return linear_network("actor", space_or_torsos, config, num_outputs=num_outputs, scale=0.01)


def make_critics(
    space_or_torsos: SpaceOrTorsos,
    action_space: Box,
    num_critics: int,
    config: NetworkFields,
    num_outputs: int = 1,
    torso: Callable[[Torso, Space], Torso] = lambda torso, action_space: torso,
) -> Network:
    """Makes critics of continuous actions, `(params, obs, action [B, D]) -> [C, B]`, or `[C, B, N]` with several outputs.

    Args:
      space_or_torsos: the space of observations, or the torsos.
      action_space: the space of the actions.
      num_critics: the number of critics, `C`.
      config: the config, for the torsos.
      num_outputs: the number of outputs of a critic, `N`.
      torso: changes the torsos. If they have statistics, `apply` takes `mutable`, as in Flax, and also returns these.
    """
    critic = linear_head(torso(make_torsos(space_or_torsos, config).of("critic").clone(), action_space), num_outputs, 1.0)

    def init(key: jax.Array, obs: Any) -> Any:
        action = jnp.zeros((len(jax.tree.leaves(obs)[0]), math.prod(action_space.shape)), jnp.float32)
        return init_critics(critic, num_critics, key, obs, action)

    def apply(params: Any, obs: Any, action: jax.Array, **collections: Any) -> Any:
        values = jax.vmap(lambda p: critic.apply(p, obs, action, **collections))(params)
        if num_outputs > 1:
            return values
        return (values[0][..., 0], values[1]) if collections else values[..., 0]

    return Network(init, apply)


def init_critics(critic: Network, num_critics: int, key: jax.Array, *inputs: Any) -> Any:
    """Makes the parameters of `num_critics` critics, `[C, ...]`."""
    variables = jax.lax.map(lambda k: critic.init(k, *inputs), jax.random.split(key, num_critics))
    return {"params": variables["params"]}


def make_value(observation_space: Space, config: NetworkFields) -> Network:
    """Makes the network of a value function: `(params, obs [..., *observation_shape]) -> values [...]`."""
    network = linear_network("value", observation_space, config, num_outputs=1, scale=1.0)
    return Network(network.init, lambda params, obs: network.apply(params, obs)[..., 0])
