"""Losses of return distributions, per example: probabilities of atoms (C51), and quantiles.

In the shape descriptions, `N` is the number of atoms or quantiles of a prediction.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from msrl_jax.configs.predictions import C51


def check_support(config: Any) -> None:
    """Raises ValueError unless the atoms of a config (C51) have finite limits in the right order."""
    atoms, name = config.returns, type(config).__name__
    if not isinstance(atoms, C51):
        return
    if (atoms.v_min is None or atoms.v_max is None) and config.discount == 1:
        raise ValueError(f"{name}.discount=1.0 bounds no return; give v_min and v_max to returns='c51', or use discount=0.99")
    v_min, v_max = atoms.support(config.discount)
    if v_min >= v_max:
        raise ValueError(f"{name}.returns: v_min={v_min:g} is not below v_max={v_max:g}; use a smaller one or a larger one")


def categorical_projection(probability: jax.Array, returns: jax.Array, v_min: float, v_max: float) -> jax.Array:
    """Projects masses `[N]` at `returns` `[N]` onto `N` atoms from `v_min` to `v_max` (arXiv 1707.06887)."""
    chex.assert_rank(probability, 1)
    chex.assert_equal_shape((probability, returns))
    num_atoms = probability.shape[-1]
    spacing = (v_max - v_min) / (num_atoms - 1)
    landed = (jnp.clip(returns, v_min, v_max) - v_min) / spacing
    share = jnp.clip(1 - jnp.abs(landed[:, None] - jnp.arange(num_atoms)), 0, 1)
    return probability @ share


def categorical_loss(logits: jax.Array, target: jax.Array) -> jax.Array:
    """Returns the KL divergence of the masses of logits `[N]` from the target; its gradient is that of the cross-entropy."""
    chex.assert_rank(logits, 1)
    chex.assert_equal_shape((logits, target))
    known = jnp.where(target > 0, target * jnp.log(jnp.where(target > 0, target, 1.0)), 0.0)
    return (known - target * jax.nn.log_softmax(logits)).sum(-1)


def quantile_huber_loss(
    quantile: jax.Array, target: jax.Array, delta: float = 1.0, fraction: jax.Array | None = None
) -> jax.Array:
    """Returns the quantile Huber loss of quantiles `[N]` for samples `[M]` (arXiv 1710.10044, eq. 10; 1806.06923, eq. 3).

    The quantiles are at `fraction` `[N]`; if it is None, at the midpoints `(i + 1/2) / N`.
    """
    chex.assert_rank((quantile, target), 1)
    if fraction is None:
        fraction = (jnp.arange(quantile.shape[-1], dtype=jnp.float32) + 0.5) / quantile.shape[-1]
    error = target[None, :] - quantile[:, None]
    weight = jnp.abs(fraction[:, None] - (jax.lax.stop_gradient(error) < 0).astype(fraction.dtype))
    return (weight * optax.huber_loss(error, delta=delta) / delta).mean(1).sum(0)
