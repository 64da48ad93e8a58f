"""The trials of a sweep: their results and ranks, the programs that they share, and the files of the sweep's folder.

    sweep.json   what the sweep computes, its programs, and its trials
    stage-S/program-P/batch-B/   the folder of a run
    table.json   the results of every trial; table.csv holds the same
    lock         held by the process that writes to the folder

The runs have their folders from the start; the table is written at the end.
"""

import csv
import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msrl_jax._checks import writing
from msrl_jax.algorithms.config import tunable_fields
from msrl_jax.experiment import folder
from msrl_jax.experiment.folder import RunFolderError

SWEEP, TABLE, TABLE_CSV = "sweep.json", "table.json", "table.csv"

_FREE = ("policy", "config", "fields")
"""What may change in a sweep that goes on, and what is compared field by field."""


class Shape(NamedTuple):
    """What the trials of one program share."""

    fields: Mapping[str, Any]  # the swept fields that make the program, and their values
    data: tuple[str, ...]  # the swept fields that are numbers of its state


@dataclasses.dataclass(frozen=True)
class Trial:
    """A trial of a sweep and its results."""

    number: int  # from 0
    values: Mapping[str, Any]  # of the swept fields
    program: int  # trials of one program differ in numbers alone, and are trained side by side
    steps: int = 0  # that each of its members has done
    rung: int = 0  # the last one of successive halving that it finished
    # The return of each seed after these steps; nan for a member whose parameters are not finite. Empty without training.
    returns: tuple[float, ...] = ()
    rank: int | None = None  # 1 for the best: trials of a higher rung come first, then those with a higher mean return
    run: int | None = None  # the number of the run that trained it last, in `SweepResult.runs`
    member: int = 0  # the number of its first member in this run

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


def open_sweep(path: Path, description: Mapping[str, Any], resume: bool) -> dict[str, Any]:
    """The content of `sweep.json`, empty if there is none; RunFolderError if the folder is not that of the described sweep."""
    if not (path / SWEEP).exists():
        folder.check_free(path)
        return {}
    if not resume:
        raise RunFolderError(
            f"the folder {path} already holds a sweep; go on with it (resume=True, or --resume), name another folder, or "
            "delete it first"
        )
    found = folder.read_json(path / SWEEP, "sweep", "programs", "trials")
    was, now = _facts(found["sweep"]), _facts(description)
    if now["members_at_once"] is None:
        now["members_at_once"] = was["members_at_once"]
    for name in {**was, **now}:
        before, value = was.get(name, "a constant"), now.get(name, "a constant")
        if before != value:
            raise RunFolderError(
                f"the sweep in {path} has {name}={before}, and cannot go on with {name}={value}; give the same, or start a new "
                "sweep in another folder"
            )
    return found


def _facts(description: Mapping[str, Any]) -> dict[str, Any]:
    """What a sweep computes by name, the fields of the config and the swept ones included."""
    return {k: v for k, v in description.items() if k not in _FREE} | description["config"] | description["fields"]


def write_table(path: Path, trials: Sequence[Trial], runs: Sequence[Path], about: Mapping[str, Any]) -> None:
    """Writes `table.json` and `table.csv`."""
    where = [str(run.relative_to(path)) for run in runs]
    folder.write_json(path / TABLE, {**about, "runs": where, "trials": list(trials)})
    table, partial = table_of(trials), path / f".{TABLE_CSV}.partial"
    with writing(path / TABLE_CSV):
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, table[0])
            writer.writeheader()
            writer.writerows({k: "" if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()} for row in table)
        os.replace(partial, path / TABLE_CSV)


def read_trials(rows: Sequence[Mapping[str, Any]]) -> tuple[Trial, ...]:
    """Trials from plain data."""

    def made(row: Mapping[str, Any]) -> Trial:
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in row["values"].items()}
        return Trial(**{**row, "values": values, "returns": tuple(math.nan if x is None else x for x in row["returns"])})

    return tuple(map(made, rows))
