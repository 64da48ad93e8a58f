"""A sweep on disk: its folder has the trials from the start, a run's folder for each run, and the table at the end.

    sweep.json   what the sweep computes, its programs, and its trials
    stage-S/program-P/batch-B/   the folder of a run
    table.json   what became of every trial; table.csv holds the same
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
from msrl_jax.search.sw_trials import Trial
from msrl_jax.training import folder, processes
from msrl_jax.training.folder import RunFolderError

SWEEP, TABLE, TABLE_CSV = "sweep.json", "table.json", "table.csv"

_FREE = ("policy", "members_at_once")
"""What may be given anew to a sweep that goes on, or left out."""


def open_sweep(path: Path, spec: Mapping[str, Any], resume: bool) -> dict[str, Any]:
    """Reads the sweep in a folder that goes on.

    Args:
      path: the folder.
      spec: what the sweep computes, as plain data.
      resume: whether a sweep in the folder goes on.

    Returns:
      The content of `sweep.json`; empty if the folder holds no sweep.

    Raises:
      RunFolderError: if the folder holds another sweep, a run, or a sweep that should not go on.
    """
    if not (path / SWEEP).exists():
        folder.check_free(path)
        return {}
    if not resume:
        raise RunFolderError(
            f"the folder {path} already holds a sweep; go on with it (resume=True, or --resume), name another folder, or "
            "delete it first"
        )
    saved = folder.read_json(path / SWEEP, "sweep", "programs", "trials")
    check_same(path, saved["sweep"], folder.to_json(spec))
    return saved


def write_sweep(
    path: Path,
    spec: Mapping[str, Any],
    programs: Sequence[Mapping[str, Any]],
    trials: Sequence[Trial],
    saved: Mapping[str, Any],
) -> None:
    """Writes `sweep.json`.

    Args:
      path: the folder.
      spec: what the sweep computes, as plain data.
      programs: its programs.
      trials: its trials so far.
      saved: what the file holds, of a sweep that goes on.

    Raises:
      RunFolderError: if the trials are not those of the file, because another version of a package chose them.
    """
    chosen = folder.to_json([{"trial": t.number, "program": t.program, "values": t.values} for t in trials])
    if differing := [t for t, before in zip(chosen, saved.get("trials", []), strict=False) if t != before]:
        raise RunFolderError(
            f"{path / SWEEP} has other values for trial {differing[0]['trial']}, so other versions of packages chose them; "
            "go on with those versions, or start a new sweep in another folder"
        )
    if len(chosen) > len(saved.get("trials", [])) and processes.is_first():
        content = {"sweep": spec, "versions": folder.versions(), "programs": programs, "trials": chosen}
        folder.write_json(path / SWEEP, content)


def check_same(path: Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises RunFolderError if a sweep computes something else than that of a folder; names the first difference."""
    pairs = [(name, was.get(name), now.get(name)) for name in {**was, **now} if name not in (*_FREE, "fields", "config")]
    for part in ("fields", "config"):
        both = {**was[part], **now[part]}
        pairs += [(name, was[part].get(name, "a constant"), now[part].get(name, "a constant")) for name in both]
    asked = now["members_at_once"]
    if asked is not None:
        pairs.append(("members_at_once", was["members_at_once"], asked))
    for name, before, value in pairs:
        if before != value:
            raise RunFolderError(
                f"the sweep in {path} has {name}={before}, and cannot go on with {name}={value}; give the same, or start a new "
                "sweep in another folder"
            )


def rows(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """The table of a sweep as plain data, a row for each trial."""
    return [
        {
            "trial": trial.number, "program": trial.program, **trial.values, "rung": trial.rung, "steps": trial.steps,
            "return_mean": trial.mean, "return_min": trial.min, "return_max": trial.max, "rank": trial.rank,
        }
        for trial in trials
    ]  # fmt: skip


def write_table(path: Path, trials: Sequence[Trial], runs: Sequence[Path], about: Mapping[str, Any]) -> None:
    """Writes `table.json` and `table.csv`."""
    where = [str(run.relative_to(path)) for run in runs]
    folder.write_json(path / TABLE, {**about, "runs": where, "trials": list(trials)})
    text, table = io.StringIO(), rows(trials)
    writer = csv.DictWriter(text, table[0])
    writer.writeheader()
    writer.writerows({k: "" if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()} for row in table)
    beside = path / f".{TABLE_CSV}.partial"
    with writing(path / TABLE_CSV):
        beside.write_text(text.getvalue(), newline="")
        os.replace(beside, path / TABLE_CSV)


def read_trials(trials: Sequence[Mapping[str, Any]]) -> tuple[Trial, ...]:
    """Trials from plain data."""

    def made(row: Mapping[str, Any]) -> Trial:
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in row["values"].items()}
        returns = tuple(math.nan if x is None else x for x in row["returns"])
        return Trial(**{**row, "values": values, "returns": returns})

    return tuple(map(made, trials))
