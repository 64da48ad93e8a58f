"""Schedules over the length of a run, which are functions of a counter."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from msrl_jax.algorithms.configs.optimizer import LearningRateConfig
from msrl_jax.counters import Counter, fraction


def learning_rate_schedule(config: LearningRateConfig, steps_per_count: int) -> Callable[[Counter], jax.Array]:
    """Makes the schedule of a learning rate, which falls linearly to 0 if the config says so and how long the run is.

    Args:
      config: the learning rate, and over how many steps of the run it falls.
      steps_per_count: steps of the run that a count stands for.

    Returns:
      `count -> learning rate`, float32.
    """
    if not config.anneal_learning_rate or config.total_steps is None:
        return lambda count: jnp.float32(config.learning_rate)
    # Over a fraction of the run, which is right for any number of steps; optax's own counts are int32.
    schedule = optax.linear_schedule(config.learning_rate, 0.0, transition_steps=1)
    total = math.ceil(config.total_steps / steps_per_count)
    return lambda count: jnp.asarray(schedule(fraction(count, 1, total)), jnp.float32)
