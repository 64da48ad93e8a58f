"""Networks for action values, or for distributions of returns."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import jax
from flax import linen as nn

from msrl_jax.algorithms.networks.actor_critic import ACTIVATIONS, Layers, Torso, make_torso
from msrl_jax.algorithms.networks.layers import dense
from msrl_jax.envs import Box, Discrete, Space


class _Module(nn.Module):
    """The network of `q_network`."""

    observation_space: Space
    num_actions: int
    num_atoms: int
    hidden_sizes: tuple[int, ...]
    activation: str
    convolve: bool
    dueling: bool

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        """Maps observations `[..., *observation_shape]` to outputs `[..., A, N]`."""
        shared = self.hidden_sizes[:-1] if self.dueling else self.hidden_sizes
        features = Torso(self.observation_space, shared, self.activation, self.convolve, name="torso")(obs)
        if not self.dueling:
            return self._head("head", features, self.num_actions)
        value = self._head("value_head", self._stream("value_stream", features), 1)
        advantage = self._head("advantage_head", self._stream("advantage_stream", features), self.num_actions)
        return value + advantage - advantage.mean(-2, keepdims=True)

    def _stream(self, name: str, features: jax.Array) -> jax.Array:
        return ACTIVATIONS[self.activation](dense(self.hidden_sizes[-1], math.sqrt(2), name)(features))

    def _head(self, name: str, features: jax.Array, num_actions: int) -> jax.Array:
        outputs = dense(num_actions * self.num_atoms, 0.01, name)(features)
        return outputs.reshape(*features.shape[:-1], num_actions, self.num_atoms)


@dataclasses.dataclass(frozen=True)
class QNetwork:
    """Outputs for every action as pure functions of parameters, from any network library.

    Attributes:
      init: `(key, obs [..., *observation_shape]) -> params`.
      apply: `(params, obs) -> outputs [..., A, N]`; the algorithm decides the meaning of the `N` outputs per action.
    """

    init: Callable[[jax.Array, jax.Array], Any]
    apply: Callable[[Any, jax.Array], jax.Array]


def q_network(
    observation_space: Space, action_space: Discrete, config: Layers, *, dueling: bool = False, num_atoms: int = 1
) -> QNetwork:
    """Makes the network for a pair of spaces.

    Args:
      observation_space: any space; of images `[H, W, C]` if the network convolves.
      action_space: the space of `A` actions.
      config: the layers.
      dueling: whether the last dense layer is split into two streams, one for the value of the observation and one for the
        advantages of the actions minus their mean (Wang et al., 2016, arXiv 1511.06581, eq. 9); the mean is over all
        actions, illegal ones too.
      num_atoms: number of outputs per action, `N`.

    Returns:
      The network: a torso and a head, orthogonal initialization, outputs close to 0.

    Raises:
      ValueError: if the network convolves and the observations are not images of at least 3x3.
    """
    torso = make_torso(observation_space, config)
    return _q_network(torso, action_space.n, num_atoms, dueling)


def q_network_on_features(
    features: Box, action_space: Discrete, *, hidden_sizes: tuple[int, ...], activation: str, dueling: bool
) -> QNetwork:
    """Makes the head of a larger network: action values from feature vectors.

    Args:
      features: the space of the features.
      action_space: the space of `A` actions.
      hidden_sizes: widths of the dense layers; at least one if `dueling`.
      activation: a key of `ACTIVATIONS`.
      dueling: as in `q_network`.

    Returns:
      The network, with one output for each action.
    """
    return _q_network(Torso(features, hidden_sizes, activation, convolve=False), action_space.n, 1, dueling)


def _q_network(torso: Torso, num_actions: int, num_atoms: int, dueling: bool) -> QNetwork:
    module = _Module(
        torso.observation_space, num_actions, num_atoms, torso.hidden_sizes, torso.activation, torso.convolve, dueling
    )
    return QNetwork(module.init, cast(Any, module.apply))
