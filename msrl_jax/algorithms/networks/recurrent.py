"""Recurrent networks: an actor-critic and action values on a recurrent core.

In the shape descriptions, `T` denotes the length of an unroll, `E` the number of environments and `H` the size of the
recurrent state.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.algorithms.networks.actor_critic import Layers, linear_actor_critic, make_torso
from msrl_jax.algorithms.networks.cores import Carry, recurrent_core
from msrl_jax.algorithms.networks.layers import flatten, unflatten
from msrl_jax.algorithms.networks.q_network import q_network_on_features
from msrl_jax.envs import Box, Discrete, Space
from msrl_jax.envs.masks import with_mask_of
from msrl_jax.envs.spaces import zeros


class Heads(Protocol):
    """A network from features to outputs, such as an `ActorCritic` or a `QNetwork`."""

    @property
    def init(self) -> Callable[[jax.Array, jax.Array], Any]:
        """`(key, features [..., H]) -> params`."""
        ...

    @property
    def apply(self) -> Callable[[Any, jax.Array], Any]:
        """`(params, features [..., H]) -> outputs [..., ...]`."""
        ...


@dataclasses.dataclass(frozen=True)
class RecurrentNetwork:
    """A recurrent network as pure functions of its parameters; its heads compute the outputs.

    Attributes:
      init: `(key) -> params`.
      initial_carry: `(batch_shape) -> carry`, zeros.
      step: `(params, obs [..., *observation_shape], carry [..., H]) -> (outputs [..., ...], carry)`.
      unroll: `(params, obs [T, E, *observation_shape], is_first [T, E] bool, carry [E, H]) -> (outputs [T, E, ...], carries
        after every step [T, E, H])`; the carry is cleared before the first step of every episode.
    """

    init: Callable[[jax.Array], Any]
    initial_carry: Callable[[tuple[int, ...]], Carry]
    step: Callable[[Any, Any, Carry], tuple[Any, Carry]]
    unroll: Callable[[Any, Any, jax.Array, Carry], tuple[Any, Carry]]


class RecurrentLayers(Layers, Protocol):
    """What a config says of a recurrent network: its dense layers, then its core."""

    @property
    def core(self) -> Any: ...  # noqa: D102
    @property
    def memory_size(self) -> int: ...  # noqa: D102


def recurrent_network(
    observation_space: Space, make_heads: Callable[[Box], Heads], config: Layers, *, core: Any, memory_size: int
) -> RecurrentNetwork:
    """Makes a network of a torso, a recurrent core, and heads.

    Args:
      observation_space: any space; of images `[H, W, C]` if the network convolves.
      make_heads: makes the heads for the space of the core's outputs.
      config: sizes of the torso.
      core: the kind of the core.
      memory_size: its size, `H`.

    Returns:
      The network.

    Raises:
      ValueError: if the network convolves and the observations are not images of at least 3x3.
    """
    torso = make_torso(observation_space, config)
    memory = recurrent_core(core, memory_size)
    heads = make_heads(Box(-np.inf, np.inf, (memory_size,)))

    def init(key: jax.Array) -> dict[str, Any]:
        torso_key, core_key, heads_key = jax.random.split(key, 3)
        return {
            "torso": torso.init(torso_key, zeros(observation_space)),
            "core": memory.init(core_key, config.hidden_sizes[-1]),
            "heads": heads.init(heads_key, jnp.zeros((1, memory_size))),
        }

    def features(params: Any, obs: jax.Array) -> jax.Array:
        return torso.apply(params["torso"], obs)  # pyright: ignore[reportReturnType]

    def step(params: Any, obs: jax.Array, carry: Carry) -> tuple[Any, Carry]:
        carry = memory.step(params["core"], features(params, obs), carry)
        return heads.apply(params["heads"], with_mask_of(obs, carry[0])), carry

    def unroll(params: Any, obs: jax.Array, is_first: jax.Array, carry: Carry) -> tuple[Any, Carry]:
        # A convolution takes one dimension of images; in the order [E * T] they stay split over devices like the environments.
        inputs = unflatten(features(params, flatten(obs)), len(is_first)) if torso.convolve else features(params, obs)
        carries = memory.unroll(params["core"], inputs, is_first, carry)
        return heads.apply(params["heads"], with_mask_of(obs, carries[0])), carries

    return RecurrentNetwork(init, memory.initial_carry, step, unroll)


def recurrent_actor_critic(observation_space: Space, action_space: Space, config: RecurrentLayers) -> RecurrentNetwork:
    """Makes a recurrent policy and value function: linear heads on a recurrent core.

    Args:
      observation_space: any space; of images `[H, W, C]` if the network convolves.
      action_space: `Discrete`, or a `Box` of floats or of integers.
      config: sizes of the torso and the core.

    Returns:
      The network. Its outputs are distributions over actions, as in `actor_critic`, and values `[...]`.

    Raises:
      TypeError: if the space of actions is of another kind.
      ValueError: if the network convolves and the observations are not images of at least 3x3.
    """
    heads = lambda features: linear_actor_critic(features, action_space)  # noqa: E731
    return recurrent_network(observation_space, heads, config, core=config.core, memory_size=config.memory_size)


def recurrent_q_network(
    observation_space: Space, action_space: Discrete, config: RecurrentLayers, *, dueling: bool
) -> RecurrentNetwork:
    """Makes recurrent action values: a linear head on a recurrent core, or two streams of one dense layer each.

    Args:
      observation_space: any space; of images `[H, W, C]` if the network convolves.
      action_space: its size is `A`.
      config: sizes of the torso and the core; streams are as wide as the last dense layer.
      dueling: whether there are separate streams for values and for advantages.

    Returns:
      The network: its outputs are values `[..., A]`.

    Raises:
      ValueError: if the network convolves and the observations are not images of at least 3x3.
    """

    def make_heads(features: Box) -> Heads:
        sizes = config.hidden_sizes[-1:] if dueling else ()
        heads = q_network_on_features(features, action_space, hidden_sizes=sizes, activation=config.activation, dueling=dueling)
        return dataclasses.replace(heads, apply=lambda params, x: heads.apply(params, x)[..., 0])

    return recurrent_network(observation_space, make_heads, config, core=config.core, memory_size=config.memory_size)
