"""Optimizers: optax's by name, and transformations of one's own.

A named one turns gradients, clipped by their global norm, into updates; `descend` subtracts a learning rate times these. So the
learning rate may be a number of a member, of a schedule or of a search. A transformation of one's own follows the convention of
optax: it gets the gradients as they are, and what it returns is added to the parameters. Clip and learning rate are its own.
"""

import inspect
import math
import numbers
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from msrl_jax import _checks
from msrl_jax._spec import read_values
from msrl_jax.algorithms.schedules import KL, is_adaptive, is_schedule, read_kl

NAMED: Mapping[str, Callable[..., optax.GradientTransformation]] = {
    "adam": optax.adam, "adamw": optax.adamw, "rmsprop": optax.rmsprop, "sgd": optax.sgd, "lion": optax.lion,
    "muon": optax.contrib.muon,
}  # fmt: skip
"""The optimizers of optax that have a name here."""
_UNSCALED: Mapping[str, Callable[..., optax.GradientTransformation]] = {
    "adam": optax.scale_by_adam, "rmsprop": optax.scale_by_rms,
}  # fmt: skip
_SHARES = ("b1", "b2", "adam_b1", "adam_b2", "beta", "decay", "momentum")  # parameters from 0 to below 1
_PARTS = ("learning_rate", "anneal_learning_rate", "max_grad_norm", "adam_epsilon", "epsilon", "rms_decay")
_OWN = "an optax.GradientTransformation"


def is_own(optimizer: Any) -> bool:
    """Whether an optimizer of a config is a transformation of one's own, or the name of one."""
    return not isinstance(optimizer, str) or (":" in optimizer and optimizer.partition(":")[0] not in NAMED)


def remedy(optimizer: Any) -> str | None:
    """What to use in place of a value that is no optimizer of a config; None if it may be one."""
    if not isinstance(optimizer, str):
        fits = isinstance(optimizer, optax.GradientTransformation) or (callable(optimizer) and not _needed(optimizer))
        return None if fits else f"{_OWN}, or a function without arguments that returns one"
    name, _, text = optimizer.partition(":")
    if name not in NAMED and (":" not in optimizer or "=" in text):
        return f"one of {', '.join(NAMED)}{_checks.suggestion(name, NAMED)}, {_OWN}, or MODULE:NAME of one"
    if name not in NAMED or ":" not in optimizer:
        return None
    return _wrong_parameter(name, text)


def _wrong_parameter(name: str, text: str) -> str | None:
    """What to use in place of the parameters of a named optimizer."""
    known = _parameters(NAMED[name])
    try:
        given = read_values(text, wrong=f"{name}:parameter=value,parameter=value")
    except ValueError as error:
        return str(error)
    for key, value in given.items():
        if key not in known:
            return f"parameters that {name} of optax has{_checks.suggestion(key, known)}: {', '.join(known)}"
        if isinstance(known[key], bool):
            if not isinstance(value, bool):
                return f"True or False for {key}"
        elif isinstance(value, bool) or not isinstance(value, numbers.Real):
            return f"a number for {key}"
        elif not (math.isfinite(float(value)) and float(value) >= 0 and (float(value) < 1 or key not in _SHARES)):
            return f"a finite number of at least 0{' and below 1' * (key in _SHARES)} for {key}"
    return None


def check_given(config: Any, names: Collection[str]) -> None:
    """Raises ValueError if a field was given that has no effect on the learning rate or the optimizer of the config."""
    rate = getattr(config, "learning_rate", None)
    if "anneal_learning_rate" in names and (is_schedule(rate) or is_adaptive(rate)):
        kind = type(config).__name__
        raise ValueError(
            f"{kind}.anneal_learning_rate has no effect on {kind}.learning_rate={_checks.name_of(rate)}, which is no number; "
            "leave it out, or give a number"
        )
    if not is_own(getattr(config, "optimizer", "adam")):
        return
    for name in _PARTS:
        if name in names:
            raise ValueError(
                f"{type(config).__name__}.{name} has no effect on an optimizer of one's own, which has its own learning rate, "
                f"clip and schedule; make them a part of it, and leave {name} out"
            )


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of an optimizer that are numbers, with their defaults."""
    no_numbers = ("learning_rate", "mask", "dtype", "dimension_numbers")
    found = inspect.signature(function).parameters
    return {n: p.default for n, p in found.items() if isinstance(p.default, float | int | None) and not n.endswith(no_numbers)}


def _needed(function: Callable[..., Any]) -> bool:
    """Whether a function needs arguments."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return True
    return False


