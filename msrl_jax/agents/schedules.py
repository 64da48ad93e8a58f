"""Schedules: numbers of a config that change over the run.

A tunable field takes a number, or

    linear:FROM[:TO]   changes linearly from FROM to TO (0 by default) over the run
    cosine:FROM[:TO]   the same along half a cosine (Loshchilov and Hutter, 2017, arXiv 1608.03983)
    a function         from the progress, a scalar array from 0 to 1, to a number; or its MODULE:NAME

A text may end with `,warmup=SHARE`: the number first rises linearly from 0 over that share of the run. A learning rate
`kl:TARGET` is not a schedule: it adapts to the updates (`adaptive_rate.KL`).
"""

import dataclasses
import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.agents.adaptive_rate import KL
from msrl_jax.configs.checking import RELATIONS
from msrl_jax.configs.fields import Config
from msrl_jax.configs.names import all_fields, tunable_fields, value_of
from msrl_jax.fragments.support import checks, naming
from msrl_jax.fragments.support.text_values import read_call

ScheduleFunction = Callable[[Any], Any]
"""`progress -> number`; both are scalar arrays."""
_KINDS = ("linear", "cosine")
_FORM = "linear:FROM:TO or cosine:FROM:TO, optionally followed by ,warmup=SHARE"
_KL_FORM = "kl:TARGET, optionally followed by ,start=RATE,low=RATE,high=RATE"
_CLOSED = {"above": operator.ge, "below": operator.le}
_GRID = np.linspace(0, 1, 101, dtype=np.float32)


@dataclasses.dataclass(frozen=True)
class RampSchedule:
    """A schedule from one number to another one."""

    kind: str  # "linear" or "cosine"
    start: float
    end: float = 0.0
    warmup: float = 0.0

    def __call__(self, progress: Any) -> Any:
        """Returns the value at a progress."""
        xp: Any = np if type(progress).__module__ == "numpy" else jnp  # a NumPy array needs no device
        share = xp.clip((progress - self.warmup) / (1 - self.warmup), 0.0, 1.0)
        remaining = (1 + xp.cos(math.pi * share)) / 2 if self.kind == "cosine" else 1 - share
        value = (self.start - self.end) * remaining + self.end
        return xp.where(progress < self.warmup, self.start * progress / self.warmup, value) if self.warmup else value


def is_schedule(value: object) -> bool:
    """Whether the value of a tunable field is a schedule."""
    return callable(value) or (isinstance(value, str) and not is_adaptive(value))


def is_ramp(value: object) -> bool:
    """Whether the value of a field is the text of a `RampSchedule`."""
    return isinstance(value, str) and value.partition(":")[0] in _KINDS


def _takes_one(value: Any) -> bool:
    """Whether a value is a function of one argument."""
    try:
        inspect.signature(value).bind(0)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, type)


def is_adaptive(value: object) -> bool:
    """Whether a learning rate is adaptive."""
    return isinstance(value, str) and value.partition(":")[0] == "kl"


@functools.cache
def read_schedule(value: Any) -> ScheduleFunction:
    """Returns the schedule of a text or a function; raises ValueError, which says what to use, if it is invalid."""
    if not isinstance(value, str):
        return value
    if not is_ramp(value):
        return naming.imported("schedule", value, "a function of the progress", _takes_one)
    name, numbers, options = _numbers(value, _FORM, 2, ("warmup",))
    schedule = RampSchedule(name, *numbers, **options)
    if not 0 <= schedule.warmup < 1:
        raise ValueError(f"a warmup of at least 0 and below 1, a share of the run: {_FORM}")
    return schedule


@functools.cache
def read_kl(text: str) -> KL:
    """Returns the target of an adaptive learning rate; raises ValueError, which says what to use, if it is invalid."""
    _, numbers, options = _numbers(text, _KL_FORM, 1, ("start", "low", "high"))
    kl = KL(*numbers, **options)
    if not (kl.target > 0 and 0 < kl.low <= kl.start <= kl.high):
        raise ValueError(f"a target above 0, and 0 < low <= start <= high (else 1e-5, 1e-3, 1e-2): {_KL_FORM}")
    return kl


