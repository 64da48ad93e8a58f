"""Small tasks given by tables that are parameters as data: bandits and MDPs, and distributions of them.

In the shape descriptions, `S` is the number of states, and `A` of actions.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from msrl_jax.envs import spaces
from msrl_jax.envs.base import Stepped
from msrl_jax.envs.masks import inverse_cdf_index
from msrl_jax.fragments.support.checks import shown, whole
from msrl_jax.fragments.support.tracebacks import entry


@entry
@dataclass(frozen=True, eq=False)
class TabularMDP:
    """A tabular MDP. An episode starts in state 0 and does not end by itself.

    Attributes:
      transitions: probabilities of the next state; a parameter as data. `[S, A, S]` float32
      rewards: mean rewards; a parameter as data. `[S, A]` float32
      noise: standard deviation of the normally distributed rewards.
    """

    transitions: ArrayLike
    rewards: ArrayLike
    noise: float = 1.0
    observation_space: spaces.Discrete = field(init=False, repr=False)
    action_space: spaces.Discrete = field(init=False, repr=False)

    def __post_init__(self):
        tables = {name: np.asarray(getattr(self, name), np.float32) for name in ("transitions", "rewards")}
        transitions, rewards = tables.values()
        if rewards.ndim != 2 or transitions.shape != (*rewards.shape, len(rewards)):
            raise ValueError(
                f"TabularMDP: transitions {list(transitions.shape)} and rewards {list(rewards.shape)} do not match; use "
                "transitions [S, A, S] and rewards [S, A]"
            )
        if (transitions < 0).any() or not np.allclose(transitions.sum(-1), 1, atol=1e-4):
            raise ValueError("TabularMDP: transitions[s, a] are not probabilities; each row must sum to 1")
        if not np.isfinite(rewards).all() or not 0 <= self.noise < np.inf:
            raise ValueError(f"TabularMDP: use finite rewards, and a finite noise of at least 0, not {shown(self.noise)}")
        attributes = tables | {"observation_space": spaces.Discrete(len(rewards))}
        for name, value in (attributes | {"action_space": spaces.Discrete(rewards.shape[1])}).items():
            object.__setattr__(self, name, value)

    @property
    def default_params(self) -> dict[str, Any]:
        """The tables."""
        return {"transitions": self.transitions, "rewards": self.rewards}

    def with_params(self, params: Mapping[str, Any]) -> "TabularMDP":
        """Returns the MDP with other, possibly traced, tables."""
        return _replace_tables(self, params)

    def reset(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Starts an episode; the state is the observation."""
        return jnp.int32(0), jnp.int32(0)

    def step(self, key: jax.Array, state: jax.Array, action: jax.Array) -> Stepped:
        """Draws the next state and the reward."""
        move_key, noise_key = jax.random.split(key)
        next_state = inverse_cdf_index(
            jnp.asarray(self.transitions)[state, action], jax.random.uniform(move_key, dtype=jnp.float32)
        )
        reward = jnp.asarray(self.rewards)[state, action] + self.noise * jax.random.normal(noise_key, dtype=jnp.float32)
        return next_state, next_state, reward, jnp.asarray(False), jnp.asarray(False)


@entry
@dataclass(frozen=True, eq=False)
class BernoulliBandit:
    """A bandit whose arms pay 1 or 0. An episode does not end by itself.

    Attributes:
      success: the probability that each arm pays; a parameter as data. `[A]` float32
    """

    success: ArrayLike
    observation_space = spaces.Discrete(1)
    action_space: spaces.Discrete = field(init=False, repr=False)

    def __post_init__(self):
        success = np.asarray(self.success, np.float32)
        if success.ndim != 1 or not ((success >= 0) & (success <= 1)).all():
            raise ValueError(f"BernoulliBandit: success={shown(self.success)} must be probabilities, one per arm")
        object.__setattr__(self, "success", success)
        object.__setattr__(self, "action_space", spaces.Discrete(len(success)))

    @property
    def default_params(self) -> dict[str, Any]:
        """The probabilities."""
        return {"success": self.success}

    def with_params(self, params: Mapping[str, Any]) -> "BernoulliBandit":
        """Returns the bandit with other, possibly traced, probabilities."""
        return _replace_tables(self, params)

    def reset(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Starts an episode; the observation is always 0."""
        return jnp.int32(0), jnp.int32(0)

    def step(self, key: jax.Array, state: jax.Array, action: jax.Array) -> Stepped:
        """Pulls an arm."""
        reward = (jax.random.uniform(key, dtype=jnp.float32) < jnp.asarray(self.success)[action]).astype(jnp.float32)
        return state, state, reward, jnp.asarray(False), jnp.asarray(False)


def _replace_tables(env: Any, params: Mapping[str, Any]) -> Any:
    copied_env = copy.copy(env)
    for name, value in params.items():
        object.__setattr__(copied_env, name, value)
    return copied_env


@entry
def random_mdps(
    num_states: int, num_actions: int, *, concentration: float = 1.0, uniform_rewards: bool = False
) -> Callable[[jax.Array], dict[str, jax.Array]]:
    """Makes a distribution of the tables of `TabularMDP`, for `env_params` (Duan et al., 2016, arXiv 1611.02779).

    Args:
      num_states: `S`.
      num_actions: `A`.
      concentration: parameter of the symmetric Dirichlet distribution of transition rows; below 1, nearly deterministic.
      uniform_rewards: whether mean rewards are uniform instead of normal; mean and standard deviation are 1 either way.

    Returns:
      A function of a key that returns `transitions` `[S, A, S]` and `rewards` `[S, A]`, float32.

    Raises:
      ValueError: if a number is out of range.
    """
    whole("random_mdps: num_states", num_states)
    whole("random_mdps: num_actions", num_actions)
    if not 0 < concentration < np.inf:
        raise ValueError(f"random_mdps: concentration={concentration!r} must be finite and above 0")

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        moves, means = jax.random.split(key)
        shape = (num_states, num_actions)
        transitions = jax.random.dirichlet(moves, jnp.full(num_states, concentration, jnp.float32), shape)
        bound = float(np.sqrt(3.0))
        spread = jax.random.uniform(means, shape, minval=-bound, maxval=bound, dtype=jnp.float32) if uniform_rewards else None
        spread = jax.random.normal(means, shape, jnp.float32) if spread is None else spread
        return {"transitions": transitions, "rewards": 1 + spread}

    return draw


def random_bandits(num_arms: int) -> Callable[[jax.Array], dict[str, jax.Array]]:
    """Makes the uniform distribution of the arms of `BernoulliBandit`, for `env_params`.

    Returns:
      A function of a key that returns `success` `[A]` float32.
    """
    whole("random_bandits: num_arms", num_arms)
    return lambda key: {"success": jax.random.uniform(key, (num_arms,), jnp.float32)}
