"""Legal actions: environments that declare them, and functions of observations with masks.

An environment with a method `action_mask(state)` declares its legal actions; `with_masks` adds them to its observations as
`MaskedObservation`. The other functions also accept plain observations, and then change nothing. In the shape descriptions,
`n` is the number of actions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import spaces
from msrl_jax.envs.base import (
    Environment,
    MaskedObservation,
    PyTree,
    Stepped,
    Wrapper,
    delegate,
    env_name,
    is_on_host,
    output_shapes,
)


def has_masks(env: object) -> bool:
    """Whether an environment declares its legal actions."""
    return getattr(env, "action_mask", None) is not None


def observation_type(env: Any) -> PyTree:
    """Shapes and dtypes of one observation, with its mask if it has one."""
    if is_on_host(env):
        return spaces.struct(env.observation_space)
    return output_shapes(with_masks(env).reset)[1]


def with_masks(env: Environment) -> Environment:
    """Returns the environment with `MaskedObservation`s if it declares its legal actions, otherwise the environment itself.

    Every observation needs a legal action, except after a step that terminated the episode. If an observation has none, or if
    an illegal action is taken, the reward of that step is nan, so that the run stops.
    """
    return _Masked(env) if has_masks(env) else env


@dataclass(frozen=True)
class _Masked(Wrapper):
    """The environment that `with_masks` returns; `observation_space` is that of the observations without masks."""

    env: Any
    report = delegate("report")
    render = delegate("render")

    def reset(self, key: jax.Array) -> tuple[PyTree, MaskedObservation]:
        state, obs = self.env.reset(key)
        return state, MaskedObservation(obs, self.env.action_mask(state))

    def step(self, key: jax.Array, state: PyTree, action: PyTree) -> Stepped:
        mask = jnp.asarray(self.env.action_mask(state))
        state, obs, reward, terminated, truncated = self.env.step(key, state, action)
        new_mask = jnp.asarray(self.env.action_mask(state))
        reward = no_legal_action(reward, ~mask.any() | ~(new_mask.any() | terminated))
        reward = illegal_action(reward, ~mask[action])
        return state, MaskedObservation(obs, new_mask), reward, terminated, truncated


FAULTS: dict[str, str] = {}
"""The meaning of a nan, by the name of the function that produced it."""

F = TypeVar("F", bound=Callable[..., jax.Array])


def fault(meaning: str) -> Callable[[F], F]:
    """Registers what a nan from the decorated function means: the function's name identifies the cause in a program."""

    def register(function: F) -> F:
        FAULTS[function.__name__] = meaning
        return function

    return register


@fault("returned an observation without a legal action")
def no_legal_action(reward: jax.Array, has_none: jax.Array) -> jax.Array:
    """Returns the reward, or nan if an observation without a legal action is found."""
    return jnp.asarray(reward, jnp.float32) + jax.lax.sqrt(-has_none.astype(jnp.float32))  # adding -0.0 changes nothing


@fault("was given an illegal action")
def illegal_action(reward: jax.Array, is_illegal: jax.Array) -> jax.Array:
    """Returns the reward, or nan if an illegal action was taken."""
    return reward + jax.lax.sqrt(-is_illegal.astype(jnp.float32))


def check_returns_not_nan(env: Any, reward: np.ndarray) -> None:
    """Raises ValueError if an environment with legal actions returned nan rewards."""
    if has_masks(env) and (bad := int(np.isnan(reward).sum())):
        raise ValueError(
            f"{env_name(env)}: {bad} of {np.size(reward)} rewards or returns are nan. An observation had no legal action, "
            "an action was illegal, or a reward was nan. Every observation needs a legal action, unless the previous step "
            "terminated the episode"
        )


def unmasked(obs: Any) -> Any:
    """Returns the observations without their masks."""
    return obs.obs if isinstance(obs, MaskedObservation) else obs


def mask_of(obs: Any) -> jax.Array | None:
    """Returns the legal actions of observations, `[..., n]` bool; None if the observations have no masks."""
    return obs.action_mask if isinstance(obs, MaskedObservation) else None


def with_mask_of(obs: Any, features: PyTree) -> Any:
    """Features of observations, with the masks of the observations if they have any."""
    return obs._replace(obs=features) if isinstance(obs, MaskedObservation) else features


def only_legal(values: jax.Array, obs: Any) -> jax.Array:
    """Values or logits of actions `[..., n]`, -inf for those that are illegal in the observations, which may have masks.

    The values stay finite where no action is legal, as after the end of an episode.
    """
    mask = mask_of(obs)
    return values if mask is None else jnp.where(mask | ~mask.any(-1, keepdims=True), values, -jnp.inf)


def sample_legal(key: jax.Array, mask: jax.Array) -> jax.Array:
    """Draws one of the legal actions `[n]` uniformly; if all are legal, it draws as `Discrete.sample` does."""
    count = jnp.cumsum(mask)
    index = jax.random.randint(key, (), 0, jnp.maximum(count[-1], 1), jnp.int32)
    return jnp.argmax(count > index).astype(jnp.int32)


def inverse_cdf_index(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Inverts cumulative distributions at uniform numbers from [0, 1). int32 `[...]`

    Args:
      weights: probabilities up to a factor, `[..., n]`; at least one is above 0.

    Returns:
      The last index whose weight is above 0 and before which at most that share of the sum lies. An index of weight 0 is never
      returned, although neighboring cumulative sums differ by rounding if `n` is large.
    """
    ends = jnp.cumsum(weights, axis=-1)
    reached = ends - weights <= uniform[..., None] * ends[..., -1:]
    return jnp.max(jnp.where(reached & (weights > 0), jnp.arange(weights.shape[-1], dtype=jnp.int32), 0), axis=-1)
