"""Networks of a torso and a linear layer: actors, critics and value functions of off-policy and offline algorithms.

In the shape descriptions, `B` denotes the batch size, `C` the number of critics, `N` the number of discrete actions and `D`
the length of a continuous action. Continuous actions are in [-1, 1]; only the environment uses other units. Convolutional
networks raise ValueError if observations are not images of at least 3x3.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from msrl_jax.envs import Box, Discrete, Space
from msrl_jax.networks.network import Network
from msrl_jax.networks.torso import Part, Seen, Torso, make_torsos


class _Linear(nn.Module):
    """A torso and a linear layer."""

    torso: Torso
    num_outputs: int
    scale: float

    @nn.compact
    def __call__(self, *inputs: jax.Array) -> jax.Array:
        """Maps the torso's inputs to `[..., num_outputs]`."""
        return self.torso.head(self.num_outputs, self.scale)(self.torso(*inputs))


def linear_network(part: Part, seen: Seen, config: Any, *, num_outputs: int, scale: float, batch_norm: bool = False) -> Network:
    """Makes a torso and a linear layer with weights of the given scale: `(params, obs [, action]) -> [..., num_outputs]`."""
    module = _Linear(make_torsos(seen, config).of(part).clone(batch_norm=batch_norm), num_outputs, scale)
    return Network(module.init, module.apply)


def make_actor(seen: Seen, num_outputs: int, config: Any) -> Network:
    """Makes the network of a policy: a `linear_network` with initial outputs near 0."""
    return linear_network("actor", seen, config, num_outputs=num_outputs, scale=0.01)


def make_critics(seen: Seen, action_space: Discrete | Box, num_critics: int, config: Any, *, num_outputs: int = 1) -> Network:
    """Makes critics of discrete actions, `(params, obs) -> [C, B, N]`, or `(params, obs, action [B, D]) -> [C, B]`.

    Critics of continuous actions with several outputs, `M`, return `[C, B, M]`. If the config has `batch_norm`, they need
    statistics: see `networks.batch_norm`.
    """
    discrete = isinstance(action_space, Discrete)
    num_outputs = action_space.n if discrete else num_outputs
    batch_norm = getattr(config, "batch_norm", False)
    critic = linear_network("critic", seen, config, num_outputs=num_outputs, scale=1.0, batch_norm=batch_norm)

    def init(key: jax.Array, obs: Any) -> Any:
        batch = len(jax.tree.leaves(obs)[0])
        inputs = (obs,) if discrete else (obs, jnp.zeros((batch, math.prod(action_space.shape)), jnp.float32))
        made = jax.lax.map(lambda k: critic.init(k, *inputs), jax.random.split(key, num_critics))
        return {"params": made["params"]}

    def apply(params: Any, *inputs: jax.Array, **collections: Any) -> Any:
        values = jax.vmap(lambda p: critic.apply(p, *inputs, **collections))(params)
        if num_outputs > 1 or discrete:
            return values
        return (values[0][..., 0], values[1]) if collections else values[..., 0]

    return Network(init, apply)


def taken_value(critics: Network, params: Any, obs: jax.Array, action: jax.Array) -> jax.Array:
    """Returns the critics' values `[C, B]` of actions `[B]` or `[B, D]`."""
    if jnp.issubdtype(action.dtype, jnp.integer):
        return jnp.take_along_axis(critics.apply(params, obs), action[None, :, None], axis=-1)[..., 0]
    return critics.apply(params, obs, action)


def make_value(observation_space: Space, config: Any) -> Network:
    """Makes the network of a value function: `(params, obs [..., *observation_shape]) -> values [...]`."""
    network = linear_network("value", observation_space, config, num_outputs=1, scale=1.0)
    return Network(network.init, lambda params, obs: network.apply(params, obs)[..., 0])
