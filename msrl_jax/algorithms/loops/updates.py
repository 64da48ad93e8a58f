"""Updates: optimizers and schedules of the learning rate."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from msrl_jax.algorithms.agent import Progress


def make_optimizer(
    name: Literal["adam", "rmsprop"], *, max_grad_norm: float | None, epsilon: float, rms_decay: float = 0.99
) -> optax.GradientTransformation:
    """Makes an optimizer that clips gradients by their global norm first; `descend` takes its updates times a learning rate.

    RMSProp is that of A3C (Mnih et al., 2016, arXiv 1602.01783, supplement): not centered, and with `epsilon` under the root.
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


def annealed(rate: Any, progress: Progress, falls: bool) -> jax.Array:
    """A learning rate, which falls linearly to 0 over the run if it `falls`. `[]` float32."""
    if not falls or progress.total is None:
        return jnp.float32(rate)
    return jnp.asarray(optax.linear_schedule(rate, 0.0, transition_steps=1)(progress.fraction))
