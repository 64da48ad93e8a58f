"""The trials of a sweep, their ranks, and the programs that they share."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msrl_jax.algorithms.config import tunable_fields


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the trials of one program share.

    Attributes:
      fields: the swept fields that make the program, and their values.
      data: the swept fields that are numbers of its state.
    """

    fields: Mapping[str, Any]
    data: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Trial:
    """A trial of a sweep and its results.

    Attributes:
      number: its number, from 0.
      values: the values of the swept fields.
      program: the number of its program. Trials of one program differ in numbers alone, and are trained side by side.
      steps: steps that each of its members has done.
      rung: the last rung of successive halving that it finished.
      returns: the return of each seed after these steps; nan for a member whose parameters are not finite. Empty if the trial
        was not trained.
      rank: 1 for the best: trials of a higher rung come first, then those with a higher mean return. None without returns.
      run: the number of the run that trained it last, in `SweepResult.runs`; None if the trial was not trained.
      member: the number of its first member in this run.
    """

    number: int
    values: Mapping[str, Any]
    program: int
    steps: int = 0
    rung: int = 0
    returns: tuple[float, ...] = ()
    rank: int | None = None
    run: int | None = None
    member: int = 0

    @property
    def mean(self) -> float:
        """The mean return of its seeds; nan if one of them is nan."""
        return math.fsum(self.returns) / len(self.returns) if self.returns else math.nan

    @property
    def min(self) -> float:
        """The lowest return of its seeds."""
        return math.nan if math.isnan(self.mean) else min(self.returns)

    @property
    def max(self) -> float:
        """The highest return of its seeds."""
        return math.nan if math.isnan(self.mean) else max(self.returns)

    def __str__(self) -> str:
        return f"trial {self.number} ({values_in_words(self.values)})"


def values_in_words(values: Mapping[str, Any]) -> str:
    """Values of fields as text: `learning_rate=0.001, num_envs=8`."""
    return ", ".join(f"{name}={value_in_words(value)}" for name, value in values.items())


def value_in_words(value: Any) -> str:
    """A value of a field as short text."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def shape_of(kind: type, values: Mapping[str, Any], shared: bool) -> Shape:
    """The program of a trial, which others share if they may; a tunable field that is None is a branch of the program."""
    tunable = tunable_fields(kind) if shared else ()
    data = tuple(name for name, value in values.items() if name in tunable and value is not None)
    return Shape({name: value for name, value in values.items() if name not in data}, data)


def ranked(trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """The trials with their ranks, by number."""
    trials = sorted(trials, key=lambda trial: trial.number)
    ranks = {t.number: rank for rank, t in enumerate(sorted((t for t in trials if t.returns), key=by_return), 1)}
    return tuple(dataclasses.replace(trial, rank=ranks.get(trial.number)) for trial in trials)


def by_return(trial: Trial) -> tuple[Any, ...]:
    """A key that sorts trials from the best to the worst; nan comes last."""
    return -trial.rung, math.isnan(trial.mean), 0.0 if math.isnan(trial.mean) else -trial.mean, trial.number


def survivors(trials: Sequence[Trial], factor: int) -> list[Trial]:
    """The best trials, one of `factor`, at least one; none whose return is nan."""
    best = sorted(trials, key=by_return)[: -(-len(trials) // factor)]
    return sorted((trial for trial in best if not math.isnan(trial.mean)), key=lambda trial: trial.number)


def table_of(trials: Iterable[Trial]) -> list[dict[str, Any]]:
    """A row of plain data for each trial."""
    return [
        {
            "trial": trial.number, "program": trial.program, **trial.values, "rung": trial.rung, "steps": trial.steps,
            "return_mean": trial.mean, "return_min": trial.min, "return_max": trial.max, "rank": trial.rank,
        }
        for trial in trials
    ]  # fmt: skip
