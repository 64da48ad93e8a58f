"""Probability distributions over actions, as small pytrees.

A distribution has a batch shape `[...]`: the shape of its parameters without the last dimension. All methods work on
the whole batch. `sample` takes one typed key per element, so that a sample does not depend on the rest of the batch.
Log-probabilities and entropies are in nats, of densities if actions are continuous.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from msrl_jax.envs.masks import inverse_cdf_index


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Categorical:
    """A distribution over `N` discrete actions, `[...]` int32; or over `K` independent integers, `[..., K]` int32."""

    # Log-probabilities up to a constant; -inf masks an illegal action, or pads the values of an integer; at least one must be
    # finite. `[..., N]` or `[..., K, N]`
    logits: jax.Array
    several: bool = dataclasses.field(default=False, metadata={"static": True})  # whether an action is several integers

    def sample(self, key: jax.Array) -> jax.Array:
        """Draws one action per element by inverting the cumulative distribution, with one uniform number per integer."""
        shape = self.logits.shape[-2:-1] if self.several else ()
        weights = jnp.exp(self.logits - jnp.max(self.logits, axis=-1, keepdims=True))
        return inverse_cdf_index(weights, _per_key(lambda k: jax.random.uniform(k, shape, jnp.float32), key))

    def mode(self) -> jax.Array:
        """Returns the most probable actions; the first ones in case of ties."""
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def probabilities(self) -> jax.Array:
        """Returns the probabilities of actions, or of the values of every integer. `[..., N]` or `[..., K, N]`."""
        return jax.nn.softmax(self.logits)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Returns the log-probability of `action` `[...]` or `[..., K]` integer. `[...]`."""
        logit = jnp.take_along_axis(self.logits, action[..., None], axis=-1)[..., 0]
        return self._joint(logit - jax.nn.logsumexp(self.logits, axis=-1))

    def entropy(self) -> jax.Array:
        """Returns the entropy in nats; a masked action adds nothing, nor does it affect gradients. `[...]`."""
        log_probs = jax.nn.log_softmax(self.logits)
        p = jnp.exp(log_probs)
        return self._joint(-jnp.sum(jnp.where(p > 0, p * jnp.where(p > 0, log_probs, 0.0), 0.0), axis=-1))

    def _joint(self, x: jax.Array) -> jax.Array:
        return jnp.sum(x, axis=-1) if self.several else x


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Normal:
    """A diagonal normal distribution over vectors of length `N`; actions are `[..., N]` float32."""

    loc: jax.Array  # means, [..., N]
    log_scale: jax.Array  # logarithms of the standard deviations, [..., N]

    def sample(self, key: jax.Array) -> jax.Array:
        """Draws one reparameterized vector per element. `[..., N]`."""
        noise = _per_key(lambda k: jax.random.normal(k, self.loc.shape[-1:], self.loc.dtype), key)
        return self.loc + jnp.exp(self.log_scale) * noise

    def mode(self) -> jax.Array:
        """Returns the means. `[..., N]`."""
        return self.loc

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Returns the log-density of `action` `[..., N]`. `[...]`."""
        z = (action - self.loc) * jnp.exp(-self.log_scale)
        return jnp.sum(-0.5 * jnp.square(z) - self.log_scale - 0.5 * math.log(2 * math.pi), axis=-1)

    def entropy(self) -> jax.Array:
        """Returns the differential entropy in nats. `[...]`."""
        return jnp.sum(self.log_scale + 0.5 * math.log(2 * math.pi * math.e), axis=-1)


Distribution: TypeAlias = Categorical | Normal
"""The distributions that `policy_heads.policy_of` makes."""


def choose(policy: Distribution, key: jax.Array | None, batch_dims: int = 1) -> jax.Array:
    """Chooses actions for a batch `[E]`, or `[E, A]` for agents: sampled with one key; the most probable if it is None."""
    return policy.mode() if key is None else policy.sample(jax.random.split(key, jax.tree.leaves(policy)[0].shape[:batch_dims]))


def _per_key(draw: Callable[[jax.Array], jax.Array], key: jax.Array) -> jax.Array:
    for _ in range(key.ndim):
        draw = jax.vmap(draw)
    return draw(key)
