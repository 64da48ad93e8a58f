"""Optimizers: optax's by name, and custom transformations.

A named one turns gradients, clipped by their global norm, into updates; `descend` subtracts a learning rate times these. So the
learning rate may be a number of a member, of a schedule or of a search. A custom transformation follows the convention of
optax: it gets the gradients as they are, and what it returns is added to the parameters. Clip and learning rate are its own.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from msrl_jax.algorithms.kernels import global_norm

NAMED: Mapping[str, Callable[..., optax.GradientTransformation]] = {
    "adam": optax.adam, "adamw": optax.adamw, "rmsprop": optax.rmsprop, "sgd": optax.sgd, "lion": optax.lion,
    "muon": optax.contrib.muon,
}  # fmt: skip
"""The optimizers of optax that have a name here."""
_UNSCALED: Mapping[str, Callable[..., optax.GradientTransformation]] = {
    "adam": optax.scale_by_adam, "rmsprop": optax.scale_by_rms,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Named:
    """An optimizer of optax, and what of its parameters is not usual here."""

    name: str  # a key of `NAMED`
    parameters: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class KL:
    """A learning rate that keeps the KL divergence of updates near a target, as rsl_rl does."""

    target: float
    start: float = 1e-3
    low: float = 1e-5
    high: float = 1e-2


def is_own(optimizer: Any) -> bool:
    """Whether an optimizer is a custom transformation."""
    return isinstance(optimizer, optax.GradientTransformation)


def make_optimizer(config: Any, *, epsilon: Any, rms_decay: Any = 0.99) -> optax.GradientTransformation:
    """The optimizer of a config, for `descend`.

    Args:
      config: has `optimizer`, and may have `max_grad_norm`.
      epsilon: the small number in the denominators of Adam, AdamW and RMSProp, where the text of the optimizer has none.
      rms_decay: the decay of RMSProp's mean of squares, likewise.

    Returns:
      The transformation of gradients. A named one clips them first, and returns what is subtracted times the learning rate.
    """
    if is_own(config.optimizer):
        return config.optimizer
    named = Named(config.optimizer) if isinstance(config.optimizer, str) else config.optimizer
    optimizer, rate = _clipped(config, _named(named, epsilon, rms_decay)), getattr(config, "learning_rate", None)
    return _adapting(optimizer, rate) if isinstance(rate, KL) else optimizer


def _named(named: Named, epsilon: Any, rms_decay: Any) -> optax.GradientTransformation:
    """An optimizer of optax, whose updates are to be subtracted."""
    usual = {"adam": {"eps": epsilon}, "adamw": {"eps": epsilon}}
    usual["rmsprop"] = {"decay": rms_decay, "eps": epsilon, "eps_in_sqrt": True}  # that of A3C (arXiv 1602.01783): not centered
    given = usual.get(named.name, {}) | dict(named.parameters)
    if named.name in _UNSCALED and given.keys() <= inspect.signature(_UNSCALED[named.name]).parameters.keys():
        return _UNSCALED[named.name](**given)
    return optax.chain(NAMED[named.name](1.0, **given), optax.scale(-1.0))


def _clipped(config: Any, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    if not hasattr(config, "max_grad_norm"):
        return optimizer
    clip = optax.identity() if config.max_grad_norm is None else _clip(config.max_grad_norm)
    return optax.chain(clip, optimizer)


def _clip(most: Any) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm`, with the norm of `global_norm`."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm = global_norm(updates)
        return jax.tree.map(lambda x: jnp.where(norm < most, x, (x / norm.astype(x.dtype)) * most), updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


class Adapted(NamedTuple):
    """The state of an optimizer whose learning rate adapts."""

    own: Any  # of the optimizer
    rate: jax.Array  # the learning rate of the last update. shape=(), dtype=float32


def _adapting(optimizer: optax.GradientTransformation, kl: KL) -> optax.GradientTransformation:
    """An optimizer that keeps a learning rate in its state, an `Adapted`."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, own = optimizer.update(updates, state.own, params)
        return updates, Adapted(own, state.rate)

    return optax.GradientTransformation(lambda params: Adapted(optimizer.init(params), jnp.float32(kl.start)), update)


def adapted(kl: KL, state: Adapted, divergence: jax.Array) -> Adapted:
    """Divides the rate by 1.5 if the divergence (nats, `[]`) is above twice the target, multiplies it if below half of it.

    As in rsl_rl (Schwarke et al., 2025, arXiv 2509.10771), a divergence of 0 changes nothing; neither does nan.
    """
    slower, faster = jnp.maximum(state.rate / 1.5, kl.low), jnp.minimum(state.rate * 1.5, kl.high)
    is_small = (divergence > 0) & (divergence < kl.target / 2)
    return state._replace(rate=jnp.where(divergence > kl.target * 2, slower, jnp.where(is_small, faster, state.rate)))


def descend(params: Any, updates: Any, learning_rate: jax.Array | None) -> Any:
    """Subtracts `learning_rate`, a traced number, times `updates` from `params`; adds updates that have no learning rate."""
    if learning_rate is None:
        return optax.apply_updates(params, updates)
    return jax.tree.map(lambda p, u: p - learning_rate * u, params, updates)
