"""A policy and a value function for an action space: one module, without a recurrent core."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
from flax import linen as nn

from msrl_jax.envs import Box, Discrete, Space
from msrl_jax.envs.masks import unmasked
from msrl_jax.envs.privileged import PrivilegedObservation
from msrl_jax.envs.spaces import is_continuous
from msrl_jax.networks.distributions import Distribution
from msrl_jax.networks.policy_heads import check_policy_space, num_outputs, policy_of
from msrl_jax.networks.torso import AsymmetricTorso, Torso


class _Module(nn.Module):
    """The network of `policy_and_value`."""

    actor_torso: Torso
    critic_torso: Torso | None  # None if the critic shares the actor's
    action_space: Discrete | Box

    def setup(self):
        """Makes the heads."""
        size = num_outputs(self.action_space)
        self.actor_head = self.actor_torso.head(size, 0.01)
        self.critic_head = (self.critic_torso or self.actor_torso).head(1, 1.0)
        self.log_scale = self.param("log_scale", nn.initializers.zeros, (size,)) if is_continuous(self.action_space) else None

    def __call__(self, obs: jax.Array) -> tuple[Distribution, jax.Array]:
        """Maps observations `[..., *observation_shape]` to a distribution over actions and values `[...]`.

        If observations lack the privileged state that the critic needs, returns the actor's features instead of values.
        """
        features = self.actor_torso(obs)
        policy = self._distribution(features, obs)
        if not self._sees(obs):
            return policy, features
        return policy, self._value(features if self.critic_torso is None else self.critic_torso(obs))

    def policy(self, obs: jax.Array) -> Distribution:
        """Returns only the distribution over actions."""
        return self._distribution(self.actor_torso(obs), obs)

    def value(self, obs: jax.Array) -> jax.Array:
        """Returns only the values. `[...]`."""
        return self._value((self.critic_torso or self.actor_torso)(obs))

    def _sees(self, obs: Any) -> bool:
        """Whether observations contain the inputs of the critic."""
        sees_all = self.critic_torso is None or self.critic_torso.input_part == "obs"
        return sees_all or isinstance(unmasked(obs), PrivilegedObservation)

    def _distribution(self, features: jax.Array, obs: Any) -> Distribution:
        return policy_of(self.action_space, self.actor_head(features), obs, self.log_scale)

    def _value(self, features: jax.Array) -> jax.Array:
        return self.critic_head(features)[..., 0]


class PolicyAndValue(NamedTuple):
    """A policy and a value function as pure functions of their parameters, from any network library."""

    init: Callable[[jax.Array, jax.Array], Any]  # (key, obs [..., *observation_shape]) -> params
    apply: Callable[[Any, jax.Array], tuple[Distribution, jax.Array]]  # (params, obs) -> (policy, value [...])
    policy: Callable[[Any, jax.Array], Distribution]  # (params, obs) -> distribution over actions
    value: Callable[[Any, jax.Array], jax.Array]  # (params, obs) -> value [...]


def policy_and_value(torso: Torso | AsymmetricTorso, action_space: Space, *, shared_torso: bool = False) -> PolicyAndValue:
    """Makes the network for an action space: one torso for policy and value or one each, and linear heads."""
    actor = torso.of("actor")
    if shared_torso and actor.is_whole:
        raise ValueError("network=CustomNetworks(...) shares no torso; use shared_torso=False, or give a module of features")
    if shared_torso and isinstance(torso, AsymmetricTorso):
        raise ValueError(
            "shared_torso=True: the critic sees the environment's privileged_state and the actor does not, so they share no "
            "torso; use shared_torso=False"
        )
    critic = None if shared_torso else torso.of("critic").clone()
    module = _Module(actor, critic, check_policy_space(action_space))
    policy, value = (functools.partial(module.apply, method=method) for method in ("policy", "value"))
    apply, policy, value = (cast(Any, f) for f in (module.apply, policy, value))
    return PolicyAndValue(module.init, apply, policy, value)
