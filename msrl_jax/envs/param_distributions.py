"""Values of environment parameters: distributions, and numbers that follow the steps of a run.

All are pytrees whose leaves are their numbers, so a program takes the numbers as data and does not recompile when they change.
As text they are written as in Python, `uniform(0.25, 1)`, or, for the command line, without commas: `uniform:0.25:1`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.fragments.counters import Counter, fraction
from msrl_jax.fragments.support.checks import whole
from msrl_jax.fragments.support.text_values import read_value, read_values


@functools.partial(jax.tree_util.register_dataclass, data_fields=["numbers"], meta_fields=["kind"])
@dataclasses.dataclass(frozen=True)
class ParamDistribution:
    """A distribution of one parameter; `numbers` holds the bounds `(low, high)` or the options: numbers, or `ParamRamp`s."""

    kind: Literal["uniform", "log_uniform", "choice"]
    numbers: tuple[Any, ...]

    def __str__(self) -> str:
        inner = ", ".join(map(text, self.numbers))
        return f"{self.kind}([{inner}])" if self.kind == "choice" else f"{self.kind}({inner})"


@functools.partial(jax.tree_util.register_dataclass, data_fields=["start", "end"], meta_fields=["steps"])
@dataclasses.dataclass(frozen=True)
class ParamRamp:
    """A number that changes linearly from `start` to `end` over the first `steps` environment steps of a run."""

    start: Any
    end: Any
    steps: int

    def __str__(self) -> str:
        return f"ramp({text(self.start)}, {text(self.end)}, {self.steps})"


def uniform(low: Any, high: Any) -> ParamDistribution:
    """Returns a uniform distribution from `low` to `high`; for an integer parameter, both bounds are included."""
    return ParamDistribution("uniform", (low, high))


def log_uniform(low: Any, high: Any) -> ParamDistribution:
    """Returns a distribution from `low` to `high`, above 0, whose logarithm is uniform."""
    return ParamDistribution("log_uniform", (low, high))


def choice(options: Sequence[Any]) -> ParamDistribution:
    """Returns a uniform distribution over the options."""
    return ParamDistribution("choice", tuple(options))


def ramp(start: Any, end: Any, steps: int) -> ParamRamp:
    """Returns a number that changes linearly from `start` to `end` over the first `steps` environment steps, then stays
    constant.
    """
    return ParamRamp(start, end, whole("steps of a ramp", steps, most=2**63))


def _choice(*options: Any) -> ParamDistribution:
    """As in text: `choice:1:2` or `choice([1, 2])`."""
    return choice(options[0] if len(options) == 1 and isinstance(options[0], list | tuple) else options)


CALLS = {"uniform": uniform, "log_uniform": log_uniform, "log": log_uniform, "choice": _choice, "ramp": ramp}  # in text


def is_value(x: Any) -> bool:
    """Whether a value is a `ParamDistribution` or a `ParamRamp`."""
    return isinstance(x, ParamDistribution | ParamRamp)


def _is_ramp(x: Any) -> bool:
    return isinstance(x, ParamRamp)


def ramps(tree: Any) -> list[ParamRamp]:
    """Returns the ramps in a pytree of values."""
    return [x for x in jax.tree.leaves(tree, is_leaf=_is_ramp) if _is_ramp(x)]


def replace_ramps(tree: Any, steps: Counter | tuple[()]) -> Any:
    """Replaces the ramps in a pytree of values by their numbers after `steps` steps."""

    def number(x: Any) -> Any:
        if not isinstance(x, ParamRamp):
            return x
        assert isinstance(steps, Counter)
        share, dtype = fraction(steps, x.steps), jnp.result_type(x.start)
        # Exact at both ends, whatever the rounding.
        number = x.start * (1 - share) + x.end * share
        return jnp.round(number).astype(dtype) if jnp.issubdtype(dtype, jnp.integer) else number.astype(dtype)

    return jax.tree.map(number, tree, is_leaf=_is_ramp)


def draw_param(value: Any, key: jax.Array, struct: jax.ShapeDtypeStruct, steps: Counter | tuple[()]) -> jax.Array:
    """Draws a parameter after `steps` steps. Elements of an array are independent, except those of `choice`."""
    value = replace_ramps(value, steps)
    if not isinstance(value, ParamDistribution):
        return jnp.asarray(value, struct.dtype)
    numbers = [jnp.asarray(number, struct.dtype) for number in value.numbers]
    if value.kind == "choice":
        index = jax.random.randint(key, (), 0, len(numbers), jnp.int32)
        return jnp.stack(numbers)[index]
    low, high = numbers
    if jnp.issubdtype(struct.dtype, jnp.integer):
        return jax.random.randint(key, struct.shape, low, high + 1, struct.dtype)
    if value.kind == "log_uniform":
        value = jnp.exp(jax.random.uniform(key, struct.shape, struct.dtype, jnp.log(low), jnp.log(high)))
        return jnp.clip(value, low, high)
    return jax.random.uniform(key, struct.shape, struct.dtype, low, high)


def cast(place: str, value: Any, struct: jax.ShapeDtypeStruct) -> Any:
    """Returns a value, possibly text, with its numbers as NumPy arrays of the parameter's dtype; ValueError if they do not
    fit.
    """
    value = parse_param(place, value) if isinstance(value, str) else value
    if not isinstance(value, ParamDistribution):
        return _cast_number(place, value, value, struct)
    is_integer, is_log = jnp.issubdtype(struct.dtype, jnp.integer), value.kind == "log_uniform"
    if not value.numbers:
        raise ValueError(f"{place}=choice([]) has no options; pass at least one")
    if struct.dtype == bool and value.kind != "choice":
        raise ValueError(f"{place}={value}: the parameter is a bool; use choice([True, False])")
    if is_integer and is_log:
        raise ValueError(f"{place}={value}: the parameter is an integer; use uniform or choice")
    numbers = tuple(_cast_number(place, value, number, struct) for number in value.numbers)
    if value.kind == "choice":
        return dataclasses.replace(value, numbers=numbers)
    # Bounds are piecewise linear, with breaks where a ramp ends.
    for steps in sorted({0, *(ramp.steps for ramp in ramps(numbers))}):
        low, high = (_host_at(number, steps) for number in numbers)
        if is_integer and (high == (most := np.iinfo(struct.dtype).max)).any():
            raise ValueError(f"{place}={value}: pass a bound below the largest {np.dtype(struct.dtype)}, {most:,}")
        if (low > high).any() or (is_log and (low <= 0).any()):
            since, above = f" after {steps:,} steps" if steps else "", " above 0" if is_log else ""
            value = dataclasses.replace(value, numbers=numbers)
            raise ValueError(f"{place}={value}: the bounds{since} are {low} and {high}; use low <= high{above}")
    return dataclasses.replace(value, numbers=numbers)


def _cast_number(place: str, whole_value: Any, number: Any, struct: jax.ShapeDtypeStruct) -> Any:
    if isinstance(number, ParamDistribution):
        raise ValueError(f"{place}={whole_value}: a distribution is nested in another one; use numbers, or ramps")
    if isinstance(number, ParamRamp):
        if struct.dtype == bool:
            raise ValueError(f"{place}={whole_value}: a bool cannot follow a ramp; use choice([True, False])")
        start, end = (_cast_number(place, whole_value, x, struct) for x in (number.start, number.end))
        return dataclasses.replace(number, start=start, end=end)
    try:
        array = np.asarray(number)
        converted = array.astype(struct.dtype)
        fits = array.dtype.kind in "biuf" and array.shape == struct.shape and not np.isnan(converted).any()
        fits &= np.isfinite(array).all() == np.isfinite(converted).all()
        fits &= array.dtype.kind == "b" if struct.dtype == bool else array.dtype.kind != "b"
        fits &= bool(np.all(converted == array)) if np.dtype(struct.dtype).kind in "iu" else True
    except (TypeError, ValueError, OverflowError):
        fits, converted = False, None
    if not fits:
        kind = np.dtype(struct.dtype).name + (str(list(struct.shape)) if struct.shape else "")
        raise ValueError(f"{place}={text(whole_value)} does not fit the parameter, which is {kind}")
    return converted


def _host_at(number: Any, step: int) -> np.ndarray:
    if not isinstance(number, ParamRamp):
        return np.asarray(number)
    done = min(step / number.steps, 1.0)
    return np.asarray(number.start * (1 - done) + number.end * done)


def text(value: Any) -> str:
    """Returns a value as text that `parse_param` reads."""
    if is_value(value):
        return str(value)
    if isinstance(value, str):
        return text(parse_param("a parameter", value))
    value = np.asarray(value).tolist() if isinstance(value, np.ndarray | np.generic | jax.Array) else value
    return repr(int(value) if isinstance(value, float) and value.is_integer() else value)


def parse_param(place: str, value: str) -> Any:
    """Parses a value: a number, or a call such as `uniform(0.25, ramp(1, 2, 1e6))` or `uniform:0.25:1`."""
    wrong = f"cannot read {place}={value}; write a number, or uniform:0.25:1, choice:1:2:4, ramp:0:1:1e6"
    return _no_word(place, read_value(place, value, CALLS, wrong=wrong))


def parse_many(text: str) -> dict[str, Any]:
    """Parses `length=uniform:0.25:1,gravity=9.8`."""
    wrong = f"cannot read {text!r} as parameters; write name=value,name=uniform:0.25:1"
    return {name: _no_word(name, value) for name, value in read_values(text, CALLS, wrong=wrong).items()}


def _no_word(place: str, value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError(f"{place}={value} is not a number; use one, or one of {', '.join(CALLS)}")
    return value
