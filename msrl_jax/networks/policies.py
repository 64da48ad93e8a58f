"""Policies and critics of off-policy and offline actor-critics.

In the shape descriptions, `B` denotes the batch size, `C` the number of critics, `N` the number of discrete actions and `D`
the length of a continuous action. Continuous actions are in [-1, 1]; only the environment uses other units. Convolutional
networks raise ValueError if observations are not images of at least 3x3.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from msrl_jax.envs import Box, Discrete, Space
from msrl_jax.networks.distributions import Categorical, Normal, discrete_policy, has_scale, num_outputs
from msrl_jax.networks.network import Network
from msrl_jax.networks.torso import Part, Seen, Torso, make_torsos


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


def make_policy(seen: Seen, action_space: Discrete | Box, config: Any) -> Network:
    """Makes a stochastic policy: `(params, obs) -> Categorical or TanhNormal`, whose scale depends on `obs`."""
    if not has_scale(action_space):
        logits = make_actor(seen, num_outputs(action_space), config)
        return Network(logits.init, lambda params, obs: discrete_policy(action_space, logits.apply(params, obs), obs))
    network = make_actor(seen, 2 * math.prod(action_space.shape), config)

    def apply(params: Any, obs: jax.Array) -> TanhNormal:
        loc, log_scale = jnp.split(network.apply(params, obs), 2, axis=-1)
        return TanhNormal(Normal(loc, jnp.clip(log_scale, -20.0, 2.0)))

    return Network(network.init, apply)


def log_likelihood(policy: Categorical | TanhNormal, action: jax.Array) -> jax.Array:
    """Returns log-likelihoods `[B]` of a data set's actions; clips floats, because the density is useless at bounds."""
    return policy.log_prob(jnp.clip(action, -0.999, 0.999) if isinstance(policy, TanhNormal) else action)


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
