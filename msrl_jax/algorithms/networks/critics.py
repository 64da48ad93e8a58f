"""Networks for the values of actions or observations, for off-policy and offline actor-critics.

In the shape descriptions, `B` denotes the batch size, `C` the number of critics, `N` the number of discrete actions and `D`
the length of a continuous action, which is in [-1, 1].
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.algorithms.networks.actor_critic import Layers
from msrl_jax.algorithms.networks.policies import Network, linear_network
from msrl_jax.envs import Box, Discrete, Space


def make_critics(observation_space: Space, action_space: Discrete | Box, num_critics: int, config: Layers) -> Network:
    """Makes critics with different initial parameters; one batched product computes a layer of all critics.

    Args:
      observation_space: any space.
      action_space: `Discrete`, or a `Box`.
      num_critics: number of critics, `C`.
      config: the layers.

    Returns:
      The network: `(params, obs [B, ...]) -> values [C, B, N]` for discrete actions, or `(params, obs, action [B, D]) ->
      values [C, B]` for continuous ones.

    Raises:
      ValueError: if the network convolves and the observations are not images of at least 3x3.
    """
    discrete = isinstance(action_space, Discrete)
    critic = linear_network(observation_space, config, num_outputs=action_space.n if discrete else 1, scale=1.0)

    def init(key: jax.Array, *inputs: jax.Array) -> Any:
        return jax.lax.map(lambda k: critic.init(k, *inputs), jax.random.split(key, num_critics))

    def apply(params: Any, *inputs: jax.Array) -> jax.Array:
        values = jax.vmap(lambda p: critic.apply(p, *inputs))(params)
        return values if discrete else values[..., 0]

    return Network(init, apply)


def init_critics(critics: Network, key: jax.Array, action_space: Discrete | Box, obs: jax.Array) -> Any:
    """Initializes critics for observations `[B, ...]` and the actions of a space."""
    if isinstance(action_space, Discrete):
        return critics.init(key, obs)
    batch = len(jax.tree.leaves(obs)[0])
    return critics.init(key, obs, jnp.zeros((batch, math.prod(action_space.shape))))


def taken_value(critics: Network, params: Any, obs: jax.Array, action: jax.Array) -> jax.Array:
    """The critics' values `[C, B]` of actions `[B]` or `[B, D]`."""
    if jnp.issubdtype(action.dtype, jnp.integer):
        return jnp.take_along_axis(critics.apply(params, obs), action[None, :, None], axis=-1)[..., 0]
    return critics.apply(params, obs, action)


def make_value(observation_space: Space, config: Layers) -> Network:
    """Makes the network of a value function.

    Args:
      observation_space: any space.
      config: the layers.

    Returns:
      The network: `(params, obs [..., *observation_shape]) -> values [...]`.

    Raises:
      ValueError: if the network convolves and the observations are not images of at least 3x3.
    """
    network = linear_network(observation_space, config, num_outputs=1, scale=1.0)
    return Network(network.init, lambda params, obs: network.apply(params, obs)[..., 0])
