"""Networks for action values or return distributions, and the choice of targets and actions."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn

from msrl_jax.configs.exploration import Exploration
from msrl_jax.envs import Discrete
from msrl_jax.envs.actions import uniform_actions
from msrl_jax.fragments.counters import Counter, at_least
from msrl_jax.networks.layers import ACTIVATIONS, hidden
from msrl_jax.networks.network import Network
from msrl_jax.networks.torso import NetworkFields, Torso


class ActionValues(nn.Module):
    """The network of `q_network`."""

    torso: Torso
    num_actions: int
    num_outputs: int
    stream_size: int | None
    dueling: bool

    @nn.compact
    def __call__(self, obs: jax.Array, *inputs: jax.Array) -> jax.Array:
        """Maps observations `[..., *observation_shape]` to outputs `[..., A, N]`; subclasses may take more inputs."""
        return self.outputs(self.torso(obs))

    def outputs(self, features: jax.Array) -> jax.Array:
        """Maps features `[..., F]` to outputs `[..., A, N]`."""
        if (size := self.stream_size) is None:
            return self._head("head", features, self.num_actions)
        activation, layer_norm = ACTIVATIONS[self.torso.activation], self.torso.layer_norm
        stream = lambda name: hidden(features, size, activation, layer_norm, name)
        if not self.dueling:
            return self._head("head", stream("stream"), self.num_actions)
        value = self._head("value_head", stream("value_stream"), 1)
        advantage = self._head("advantage_head", stream("advantage_stream"), self.num_actions)
        return value + advantage - advantage.mean(-2, keepdims=True)

    def _head(self, name: str, features: jax.Array, num_actions: int) -> jax.Array:
        outputs = self.torso.head(num_actions * self.num_outputs, 0.01, name)(features)
        return outputs.reshape(*features.shape[:-1], num_actions, self.num_outputs)


def q_network(torso: Torso, action_space: Discrete, *, dueling: bool = False, num_outputs: int = 1) -> Network:
    """Makes the network of outputs `[..., A, N]`, near 0 at first, with two streams if `dueling` (arXiv 1511.06581, eq. 9)."""
    torso = torso.of("critic")
    torso, size = split_torso(torso) if dueling else (torso.clone(), None)
    module = ActionValues(torso, action_space.n, num_outputs, size, dueling)
    return Network(module.init, module.apply)


def split_torso(torso: Torso) -> tuple[Torso, int]:
    """Splits off the last hidden layer, for streams: returns the torso before it, and its width."""
    if torso.is_whole:
        raise ValueError("network=CustomNetworks(...) has no place for streams or fractions; give a module of features")
    return torso.clone(hidden_sizes=torso.hidden_sizes[:-1]), torso.hidden_sizes[-1]


def value_heads(torso: Torso, action_space: Discrete, config: NetworkFields, *, dueling: bool) -> Network:
    """Makes the head for action values `[..., A]` after a recurrent core: linear, or two streams as wide as the last layer."""
    if dueling and not torso.hidden_sizes:
        torso = torso.clone(hidden_sizes=config.hidden_sizes[-1:])
    heads = q_network(torso, action_space, dueling=dueling)
    return Network(heads.init, lambda params, x: heads.apply(params, x)[..., 0])


def greedy_target(next_value: jax.Array, next_target: jax.Array) -> jax.Array:
    """Returns the target network's outputs for the action with the largest `next_value` `[A]` (arXiv 1509.06461)."""
    chex.assert_rank(next_value, 1)
    chex.assert_equal_shape_prefix((next_value, next_target), 1)
    return next_target[jnp.argmax(next_value)]


def exploration_rate(exploration: Exploration, steps: Counter, num_envs: int, learning_starts: int = 0) -> jax.Array:
    """Returns the probability of random actions after `steps`, `[]` or `[E]`; 1 before `learning_starts` steps."""
    epsilon = exploration.epsilon(steps, num_envs)
    if jnp.shape(epsilon) not in ((), (num_envs,)):
        raise ValueError(
            f"{type(exploration).__name__}.epsilon returns an array of shape {list(jnp.shape(epsilon))}; return a number, or "
            f"one for each of the {num_envs} environments"
        )
    return jnp.where(at_least(steps, learning_starts), epsilon, 1.0)


def epsilon_greedy(epsilon: jax.Array, greedy_actions: jax.Array, keys: jax.Array, obs: Any, num_actions: int) -> jax.Array:
    """Returns greedy actions `[B]`, or random ones with probability `epsilon`, `[]` or `[B]`."""
    explore_keys, action_keys = jax.vmap(lambda key: jax.random.split(key), out_axes=1)(keys)
    explores = jax.vmap(jax.random.uniform)(explore_keys) < epsilon
    return jnp.where(explores, uniform_actions(action_keys, Discrete(num_actions), obs), greedy_actions)
