"""Optimizers: directions of descent; the learning rate is a traced number that is multiplied in afterwards."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from msrl_jax.algorithms.configs.optimizer import LearningRateConfig
from msrl_jax.counters import Counter, fraction


def make_optimizer(
    name: Literal["adam", "rmsprop"], *, max_grad_norm: float | None, epsilon: float, rms_decay: float = 0.99
) -> optax.GradientTransformation:
    """Makes an optimizer for gradients that are scaled down to a global norm first.

    Args:
      name: "adam", or "rmsprop" as in A3C (Mnih et al., 2016, arXiv 1602.01783, supplement): not centered, and with
        `epsilon` under the root.
      max_grad_norm: the global norm; None leaves gradients as they are.
      epsilon: keeps the division finite.
      rms_decay: the share of the running mean of squared gradients that RMSProp keeps per update.

    Returns:
      The optimizer; its updates are directions, to be scaled by `descend`.
    """
    rmsprop = optax.scale_by_rms(rms_decay, epsilon, eps_in_sqrt=True)
    scale = rmsprop if name == "rmsprop" else optax.scale_by_adam(eps=epsilon)
    clip = optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)
    return optax.chain(clip, scale)


def descend(params: Any, updates: Any, learning_rate: jax.Array) -> Any:
    """Takes a step of length `learning_rate` against `updates`, a tree like `params`.

    Not `optax.scale_by_learning_rate`: the rate is a traced number here, so that its schedule counts without wrapping.
    """
    return jax.tree.map(lambda p, u: p - learning_rate * u, params, updates)


def annealed_learning_rate(config: LearningRateConfig, iteration: Counter, steps_per_iteration: int) -> jax.Array:
    """The learning rate of an iteration.

    Args:
      config: the rate to start from, and the environment steps over which it falls linearly to 0, where it stays.
      iteration: iterations done.
      steps_per_iteration: environment steps per iteration.

    Returns:
      The learning rate; constant if it does not fall, or if no number of steps is given. `[]` float32
    """
    if not config.anneal_learning_rate or config.total_steps is None:
        return jnp.float32(config.learning_rate)
    # A counter of iterations wraps where optax counts; its fraction of the run does not.
    schedule = optax.linear_schedule(config.learning_rate, 0.0, transition_steps=1)
    return jnp.asarray(schedule(fraction(iteration, 1, math.ceil(config.total_steps / steps_per_iteration))))
