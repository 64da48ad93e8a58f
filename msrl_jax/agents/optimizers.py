"""Optimizers: optax optimizers by name, and custom transformations.

The learning rate may differ between population members, or come from a schedule or a search. Pass it to `update` as an extra
argument of optax: `optimizer.update(grads, opt_state, params, learning_rate=rate)`. A custom transformation gets the raw
gradients; it does its own clipping and has its own learning rate.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from msrl_jax.kernels.networks import global_norm

NAMED: Mapping[str, Callable[..., optax.GradientTransformation]] = {
    "adam": optax.adam,
    "adamw": optax.adamw,
    "rmsprop": optax.rmsprop,
    "sgd": optax.sgd,
    "lion": optax.lion,
    "muon": optax.contrib.muon,
}
"""The optimizers of optax that have a name here."""


@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
    """An optax optimizer by name, and the parameters that override the defaults."""

    name: str  # a key of `NAMED`
    parameters: tuple[tuple[str, Any], ...] = ()


def is_transformation(optimizer: object) -> bool:
    """Whether an optimizer is a custom transformation."""
    return isinstance(optimizer, optax.GradientTransformation)


def has_own_rate(config: Any) -> bool:
    """Whether the optimizer of a config takes no learning rate: it is a custom one, or the rate adapts."""
    return is_transformation(getattr(config, "optimizer", "adam")) or adapts(config.learning_rate)


def adapts(rate: object) -> bool:
    """Whether a learning rate is an object that scales updates, such as `adaptive_rate.KL`."""
    return hasattr(rate, "transformation")


def make_optimizer(config: Any, *, epsilon: float, rms_decay: float = 0.99) -> optax.GradientTransformationExtraArgs:
    """Makes the optimizer of a config.

    Args:
      config: has `optimizer`, and may have `max_grad_norm` and `learning_rate`.
      epsilon: the small number in the denominators of Adam, AdamW and RMSProp; the text of the optimizer overrides it.
      rms_decay: the decay of RMSProp's mean of squares; the text of the optimizer overrides it.

    Returns:
      The gradient transformation. A named optimizer clips gradients first; its `update` takes the `learning_rate`, `[]`, unless
      the rate adapts and is part of its state, see `adaptive_rate`.
    """
    if is_transformation(config.optimizer):
        return optax.with_extra_args_support(config.optimizer)
    spec = OptimizerSpec(config.optimizer) if isinstance(config.optimizer, str) else config.optimizer
    defaults = {"adam": {"eps": epsilon}, "adamw": {"eps": epsilon}}
    # As in A3C (arXiv 1602.01783): not centered.
    defaults["rmsprop"] = {"decay": rms_decay, "eps": epsilon, "eps_in_sqrt": True}
    optimizer = NAMED[spec.name](1.0, **defaults.get(spec.name, {}) | dict(spec.parameters))
    rate: Any = getattr(config, "learning_rate", None)
    max_norm = getattr(config, "max_grad_norm", None)
    times_rate = rate.transformation() if adapts(rate) else _TIMES_RATE
    return optax.chain(optax.identity() if max_norm is None else _clip(max_norm), optimizer, times_rate)


def for_each_network(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Applies an optimizer to several networks by name, separately: clips each network's gradient norm."""

    def init(params: Any) -> Any:
        return {name: optimizer.init(p) for name, p in params.items()}

    def update(updates: Any, state: Any, params: Any = None, **rate: Any) -> tuple[Any, Any]:
        new = {name: optimizer.update(u, state[name], params[name], **rate) for name, u in updates.items()}
        return {name: u for name, (u, _) in new.items()}, {name: new_state for name, (_, new_state) in new.items()}

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]


def _clip(max_norm: float) -> optax.GradientTransformation:
    """Like `optax.clip_by_global_norm`, but computes the norm with `global_norm`."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm = global_norm(updates)
        return jax.tree.map(lambda x: jnp.where(norm < max_norm, x, (x / norm.astype(x.dtype)) * max_norm), updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


_TIMES_RATE = optax.GradientTransformationExtraArgs(
    optax.init_empty_state,
    lambda updates, state, params=None, *, learning_rate, **_: (jax.tree.map(lambda u: learning_rate * u, updates), state),  # type: ignore[arg-type]
)