def _numbers(text: str, form: str, most: int, names: tuple[str, ...]) -> tuple[str, list[float], dict[str, float]]:
    """Reads `NAME:NUMBER:NUMBER,name=NUMBER`."""
    try:
        call = read_call(text)
        numbers, options = list(map(_number, call.args)), {name: _number(x) for name, x in call.kwargs.items()}
    except (ValueError, TypeError):
        raise ValueError(form) from None
    are_finite = all(map(math.isfinite, [*numbers, *options.values()]))
    if not (1 <= len(numbers) <= most and are_finite and options.keys() <= set(names)):
        raise ValueError(form)
    return call.name, numbers, options


def _number(value: float | str) -> float:
    if isinstance(value, bool | str):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def remedy(name: str, value: Any, bounds: Mapping[str, float]) -> str | None:
    """Says what to use instead of an invalid schedule; None if it is valid. Does not call functions yet."""
    if not isinstance(value, str):
        return None
    kind, _, text = value.partition(":")
    if kind not in _KINDS:
        near = checks.suggestion(kind, _KINDS) if text else ""
        return None if naming.is_path(value) else f"a number, {_FORM}{near}, a function of the progress, or MODULE:NAME of one"
    try:
        wrong = _wrong_value(name, read_schedule(value)(_GRID), bounds)
    except ValueError as error:
        return str(error)
    return wrong and f"numbers that fit; {wrong}"


def kl_remedy(text: Any) -> str | None:
    """Says what to use instead of an invalid adaptive learning rate; None if it is valid."""
    try:
        read_kl(text)
    except ValueError as error:
        return str(error)


def given(config: Config) -> dict[str, Any]:
    """Returns the schedules of a config as given, by field."""
    values = {name: value_of(config, name) for name in tunable_fields(config)}
    return {name: value for name, value in values.items() if is_schedule(value)}


def check(config: Config) -> dict[str, ScheduleFunction]:
    """Returns the schedules of a config; raises ValueError if a value is not within the bounds of its field."""
    functions = {name: read_schedule(value) for name, value in given(config).items()}
    bounds = {name: f.metadata.get("bounds", {}) for name, f in all_fields(config).items()}
    for name, schedule in functions.items():
        where = f"{type(config).__name__}.{name}={checks.name_of(value_of(config, name))}"
        if wrong := _wrong_value(name, _table(schedule, where), bounds[name]):
            raise ValueError(f"{where}: {wrong}")
    return functions


def at(schedule: ScheduleFunction, progress: float) -> float:
    """Returns the value of a schedule as a Python number."""
    with jax.ensure_compile_time_eval():
        return float(schedule(np.float32(progress) if isinstance(schedule, RampSchedule) else jnp.float32(progress)))


@functools.cache
def _table(schedule: ScheduleFunction, where: str) -> np.ndarray:
    """Returns the values of a schedule on a grid of progress values."""
    if isinstance(schedule, RampSchedule):
        return schedule(_GRID)
    try:
        with jax.ensure_compile_time_eval():
            result = jax.eval_shape(schedule, jnp.float32(0))
            fits = jnp.shape(result) == () and jnp.issubdtype(result.dtype, np.number) and result.dtype != np.complex64
            if not fits:
                raise TypeError(f"it returns {result}")
            return np.asarray(jax.lax.map(lambda x: jnp.asarray(schedule(x), jnp.float32), jnp.asarray(_GRID)))
    except Exception as error:
        cause = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        raise ValueError(f"{where} fails: {cause}; it gets the progress, a traced array [], and returns a number") from error


def _wrong_value(name: str, values: np.ndarray, bounds: Mapping[str, float]) -> str | None:
    """Describes the first value that is not finite or not within the bounds; None if all are valid.

    A run never reaches its end, so the last value may equal an exclusive bound; and a learning rate may start at 0.
    """
    for progress, value in zip(_GRID, values, strict=True):
        closed = _CLOSED if progress == 1 or name == "learning_rate" else {}
        fits = all((closed.get(relation) or RELATIONS[relation])(value, np.float32(x)) for relation, x in bounds.items())
        if not (fits and math.isfinite(value)):
            expected = " and ".join(["finite", *(f"{relation} {bound:g}" for relation, bound in bounds.items())])
            return f"at the progress {progress:g} it is {value:g}, and should be {expected}"
    return None
