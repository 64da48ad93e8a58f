"""Optimizers without a learning rate, and a schedule of the learning rate as a traced number."""

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
    """Makes an optimizer that clips gradients by their global norm first.

    Args:
      name: "adam", or "rmsprop" as in A3C (Mnih et al., 2016, arXiv 1602.01783, supplement): not centered, and with
        `epsilon` under the root.
      max_grad_norm: the largest global norm; None does not clip.
      epsilon: small number added to the denominator.
      rms_decay: decay per update of RMSProp's running mean of squared gradients.

    Returns:
      The optimizer; `descend` multiplies its updates by the learning rate.
    """
    rmsprop = optax.scale_by_rms(rms_decay, epsilon, eps_in_sqrt=True)
    scale = rmsprop if name == "rmsprop" else optax.scale_by_adam(eps=epsilon)
    clip = optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)
    return optax.chain(clip, scale)


def descend(params: Any, updates: Any, learning_rate: jax.Array) -> Any:
    """Subtracts `learning_rate` times `updates` from `params`.

    This replaces `optax.scale_by_learning_rate`: the rate is a traced number, so that its schedule can use a `Counter`.
    """
    return jax.tree.map(lambda p, u: p - learning_rate * u, params, updates)


def annealed_learning_rate(config: LearningRateConfig, iteration: Counter, steps_per_iteration: int) -> jax.Array:
    """The learning rate of an iteration.

    Args:
      config: the initial rate, and the environment steps over which the rate falls linearly to 0.
      iteration: iterations done.
      steps_per_iteration: environment steps per iteration.

    Returns:
      The learning rate; constant without `anneal_learning_rate` or `total_steps`. `[]` float32
    """
    if not config.anneal_learning_rate or config.total_steps is None:
        return jnp.float32(config.learning_rate)
    # optax counts in int32, which wraps; the fraction of the run cannot wrap.
    schedule = optax.linear_schedule(config.learning_rate, 0.0, transition_steps=1)
    return jnp.asarray(schedule(fraction(iteration, 1, math.ceil(config.total_steps / steps_per_iteration))))
