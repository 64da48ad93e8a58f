"""What the algorithms that act on action values share: how they explore, what they keep, and how often it is drawn.

In the shape descriptions, `E` denotes the number of environments.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax import replay
from msrl_jax.algorithms.base import ALGORITHMS
from msrl_jax.algorithms.configs import checks as check
from msrl_jax.algorithms.loops.optimizer import learning_rate_at
from msrl_jax.envs import Discrete, Environment, Space
from msrl_jax.replay import Replay, Transition


def check_acting(config: Any) -> None:
    """Raises ValueError on a field, of those that this file reads and of the learning rate's, whose value cannot work."""
    check.check_common(config)
    check.check_integers(config, 1, "exploration_steps", "actor_period", "target_period")
    check.check_numbers(config, "alpha", low=0.0)
    check.check_numbers(config, "beta", "final_epsilon", "base_epsilon", low=0.0, high=1.0)
    check.check_numbers(config, "huber_delta", "adam_epsilon", above=0.0)
    check.check_numbers(config, "tau", above=0.0, high=1.0)
    check.check_choice(config, "exploration", ("annealed", "per_env"))


def check_choices(name: str, space: Space) -> Discrete:
    """Raises TypeError unless a space of actions is `Discrete`; returns it."""
    if isinstance(space, Discrete):
        return space
    others = [other for other in ("sac", "td3", "ddpg", "ppo") if other in ALGORITHMS]
    raise TypeError(
        f"{name} values each of a finite number of actions, got {space}; wrap the environment to take a Discrete "
        f"space, or, for a Box of floats, use {' or '.join(others)}"
    )


def transition_of(env: Environment) -> Transition:
    """Shapes and dtypes of a step of an environment with `Discrete` actions."""
    obs = jax.eval_shape(env.reset, jax.random.key(0))[1]
    action, number, flag = (jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.int32, jnp.float32, jnp.bool_))
    return Transition(obs, action, number, flag, flag, obs)


def replay_buffer(example: Any, config: Any, length_is: str, **windows: Any) -> Replay:
    """Makes the replay buffer that a config describes, prioritized or not.

    Args:
      example: a step.
      config: with the fields of `DQNConfig` that say how much is kept and how it is drawn.
      length_is: which fields of the config set the length of a window, and the verb: for messages.
      windows: what else the buffer is told of them: `length`, and `stride` or `discount`.

    Returns:
      The buffer.

    Raises:
      ValueError: if sizes do not fit each other, or the devices' memory, or if the observations do not fit the storage.
    """
    options: dict[str, Any] = {
        "capacity": config.capacity, "num_envs": config.num_envs, "unroll_length": config.unroll_length,
        "batch_size": config.batch_size, "min_size": config.learning_starts, "shards": config.shards,
        "storage": config.storage and {"obs": config.storage, "next_obs": config.storage}, **windows,
    }  # fmt: skip
    make = replay.uniform
    if config.prioritised:
        make, options = replay.prioritized, options | {"alpha": config.alpha}
    try:
        return make(example, **options)
    except ValueError as error:
        names = f"{type(config).__name__}, whose {length_is} the buffer's length and learning_starts its min_size"
        raise ValueError(f"{names}: {error}") from None


def epsilon_greedy(config: Any, num_actions: int, random_steps: int) -> Callable[..., jax.Array]:
    """Makes the function that explores by random actions.

    Args:
      config: with the fields of `DQNConfig` that say how likely they are.
      num_actions: between how many to choose.
      random_steps: environment steps before which all actions are random.

    Returns:
      `(greedy actions [E] int32, keys [E], environment steps taken) -> actions [E] int32`.
    """

    def epsilon(steps: jax.Array) -> jax.Array:
        """The probabilities of random actions. `[]` or `[E]`"""
        if config.exploration == "per_env":
            rank = jnp.arange(config.num_envs) / max(config.num_envs - 1, 1)
            return config.base_epsilon ** (1 + 7 * rank)
        return jnp.maximum(1 - (1 - config.final_epsilon) * steps / config.exploration_steps, config.final_epsilon)

    def explore(greedy: jax.Array, keys: jax.Array, steps: jax.Array) -> jax.Array:
        whether, which = jax.vmap(lambda key: jax.random.split(key), out_axes=1)(keys)
        at_random = jax.vmap(jax.random.uniform)(whether) < jnp.where(steps < random_steps, 1.0, epsilon(steps))
        random = jax.vmap(lambda key: jax.random.randint(key, (), 0, num_actions))(which)
        return jnp.where(at_random, random, greedy)

    return explore


def importance_exponent(config: Any) -> Callable[[jax.Array], jax.Array] | None:
    """Makes the schedule of the exponent of the importance weights: from `beta` to 1 over `total_steps`.

    Args:
      config: with the fields of `DQNConfig` that say so.

    Returns:
      `(iteration) -> exponent`; None if nothing is to be weighed.
    """
    if not config.prioritised or config.beta is None:
        return None

    def beta(iteration: jax.Array) -> jax.Array:
        steps = iteration * config.num_envs * config.unroll_length
        done = 0.0 if config.total_steps is None else jnp.minimum(steps / config.total_steps, 1.0)
        return config.beta + (1 - config.beta) * jnp.asarray(done, jnp.float32)

    return beta


def learning_rate_of(config: Any) -> Callable[[jax.Array], jax.Array]:
    """Makes the schedule `count -> learning rate` of the updates, which falls to 0 over `total_steps` if they are given."""
    return lambda count: learning_rate_at(
        count // config.num_updates, config.learning_rate, config.num_envs * config.unroll_length,
        config.total_steps if config.anneal_learning_rate else None,
    )  # fmt: skip
