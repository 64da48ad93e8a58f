"""A sweep on disk: its folder has the trials from the start, a run's folder for each run, and the table at the end.

    sweep.json   what the sweep computes, its programs, and its trials
    stage-S/program-P/batch-B/   the folder of a run
    table.json   the results of every trial; table.csv holds the same
    lock         held by the process that writes to the folder
"""

import csv
import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msrl_jax._checks import writing
from msrl_jax.experiment import folder, processes
from msrl_jax.experiment.folder import RunFolderError
from msrl_jax.search.trials import Trial, table_of

SWEEP, TABLE, TABLE_CSV = "sweep.json", "table.json", "table.csv"

_FREE = ("policy", "config", "fields")
"""What may change in a sweep that goes on, and what is compared field by field."""


def open_sweep(path: Path, description: Mapping[str, Any], resume: bool) -> dict[str, Any]:
    """The content of `sweep.json`; empty if the folder holds no sweep.

    Raises RunFolderError if it holds another sweep than the described one, a run, or a sweep that should not go on.
    """
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


def write_sweep(
    path: Path,
    description: Mapping[str, Any],
    programs: Sequence[Mapping[str, Any]],
    trials: Sequence[Trial],
    before: Mapping[str, Any],
) -> None:
    """Writes `sweep.json` if there are more trials than `before`; raises RunFolderError if they are not those of `before`."""
    was = before.get("trials", [])
    chosen = folder.to_json([{"trial": t.number, "program": t.program, "values": t.values} for t in trials])
    if differing := [new for new, old in zip(chosen, was, strict=False) if new != old]:
        raise RunFolderError(
            f"{path / SWEEP} has other values for trial {differing[0]['trial']}, so other versions of packages chose them; "
            "go on with those versions, or start a new sweep in another folder"
        )
    if len(chosen) > len(was) and processes.is_first():
        content = {"sweep": description, "versions": folder.versions(), "programs": programs, "trials": chosen}
        folder.write_json(path / SWEEP, content)


def write_table(path: Path, trials: Sequence[Trial], runs: Sequence[Path], about: Mapping[str, Any]) -> None:
    """Writes `table.json` and `table.csv`."""
    where = [str(run.relative_to(path)) for run in runs]
    folder.write_json(path / TABLE, {**about, "runs": where, "trials": list(trials)})
    text, table = io.StringIO(), table_of(trials)
    writer = csv.DictWriter(text, table[0])
    writer.writeheader()
    writer.writerows({k: "" if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()} for row in table)
    partial = path / f".{TABLE_CSV}.partial"
    with writing(path / TABLE_CSV):
        partial.write_text(text.getvalue(), newline="")
        os.replace(partial, path / TABLE_CSV)


def read_trials(rows: Sequence[Mapping[str, Any]]) -> tuple[Trial, ...]:
    """Trials from plain data."""

    def made(row: Mapping[str, Any]) -> Trial:
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in row["values"].items()}
        return Trial(**{**row, "values": values, "returns": tuple(math.nan if x is None else x for x in row["returns"])})

    return tuple(map(made, rows))
