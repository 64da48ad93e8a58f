"""Predictions of several critics: expected returns, quantiles of returns, or probabilities of atoms.

In the shape descriptions, `C` denotes the number of critics, `B` the batch size and `N` the number of atoms or quantiles.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax.configs.predictions import C51, TQC, Expected
from msrl_jax.envs import Discrete, Space
from msrl_jax.losses.distributional import categorical_loss, categorical_projection, quantile_huber_loss
from msrl_jax.losses.values import value_error

Backup = Callable[[jax.Array], jax.Array]
"""Maps returns from the next step on to returns from this step on, `[B]` each and increasing."""


class Prediction(NamedTuple):
    """Functions of the outputs of critics: `[C, B]` for expected returns, `[C, B, N]` for distributions."""

    num_outputs: int  # per critic
    expected: Callable[[jax.Array], jax.Array]  # outputs -> expected returns [C, B]
    value: Callable[[jax.Array], jax.Array]  # outputs -> combined value of the critics [B]
    target: Callable[[jax.Array, Backup], jax.Array]  # (outputs of the target critics, backup) -> [B, ...]
    loss: Callable[[jax.Array, jax.Array], jax.Array]  # (outputs, target) -> losses [C, B]
    error: Callable[[jax.Array, jax.Array], jax.Array]  # (outputs, target) -> TD errors [B], or losses for distributions


def expectations(huber_delta: float | None = None) -> Prediction:
    """Predicts expected returns; uses the lowest, against overestimation (Fujimoto et al., 2018, arXiv 1802.09477, eq. 10)."""
    return Prediction(
        num_outputs=1,
        expected=lambda q: q,
        value=lambda q: q.min(0),
        target=lambda q, backup: backup(q.min(0)),
        loss=lambda q, target: jax.vmap(lambda q: value_error(q, target, huber_delta))(q),
        error=lambda q, target: target - q.mean(0),
    )


def truncated_quantiles(num_quantiles: int, num_dropped: int) -> Prediction:
    """Predicts quantiles; targets drop the largest ones of all critics, `num_dropped` per critic (TQC, arXiv 2005.04269)."""

    def target(quantiles: jax.Array, backup: Backup) -> jax.Array:
        kept = len(quantiles) * (num_quantiles - num_dropped)
        pooled = jnp.moveaxis(quantiles, -1, 0).reshape(-1, quantiles.shape[1])
        return jax.vmap(backup, out_axes=1)(jnp.sort(pooled, 0)[:kept])

    def loss(quantiles: jax.Array, target: jax.Array) -> jax.Array:
        return jax.vmap(jax.vmap(quantile_huber_loss), (0, None))(quantiles, target)

    return Prediction(
        num_outputs=num_quantiles,
        expected=lambda quantiles: quantiles.mean(-1),
        value=lambda quantiles: quantiles.mean((0, -1)),
        target=target,
        loss=loss,
        error=lambda quantiles, target: loss(quantiles, target).mean(0),
    )


def categorical(num_atoms: int, v_min: float, v_max: float) -> Prediction:
    """Predicts logits of atoms (1707.06887); uses the critic with the lowest mean, per example (FastTD3, 2505.22642)."""

    def expected(logits: jax.Array) -> jax.Array:
        return jax.nn.softmax(logits) @ jnp.linspace(v_min, v_max, num_atoms, dtype=jnp.float32)

    def target(logits: jax.Array, backup: Backup) -> jax.Array:
        lowest = expected(logits).argmin(0)
        probability = jax.nn.softmax(jnp.take_along_axis(logits, lowest[None, :, None], 0)[0])
        atoms = jnp.linspace(v_min, v_max, num_atoms, dtype=jnp.float32)
        atoms = jnp.broadcast_to(atoms[:, None], (num_atoms, len(probability)))
        returns = jax.vmap(backup, out_axes=1)(atoms)
        return jax.vmap(categorical_projection, (0, 0, None, None))(probability, returns, v_min, v_max)

    def loss(logits: jax.Array, target: jax.Array) -> jax.Array:
        return jax.vmap(jax.vmap(categorical_loss), (0, None))(logits, target)

    return Prediction(
        num_outputs=num_atoms,
        expected=expected,
        value=lambda logits: expected(logits).min(0),
        target=target,
        loss=loss,
        error=lambda logits, target: loss(logits, target).mean(0),
    )


def prediction_of(config: Any, action_space: Space) -> Prediction:
    """Returns the prediction of a config's critics; raises ValueError for distributions with discrete actions."""
    returns: Expected | C51 | TQC = config.returns
    if isinstance(returns, Expected):
        return expectations(returns.huber_delta)
    if isinstance(action_space, Discrete):
        raise ValueError(
            f"{type(config).__name__}.returns={returns} is of the returns of continuous actions, but the space is "
            f"{action_space}; use returns='expected', or dqn"
        )
    if isinstance(returns, C51):
        return categorical(returns.num_atoms, *returns.support(config.discount))
    return truncated_quantiles(returns.num_quantiles, returns.num_dropped)
