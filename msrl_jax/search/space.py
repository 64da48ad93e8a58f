"""The space of a sweep: the fields of a config that it varies, and how the values of its trials are chosen."""

import dataclasses
import itertools
import math
import numbers
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import numpy as np

from msrl_jax import algorithms
from msrl_jax._checks import whole
from msrl_jax._spelling import suggestion
from msrl_jax.envs.distributions import Distribution, choice, is_value, parse

Method: TypeAlias = Literal["random", "grid", "sobol", "optuna"]
"""How the trials of a sweep are chosen."""


@dataclasses.dataclass(frozen=True)
class Axis:
    """A swept field.

    Attributes:
      field: its name.
      values: its options (`choice`), or the distribution of its values.
      is_whole: whether its values are integers.
    """

    field: str
    values: Distribution
    is_whole: bool

    @property
    def is_log(self) -> bool:
        """Whether the logarithm of the value is what is uniform."""
        return self.values.kind == "log_uniform"

    def at(self, fraction: float) -> Any:
        """The value below which this fraction of the values lies, from 0 up to but not including 1."""
        if self.values.kind == "choice":
            return self.values.numbers[int(fraction * len(self.values.numbers))]
        low, high = self.values.numbers
        above = high + 1 if self.is_whole else high  # each integer has an interval of its own
        if self.is_log:
            value = math.exp(math.log(low) + fraction * (math.log(above) - math.log(low)))
        else:
            value = low + fraction * (above - low)
        return min(max(math.floor(value) if self.is_whole else value, low), high)

    def points(self, count: int | None) -> list[Any]:
        """The values on a grid: all options, or `count` from the lower to the upper bound, evenly, or in equal ratios."""
        if self.values.kind == "choice":
            return list(self.values.numbers)
        if count is None:
            raise ValueError(
                f'{self.field}={self.values} with method="grid": num= says how many points such a field has on the grid; give '
                "it, or a list of values"
            )
        low, high = self.values.numbers
        found = (np.geomspace if self.is_log else np.linspace)(low, high, count).tolist()
        return list(dict.fromkeys(map(round, found))) if self.is_whole else found


def read_axes(kind: type, given: Mapping[str, Any]) -> tuple[list[Axis], dict[str, Any]]:
    """Separates the swept fields from the constants.

    Args:
      kind: the config.
      given: fields of it. Several values are a sequence, a distribution of `msrl_jax.envs`, or text of one; a field whose
        single value is a sequence has a sequence of them.

    Returns:
      The swept fields, and the other fields.

    Raises:
      ValueError: on an unknown field, if a value cannot be read, or if no field has several.
    """
    hints = typing.get_type_hints(kind)
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := [field for field in given if field not in known]:
        algorithms.make(kind, {unknown[0]: None})  # which suggests the nearest field
    axes, constants = [], {}
    for field, value in given.items():
        found = _read(f"{kind.__name__}.{field}", value, hints[field])
        if isinstance(found, Distribution):
            axes.append(Axis(field, found, _is_whole(hints[field])))
        else:
            constants[field] = found
    if not axes:
        raise ValueError(
            "no field has several values; give one of them a list, a distribution (envs.uniform, envs.log_uniform) or text "
            "such as log:1e-4:1e-2, or use train"
        )
    return axes, constants


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if type(None) in get_args(hint) else (hint,)


def _is_whole(hint: Any) -> bool:
    return int in _parts(hint) and float not in _parts(hint)


def _read(where: str, value: Any, hint: Any) -> Any:
    """A distribution if the field is swept, else its value."""
    is_number = bool({int, float} & set(_parts(hint)))
    if isinstance(value, str) and is_number:
        value = parse(where, value)
    if isinstance(value, np.ndarray | jax.Array):
        value = np.asarray(value).tolist()
    if isinstance(value, list | tuple | range):
        options: list[Any] = list(value)
        if any(typing.get_origin(part) is tuple for part in _parts(hint)):
            several = bool(options) and all(isinstance(x, list | tuple) for x in options)
            value = choice([tuple(x) for x in options]) if several else value
        else:
            value = choice(options)
    if not is_value(value):
        return _number(where, value, hint)
    if not isinstance(value, Distribution):
        raise ValueError(f"{where}={value}: a value of a config does not change during a run; give a distribution or a list")
    if not value.numbers:
        raise ValueError(f"{where}: there are no values; give at least one")
    if value.kind == "choice":
        return choice([_number(where, x, hint) for x in value.numbers])
    if not is_number:
        raise ValueError(f"{where}={value}: it is no number; give a list of its values")
    bounds: Any = tuple(_number(where, x, hint) for x in value.numbers)
    low, high = bounds
    fine = all(isinstance(x, numbers.Real) and math.isfinite(x) for x in bounds) and low <= high
    if not fine or (value.kind == "log_uniform" and low <= 0):
        raise ValueError(f"{where}={value}: give low <= high{' above 0' * (value.kind == 'log_uniform')}")
    return dataclasses.replace(value, numbers=bounds)


def _number(where: str, value: Any, hint: Any) -> Any:
    """A single value as plain Python data; an integer for a field of integers."""
    value = value.item() if isinstance(value, np.generic) else value
    if is_value(value):
        raise ValueError(f"{where}: {value} stands inside of a list or another distribution; use numbers")
    return int(value) if _is_whole(hint) and isinstance(value, float) and value.is_integer() else value


def choose(axes: Sequence[Axis], method: str, num: int | None, seed: int) -> list[dict[str, Any]]:
    """Chooses the values of all trials.

    Args:
      axes: the swept fields.
      method: "random", "grid" (all combinations), or "sobol", whose points fill the space more evenly (Sobol, 1967; scrambled).
      num: number of trials; of a grid, the points of each field that has a distribution.
      seed: seed of the choice.

    Returns:
      The values of every trial, each once: repeats, which a few options give soon, are left out.

    Raises:
      ValueError: if `num` is missing or has no effect.
    """
    names = [axis.field for axis in axes]
    if method == "grid":
        if num is not None and all(axis.values.kind == "choice" for axis in axes):
            raise ValueError(f'num={num} with method="grid": the trials are the combinations of the lists; leave num out')
        return _unique(dict(zip(names, x, strict=True)) for x in itertools.product(*(axis.points(num) for axis in axes)))
    count, random = count_of(method, num), np.random.default_rng(seed)
    if method == "sobol":
        from scipy.stats import qmc  # a slow import

        # Its points are balanced in powers of two, so the first of them are taken.
        fractions = qmc.Sobol(len(axes), rng=random).random_base2(max(0, math.ceil(math.log2(count))))[:count]
    else:
        fractions = random.random((count, len(axes)))
    return _unique({axis.field: axis.at(u) for axis, u in zip(axes, row, strict=True)} for row in fractions.tolist())


def count_of(method: str, num: int | None) -> int:
    """The number of trials; raises ValueError if it is missing."""
    if num is None:
        raise ValueError(f'method="{method}" needs num=, the number of trials; method="grid" takes all combinations of lists')
    return num


def check_method(method: Any, num: Any) -> tuple[Method, int | None]:
    """Checks the method of a sweep and the number of its trials; raises ValueError."""
    known = get_args(Method)
    if method not in known:
        near = suggestion(method, known) if isinstance(method, str) else ""
        raise ValueError(f"method={method!r}{near}; use one of {', '.join(known)}")
    return method, None if num is None else whole("num", num)


def _unique(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({repr(row): row for row in rows}.values())
