"""Checks for the fields of an algorithm's config: every message names the field, its value and what it should be.

A field whose default is None may be None.
"""

import dataclasses
import math
import numbers
import os
from collections.abc import Iterable, Iterator
from typing import Any

from msrl_jax._spelling import nearest
from msrl_jax.codecs import CODECS
from msrl_jax.data import Dataset


def _given(config: object, fields: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for field in fields:
        value = getattr(config, field)
        if value is not None or getattr(type(config), field, ...) is not None:
            yield field, value


def _reject(config: object, field: str, remedy: str) -> ValueError:
    return ValueError(f"{type(config).__name__}.{field}={getattr(config, field)!r}: use {remedy}")


def _is_integer(value: Any, minimum: int) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= minimum


def check_integers(config: object, minimum: int, *fields: str) -> None:
    """Raises ValueError unless every named field is an integer of at least `minimum`."""
    for field, value in _given(config, fields):
        if not _is_integer(value, minimum):
            raise _reject(config, field, f"an integer of at least {minimum}")


def check_periods(config: object, *fields: str) -> None:
    """Raises ValueError unless every named field is an integer from 1 to `2**24`, as `counters.remainder` takes it."""
    for field, value in _given(config, fields):
        if not _is_integer(value, 1) or value > 2**24:
            raise _reject(config, field, f"an integer of at least 1 and at most {2**24}")


def check_numbers(
    config: object, *fields: str, low: float = -math.inf, above: float = -math.inf, high: float = math.inf
) -> None:
    """Raises ValueError unless every named field is a finite number in [low, high], and greater than `above`."""
    bounds = {"above": above, "at least": low, "at most": high}
    wanted = " and ".join(f"{relation} {bound:g}" for relation, bound in bounds.items() if math.isfinite(bound))
    for field, value in _given(config, fields):
        number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
        if not (math.isfinite(number) and low <= number <= high and number > above):
            raise _reject(config, field, f"a finite number {wanted}".rstrip())


def check_booleans(config: object, *fields: str) -> None:
    """Raises ValueError unless every named field is True or False."""
    for field in fields:
        if not isinstance(getattr(config, field), bool):
            raise _reject(config, field, "True or False")


def check_choice(config: object, field: str, options: Iterable[str]) -> None:
    """Raises ValueError unless the named field is one of `options`; the message suggests the nearest one."""
    options = sorted(options)
    for _, value in _given(config, [field]):
        if value not in options:
            near = nearest(str(value), options)
            raise _reject(config, field, repr(near) if near else f"one of {options}")


def check_sizes(config: object, field: str) -> None:
    """Raises ValueError unless the named field is a tuple of positive integers."""
    value = getattr(config, field)
    if not isinstance(value, tuple) or not value or not all(_is_integer(size, 1) for size in value):
        raise _reject(config, field, "a tuple of positive integers, such as (64, 64)")


def check_common(config: Any) -> None:
    """Raises ValueError on a value that cannot work of a field whose name means the same in all algorithms that have it.

    So do switches, the fields whose default is True or False. What else a config has, it checks itself.
    """
    fields = {field.name: field.default for field in dataclasses.fields(config)}

    def there(*names: str) -> list[str]:
        return [name for name in names if name in fields]

    check_integers(config, 1, *there("num_envs", "unroll_length", "num_epochs", "num_minibatches", "total_steps"))
    check_integers(config, 1, *there("num_updates", "batch_size", "capacity", "learning_starts", "shards", "n_step"))
    check_numbers(config, *there("learning_rate", "epsilon", "max_grad_norm"), above=0.0)
    check_numbers(config, *there("clip_ratio", "clip_value", "target_kl"), above=0.0)
    check_numbers(config, *there("discount", "gae_lambda", "rms_decay"), low=0.0, high=1.0)
    check_numbers(config, *there("entropy_coef", "value_coef"), low=0.0)
    check_booleans(config, *[name for name, default in fields.items() if isinstance(default, bool)])
    if "hidden_sizes" in fields:
        check_sizes(config, "hidden_sizes")
    check_numbers(config, *there("data_fraction"), above=0.0, high=1.0)
    if "data" in fields and not isinstance(config.data, str | os.PathLike | Dataset | None):
        raise _reject(config, "data", "the path of a data set, or a msrl_jax.data.Dataset")
    choices = {
        "activation": ("tanh", "relu", "elu", "gelu", "silu"),
        "network": ("auto", "mlp", "cnn"),
        "storage": CODECS,
    }
    for name in there(*choices):
        check_choice(config, name, choices[name])


def check_annealing(config: Any) -> None:
    """Raises ValueError if the learning rate is to fall over a number of steps that is not given."""
    if config.anneal_learning_rate and config.total_steps is None:
        raise ValueError(
            f"{type(config).__name__}.anneal_learning_rate needs total_steps; give it, or set anneal_learning_rate=False"
        )
