"""Stochastic policies and critics of off-policy and offline actor-critics: for continuous actions here.

In the shape descriptions, `B` denotes the batch size and `N` the length of an action. Continuous actions are in [-1, 1]; only
the environment uses other units.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax.envs import Box, Space
from msrl_jax.envs.spaces import is_continuous
from msrl_jax.networks.distributions import Normal
from msrl_jax.networks.heads import make_actor, make_critics
from msrl_jax.networks.network import Network
from msrl_jax.networks.torso import NetworkFields, SpaceOrTorsos


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TanhNormal:
    """A diagonal normal distribution squashed by `tanh`; actions are `[..., N]` float32 in [-1, 1] (arXiv 1801.01290, C)."""

    base: Normal  # before squashing

    def sample_and_log_prob(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Draws one reparameterized vector per element, and its exact log-density. `[..., N]` and `[...]`."""
        unsquashed = self.base.sample(key)
        return jnp.tanh(unsquashed), self.base.log_prob(unsquashed) - jnp.sum(_log_tanh_slope(unsquashed), axis=-1)

    def sample(self, key: jax.Array) -> jax.Array:
        """Draws one reparameterized vector per element. `[..., N]`."""
        return jnp.tanh(self.base.sample(key))

    def mode(self) -> jax.Array:
        """Returns the squashed means, which are the medians; the density may peak at the bounds instead. `[..., N]`."""
        return jnp.tanh(self.base.loc)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Returns the log-density of `action` `[..., N]`; clips actions at a bound to the nearest number inside. `[...]`."""
        largest = 1 - jnp.finfo(action.dtype).epsneg
        unsquashed = jnp.arctanh(jnp.clip(action, -largest, largest))
        return self.base.log_prob(unsquashed) - jnp.sum(_log_tanh_slope(unsquashed), axis=-1)

    def expectation(self, x: jax.Array) -> jax.Array:
        """Estimates the mean of a function over actions by `x`, its value for the sampled action. `[...]`."""
        return x

    def usual_target_entropy(self) -> float:
        """Returns the target of SAC's entropy: minus the length of an action."""
        return -float(self.base.loc.shape[-1])

    def entropy(self) -> jax.Array:
        """Computes differential entropy in nats, by quadrature: accurate to 1e-4 per dimension for scales up to 8. `[...]`."""
        # The trapezoidal rule converges exponentially for smooth functions times a normal density.
        z = jnp.linspace(-8.0, 8.0, 161, dtype=jnp.float32)
        weight = jnp.exp(-0.5 * jnp.square(z)) * 0.1 / math.sqrt(2 * math.pi)
        slope = _log_tanh_slope(self.base.loc[..., None] + jnp.exp(self.base.log_scale)[..., None] * z)
        return self.base.entropy() + jnp.sum(slope @ weight, axis=-1)


def _log_tanh_slope(x: jax.Array) -> jax.Array:
    """Returns the logarithm of the derivative of `tanh`, `log(1 - tanh(x) ** 2)`, without cancellation."""
    return 2 * (math.log(2) - x - jax.nn.softplus(-2 * x))


def tanh_policy(space_or_torsos: SpaceOrTorsos, action_space: Box, config: NetworkFields) -> Network:
    """Makes a stochastic policy: `(params, obs) -> TanhNormal`, whose scale depends on `obs`."""
    network = make_actor(space_or_torsos, 2 * math.prod(action_space.shape), config)

    def apply(params: Any, obs: jax.Array) -> TanhNormal:
        loc, log_scale = jnp.split(network.apply(params, obs), 2, axis=-1)
        return TanhNormal(Normal(loc, jnp.clip(log_scale, -20.0, 2.0)))

    return Network(network.init, apply)


class ActionHeads(NamedTuple):
    """How to make the networks of an actor-critic for one kind of actions."""

    policy: Callable[..., Network]  # (space_or_torsos, action_space, config) -> network of a distribution over actions
    critics: Callable[..., Network]  # as `make_critics`


HEADS: dict[Literal["continuous", "discrete"], ActionHeads] = {"continuous": ActionHeads(tanh_policy, make_critics)}
"""The networks by kind of actions; `networks/discrete_policies.py` adds those of discrete ones."""


def heads_of(action_space: Space) -> ActionHeads:
    """Returns how to make networks for an action space."""
    return HEADS["continuous" if is_continuous(action_space) else "discrete"]


def log_likelihood(policy: Any, action: jax.Array) -> jax.Array:
    """Returns log-likelihoods `[B]` of a data set's actions; clips floats, because the density is useless at bounds."""
    return policy.log_prob(jnp.clip(action, -0.999, 0.999) if isinstance(policy, TanhNormal) else action)
