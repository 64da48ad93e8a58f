"""Mixers: the value of a team's joint action from the values of the actions of its agents.

In the shape descriptions, `A` denotes the number of agents and `S` the length of a global state.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from msrl_jax.algorithms.networks.layers import dense


@dataclasses.dataclass(frozen=True)
class Mixer:
    """A mixer as pure functions of its parameters.

    Attributes:
      init: `(key) -> params`.
      apply: `(params, values [..., A], state [..., S]) -> [...]`; it never falls if one of the values rises, so the best joint
        action is the best action of every agent. A sum ignores the state, which may be `()`.
    """

    init: Callable[[jax.Array], Any]
    apply: Callable[[Any, jax.Array, Any], jax.Array]


def sum_mixer() -> Mixer:
    """Makes the mixer of VDN: the sum (Sunehag et al., 2017, arXiv 1706.05296). It has no parameters."""
    return Mixer(init=lambda key: {}, apply=lambda params, values, state: values.sum(-1))


def monotonic_mixer(num_agents: int, state_size: int, *, mixing_size: int, hyper_size: int) -> Mixer:
    """Makes the mixer of QMIX (Rashid et al., 2018, arXiv 1803.11485, section 4.1).

    Its layers are `elu` and linear. Hypernetworks of two layers compute their weights, of which absolute values are taken, and
    their biases, which may have any sign, from the global state.

    Args:
      num_agents: number of values, `A`.
      state_size: length of a global state, `S`.
      mixing_size: width of the hidden layer.
      hyper_size: width of the hidden layers of the hypernetworks.

    Returns:
      The mixer.
    """
    module = _Monotonic(num_agents, mixing_size, hyper_size)
    init = lambda key: module.init(key, jnp.zeros((1, num_agents)), jnp.zeros((1, state_size)))  # noqa: E731
    return Mixer(init, cast(Any, module.apply))


class _Monotonic(nn.Module):
    """The mixer of QMIX."""

    num_agents: int
    mixing_size: int
    hyper_size: int

    @nn.compact
    def __call__(self, values: jax.Array, state: jax.Array) -> jax.Array:
        """Maps values `[..., A]` and states `[..., S]` to `[...]`."""

        # Small at first: weights of about 1 would multiply the agents' values, and their gradients, by more than ten.
        def hyper(size: int) -> jax.Array:
            return dense(size, 0.1)(nn.relu(dense(self.hyper_size, math.sqrt(2))(state)))

        weights = jnp.abs(hyper(self.num_agents * self.mixing_size))
        weights = weights.reshape(*weights.shape[:-1], self.num_agents, self.mixing_size)
        bias = dense(self.mixing_size, 0.1)(state)
        hidden = nn.elu(jnp.sum(values[..., None] * weights, axis=-2) + bias)
        return jnp.sum(hidden * jnp.abs(hyper(self.mixing_size)), axis=-1) + hyper(1)[..., 0]
