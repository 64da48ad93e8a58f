"""Policies for off-policy and offline actor-critics.

In the shape descriptions, `B` denotes the batch size and `D` the length of a continuous action. Continuous actions are in
[-1, 1]; only the environment has other units.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from msrl_jax.algorithms.networks.actions import discrete_policy, has_scale, num_outputs
from msrl_jax.algorithms.networks.actor_critic import Layers, Torso, make_torso
from msrl_jax.algorithms.networks.distributions import Categorical, MultiCategorical, Normal, TanhNormal, choose
from msrl_jax.algorithms.networks.layers import dense
from msrl_jax.envs import Box, Discrete, Space


@dataclasses.dataclass(frozen=True)
class Network:
    """A network as pure functions of its parameters.

    Attributes:
      init: `(key, *inputs) -> params`.
      apply: `(params, *inputs) -> outputs`.
    """

    init: Callable[..., Any]
    apply: Callable[..., jax.Array]


class _Linear(nn.Module):
    """A torso and a linear layer."""

    torso: Torso
    num_outputs: int
    scale: float

    @nn.compact
    def __call__(self, *inputs: jax.Array) -> jax.Array:
        """Maps the torso's inputs to `[..., num_outputs]`."""
        return dense(self.num_outputs, self.scale)(self.torso(*inputs))


def linear_network(observation_space: Space, config: Layers, *, num_outputs: int, scale: float) -> Network:
    """Makes a network of a torso and a linear layer.

    Args:
      observation_space: any space.
      config: the layers.
      num_outputs: number of outputs.
      scale: scale of the linear layer's initial weights.

    Returns:
      The network: `(params, obs [..., *observation_shape]) -> [..., num_outputs]`; actions `[..., D]` may follow `obs`.

    Raises:
      ValueError: if the network convolves and the observations are not images of at least 3x3.
    """
    torso = make_torso(observation_space, config)
    module = _Linear(torso, num_outputs, scale)
    return Network(module.init, cast(Any, module.apply))


def make_actor(observation_space: Space, num_outputs: int, config: Layers) -> Network:
    """Makes the network of a policy: a `linear_network` with initial outputs near 0."""
    return linear_network(observation_space, config, num_outputs=num_outputs, scale=0.01)


@dataclasses.dataclass(frozen=True)
class Policy:
    """A distribution over actions as pure functions of parameters.

    Attributes:
      init: `(key, obs [..., *observation_shape]) -> params`.
      apply: `(params, obs) -> distribution`.
    """

    init: Callable[[jax.Array, jax.Array], Any]
    apply: Callable[[Any, jax.Array], Categorical | MultiCategorical | TanhNormal]

    def choose_action(self, params: Any, obs: jax.Array, key: jax.Array | None) -> jax.Array:
        """Actions for observations `[E, ...]`: drawn, or the most probable ones if `key` is None."""
        return choose(self.apply(params, obs), key)


def make_policy(observation_space: Space, action_space: Discrete | Box, config: Layers) -> Policy:
    """Makes a stochastic policy: discrete, or continuous in [-1, 1] with a scale that depends on the observation.

    Args:
      observation_space: any space.
      action_space: `Discrete`, or a `Box` of floats or of integers.
      config: the layers.

    Returns:
      The policy.

    Raises:
      ValueError: if the network convolves and the observations are not images of at least 3x3.
    """
    if not has_scale(action_space):
        logits = make_actor(observation_space, num_outputs(action_space), config)
        return Policy(logits.init, lambda params, obs: discrete_policy(action_space, logits.apply(params, obs), obs))
    network = make_actor(observation_space, 2 * math.prod(action_space.shape), config)

    def apply(params: Any, obs: jax.Array) -> TanhNormal:
        loc, log_scale = jnp.split(network.apply(params, obs), 2, axis=-1)
        return TanhNormal(Normal(loc, jnp.clip(log_scale, -20.0, 2.0)))

    return Policy(network.init, apply)


def log_likelihood(policy: Categorical | MultiCategorical | TanhNormal, action: jax.Array) -> jax.Array:
    """Log-likelihoods of the actions of a data set.

    Continuous actions are clipped to [-0.999, 0.999], because the log-density of a squashed distribution has no use at a
    bound.

    Args:
      policy: the distribution.
      action: discrete actions `[B]`, integers `[B, K]`, or continuous ones in [-1, 1] `[B, D]`.

    Returns:
      The log-likelihoods, in nats. `[B]`
    """
    return policy.log_prob(jnp.clip(action, -0.999, 0.999) if isinstance(policy, TanhNormal) else action)
