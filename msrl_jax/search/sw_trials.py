"""The trials of a sweep: their configs, and the programs that they share."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from msrl_jax.algorithms import Algorithm
from msrl_jax.algorithms.configs.base import tunable_fields


@dataclasses.dataclass(frozen=True)
class Group:
    """What the trials of one program share.

    Attributes:
      fields: the swept fields that make the program, and their values.
      data: the swept fields that are numbers of its state.
    """

    fields: Mapping[str, Any]
    data: tuple[str, ...]

    def __str__(self) -> str:
        return values_in_words(self.fields)


@dataclasses.dataclass(frozen=True)
class Trial:
    """A setting of a sweep, and what became of it.

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


def grouped(algorithm: Algorithm, values: Mapping[str, Any], shared: bool) -> Group:
    """The program of a trial; a `Tunable` field that is None is a branch of the program."""
    tunable = tunable_fields(algorithm.config) if shared else ()
    data = tuple(name for name, value in values.items() if name in tunable and value is not None)
    return Group({name: value for name, value in values.items() if name not in data}, data)


def make_trials(
    algorithm: Algorithm,
    config: Any,
    constants: Mapping[str, Any],
    chosen: Sequence[Mapping[str, Any]],
    groups: list[Group],
    *,
    first: int = 0,
    shared: bool = True,
) -> list[Trial]:
    """Makes trials, and checks the config of each.

    Args:
      algorithm: the algorithm.
      config: the config to start from; the defaults if None.
      constants: fields that all trials share.
      chosen: the values of the swept fields.
      groups: the programs known so far; new ones are added.
      first: number of the first trial.
      shared: whether trials may share a program.

    Returns:
      The trials.

    Raises:
      ValueError: on an invalid config; the message names the trial.
    """
    trials = []
    for number, values in enumerate(chosen, first):
        group = grouped(algorithm, values, shared)
        if group not in groups:
            groups.append(group)
        trial = Trial(number, dict(values), groups.index(group))
        try:
            algorithm.make_config(config, {**constants, **values})
        except ValueError as error:
            raise ValueError(f"{trial}: {error}") from None
        trials.append(trial)
    return trials


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """The trials with their ranks, in their order."""
    best = sorted((t for t in trials if t.returns), key=by_return)
    ranks = {trial.number: rank for rank, trial in enumerate(best, 1)}
    return [dataclasses.replace(trial, rank=ranks.get(trial.number)) for trial in trials]


def by_return(trial: Trial) -> tuple[Any, ...]:
    """A key that sorts trials from the best to the worst; nan comes last."""
    return -trial.rung, math.isnan(trial.mean), 0.0 if math.isnan(trial.mean) else -trial.mean, trial.number
