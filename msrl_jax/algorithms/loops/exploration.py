"""Exploration with random actions.

In the shape descriptions, `E` denotes the number of environments and `D` the length of a continuous action.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from msrl_jax.algorithms.configs.exploration import ExplorationConfig
from msrl_jax.counters import Counter, at_least, fraction
from msrl_jax.envs import Box, Discrete, Space
from msrl_jax.envs.masks import mask_of, sample_legal
from msrl_jax.envs.spaces import is_integers, num_values


def epsilon_greedy(
    config: ExplorationConfig, *, num_envs: int, num_actions: int, random_steps: int
) -> Callable[..., jax.Array]:
    """Makes a function that replaces actions by random ones with probability epsilon.

    Args:
      config: the schedule of epsilon.
      num_envs: number of environments, `E`.
      num_actions: number of actions.
      random_steps: number of environment steps at the start of the run with random actions only.

    Returns:
      `(greedy actions [E] int32, keys [E], environment steps taken, obs=None) -> actions [E] int32`; with `MaskedObservation`s,
      random actions are legal.
    """
    rank = jnp.arange(num_envs) / max(num_envs - 1, 1)
    by_env = config.base_epsilon ** (1 + 7 * rank)
    # A schedule over the fraction of `exploration_steps` that is done: the fraction cannot overflow, a step count could.
    annealed = optax.linear_schedule(1.0, config.final_epsilon, transition_steps=1)

    def epsilon(steps: Counter) -> jax.Array:
        """The probabilities of random actions. `[]` or `[E]`"""
        if config.exploration == "per_env":
            return by_env
        return jnp.asarray(annealed(fraction(steps, 1, config.exploration_steps)))

    def explore(greedy: jax.Array, keys: jax.Array, steps: Counter, obs: Any = None) -> jax.Array:
        whether, which = jax.vmap(lambda key: jax.random.split(key), out_axes=1)(keys)
        probability = jnp.where(at_least(steps, random_steps), epsilon(steps), 1.0)
        at_random = jax.vmap(jax.random.uniform)(whether) < probability
        return jnp.where(at_random, uniform_actions(which, Discrete(num_actions), obs), greedy)

    return explore


def uniform_actions(keys: jax.Array, space: Space, obs: Any = None) -> jax.Array:
    """Draws uniform actions.

    Args:
      keys: one per action. `[E]`
      space: a `Box`, or `Discrete`.
      obs: the observations acted on; with `MaskedObservation`s, actions are legal. `[E, ...]`

    Returns:
      Continuous actions in [-1, 1] `[E, D]`, discrete ones `[E]` int32, or integers counted from 0 `[E, K]` int32: the actions
      of a policy, before `action_transform`.
    """
    if (mask := mask_of(obs)) is not None:
        return jax.vmap(sample_legal)(keys, mask)
    if isinstance(space, Discrete):
        return jax.vmap(lambda key: jax.random.randint(key, (), 0, space.n))(keys)
    assert isinstance(space, Box)
    if is_integers(space):
        sizes = jnp.array(num_values(space))
        return jax.vmap(lambda key: jax.random.randint(key, sizes.shape, 0, sizes))(keys)
    size = math.prod(space.shape)
    return jax.vmap(lambda key: jax.random.uniform(key, (size,), minval=-1.0, maxval=1.0))(keys)