def make_optimizer(config: Any, *, epsilon: Any, rms_decay: Any = 0.99) -> optax.GradientTransformation:
    """The optimizer of a config, for `descend`.

    Args:
      config: has `optimizer`, and may have `max_grad_norm`.
      epsilon: the small number in the denominators of Adam, AdamW and RMSProp, where the text of the optimizer has none.
      rms_decay: the decay of RMSProp's mean of squares, likewise.

    Returns:
      The transformation of gradients. A named one clips them first, and returns what is subtracted times the learning rate.

    Raises:
      TypeError: if it is of one's own, and no transformation.
      ValueError: if MODULE:NAME cannot be imported.
    """
    if is_own(config.optimizer):
        return _own(config.optimizer)
    rate = getattr(config, "learning_rate", None)
    if is_adaptive(rate):
        return _adapting(_named(config, epsilon, rms_decay), read_kl(rate))
    return _named(config, epsilon, rms_decay)


def _named(config: Any, epsilon: Any, rms_decay: Any) -> optax.GradientTransformation:
    """An optimizer of optax, after a clip if the config has one."""
    name, _, text = config.optimizer.partition(":")
    usual = {"adam": {"eps": epsilon}, "adamw": {"eps": epsilon}}
    usual["rmsprop"] = {"decay": rms_decay, "eps": epsilon, "eps_in_sqrt": True}  # that of A3C (arXiv 1602.01783): not centered
    given = usual.get(name, {}) | (read_values(text, wrong=text) if text else {})
    if name in _UNSCALED and given.keys() <= _parameters(_UNSCALED[name]).keys():
        optimizer = _UNSCALED[name](**given)
    else:
        optimizer = optax.chain(NAMED[name](1.0, **given), optax.scale(-1.0))
    if not hasattr(config, "max_grad_norm"):
        return optimizer
    clip = optax.identity() if config.max_grad_norm is None else optax.clip_by_global_norm(config.max_grad_norm)
    return optax.chain(clip, optimizer)


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


def _own(given: Any) -> optax.GradientTransformation:
    """A transformation of one's own, which says in words what does not fit when it is first traced."""
    what: Any = _checks.imported("optimizer", given, _OWN) if isinstance(given, str) else given
    name = f"optimizer={_checks.name_of(given)}"
    if callable(what) and not _needed(what):
        what = what()
    if not isinstance(what, optax.GradientTransformation):
        multi = " (of optax.MultiSteps, its gradient_transformation())" * isinstance(what, optax.MultiSteps)
        raise TypeError(f"{name} is a {type(what).__qualname__}; give {_OWN}{multi}, or a function that returns one")

    def init(params: Any) -> Any:
        try:
            state = jax.tree.map(jnp.copy, what.init(params))  # two leaves that are one array cannot be donated
            updates, after = jax.eval_shape(what.update, params, state, params)
        except Exception as error:
            cause = f"{type(error).__name__}: {str(error).strip()}"
            raise ValueError(
                f"{name} fails: {cause}; it gets gradients, its state, which is of arrays, and parameters, and nothing else"
            ) from error
        for what_is, got, wanted in (("updates", updates, params), ("a state", after, state)):
            if _shapes(got) != _shapes(wanted):
                like = "the parameters" if what_is == "updates" else "the state that it gets"
                raise ValueError(f"{name} returns {what_is} of another structure, shape or dtype than {like}")
        return state

    return optax.GradientTransformation(init, what.update)


def _shapes(tree: Any) -> Any:
    return jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def descend(params: Any, updates: Any, learning_rate: jax.Array | None) -> Any:
    """Subtracts `learning_rate`, a traced number, times `updates` from `params`; adds updates that have no learning rate."""
    if learning_rate is None:
        return optax.apply_updates(params, updates)
    return jax.tree.map(lambda p, u: p - learning_rate * u, params, updates)
