"""Networks for action values, or for distributions of returns."""

import math

import jax
from flax import linen as nn

from msrl_jax.algorithms.networks.layers import ACTIVATIONS, Layers, Network, Torso, dense, make_torso
from msrl_jax.envs import Discrete, Space


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


def q_network(
    observation_space: Space, action_space: Discrete, config: Layers, *, dueling: bool = False, num_atoms: int = 1
) -> Network:
    """Makes the network of action values for a pair of spaces.

    Args:
      observation_space: any space; of images `[H, W, C]` if the network convolves.
      action_space: the space of `A` actions.
      config: the layers.
      dueling: whether the last dense layer is split into two streams, one for the value of the observation and one for the
        advantages of the actions minus their mean (Wang et al., 2016, arXiv 1511.06581, eq. 9); the mean is over all
        actions, illegal ones too.
      num_atoms: number of outputs per action, `N`; the algorithm decides their meaning.

    Returns:
      The network: `(params, obs [..., *observation_shape]) -> outputs [..., A, N]`, with a torso and a head, orthogonal
      initialization, and outputs close to 0.

    Raises:
      ValueError: if the network convolves and the observations are not images of at least 3x3.
    """
    return q_network_on(make_torso(observation_space, config), action_space, dueling=dueling, num_atoms=num_atoms)


def q_network_on(torso: Torso, action_space: Discrete, *, dueling: bool, num_atoms: int = 1) -> Network:
    """Makes a `q_network` with the layers of a torso: at least one if it is `dueling`."""
    space, sizes = torso.observation_space, torso.hidden_sizes
    module = _Module(space, action_space.n, num_atoms, sizes, torso.activation, torso.convolve, dueling)
    return Network(module.init, module.apply)
