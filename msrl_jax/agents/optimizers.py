"""Optimizers: optax optimizers by name, and custom transformations.

The learning rate may differ between population members, or come from a schedule or a search. Pass it to `update` as an extra
argument of optax: `optimizer.update(grads, opt_state, params, learning_rate=rate)`. A custom transformation gets the raw
gradients; it does its own clipping and has its own learning rate.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from msrl_jax.kernels.networks import global_norm

NAMED: Mapping[str, Callable[..., optax.GradientTransformation]] = {
    "adam": optax.adam, "adamw": optax.adamw, "rmsprop": optax.rmsprop, "sgd": optax.sgd, "lion": optax.lion,
    "muon": optax.contrib.muon,
}  # fmt: skip
"""The optimizers of optax that have a name here."""


@dataclasses.dataclass(frozen=True)
class Named:
    """An optax optimizer by name, and the parameters that override the defaults."""

    name: str  # a key of `NAMED`
    parameters: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class KL:
    """A learning rate that keeps the KL divergence of updates near a target, as in rsl_rl."""

    target: float
    start: float = 1e-3
    low: float = 1e-5
    high: float = 1e-2


def is_own(optimizer: Any) -> bool:
    """Whether an optimizer is a custom transformation."""
    return isinstance(optimizer, optax.GradientTransformation)


def make_optimizer(config: Any, *, epsilon: Any, rms_decay: Any = 0.99) -> optax.GradientTransformationExtraArgs:
    """Makes the optimizer of a config.

    Args:
      config: has `optimizer`, and may have `max_grad_norm` and `learning_rate`.
      epsilon: the small number in the denominators of Adam, AdamW and RMSProp; the text of the optimizer overrides it.
      rms_decay: the decay of RMSProp's mean of squares; the text of the optimizer overrides it.

    Returns:
      The gradient transformation. A named optimizer clips gradients first; its `update` takes the `learning_rate`, `[]`, unless
      the rate adapts and is part of its state, see `divergence.adapted`.
    """
    if is_own(config.optimizer):
        return optax.with_extra_args_support(config.optimizer)
    named = Named(config.optimizer) if isinstance(config.optimizer, str) else config.optimizer
    usual = {"adam": {"eps": epsilon}, "adamw": {"eps": epsilon}}
    usual["rmsprop"] = {"decay": rms_decay, "eps": epsilon, "eps_in_sqrt": True}  # as in A3C (arXiv 1602.01783): not centered
    optimizer = NAMED[named.name](1.0, **usual.get(named.name, {}) | dict(named.parameters))
    rate, most = getattr(config, "learning_rate", None), getattr(config, "max_grad_norm", None)
    times_rate = _times_adaptive_rate(rate.start) if isinstance(rate, KL) else _TIMES_RATE
    return optax.chain(optax.identity() if most is None else _clip(most), optimizer, times_rate)


def for_each_network(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Applies an optimizer to several networks by name, separately: clips each network's gradient norm."""

    def init(params: Any) -> Any:
        return {name: optimizer.init(p) for name, p in params.items()}

    def update(updates: Any, state: Any, params: Any = None, **rate: Any) -> tuple[Any, Any]:
        new = {name: optimizer.update(u, state[name], params[name], **rate) for name, u in updates.items()}
        return {name: u for name, (u, _) in new.items()}, {name: own for name, (_, own) in new.items()}

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]


def _clip(most: Any) -> optax.GradientTransformation:
    """Like `optax.clip_by_global_norm`, but computes the norm with `global_norm`."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm = global_norm(updates)
        return jax.tree.map(lambda x: jnp.where(norm < most, x, (x / norm.astype(x.dtype)) * most), updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _times(updates: Any, rate: jax.Array) -> Any:
    return jax.tree.map(lambda u: rate * u, updates)


_TIMES_RATE = optax.GradientTransformationExtraArgs(
    optax.init_empty_state,
    lambda updates, state, params=None, *, learning_rate, **_: (_times(updates, learning_rate), state),  # type: ignore[arg-type]
)


class AdaptiveRate(NamedTuple):
    """The adaptive learning rate in the state of an optimizer."""

    rate: jax.Array  # shape=(), dtype=float32


def _times_adaptive_rate(start: float) -> optax.GradientTransformationExtraArgs:
    return optax.with_extra_args_support(
        optax.GradientTransformation(
            lambda params: AdaptiveRate(jnp.float32(start)),
            lambda updates, state, params=None: (_times(updates, state.rate), state),  # type: ignore[arg-type]
        )
    )


def adaptive_rate(opt_state: Any) -> jax.Array | None:
    """Returns the adaptive learning rate in an optimizer state; None if the rate does not adapt."""
    return next((x.rate for x in jax.tree.leaves(opt_state, is_leaf=is_rate_state) if is_rate_state(x)), None)


def is_rate_state(state: Any) -> bool:
    """Whether a part of an optimizer state is an adaptive learning rate."""
    return isinstance(state, AdaptiveRate)
