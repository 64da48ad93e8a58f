"""`SweepResult`: the table of a sweep, its figures, and access to its runs."""

import dataclasses
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from msrl_jax import algorithms
from msrl_jax.envs import Environment
from msrl_jax.envs.param_distributions import Distribution
from msrl_jax.fragments.support.naming import check_trust
from msrl_jax.fragments.support.terminal import table
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.registry import files
from msrl_jax.run.disk import folder
from msrl_jax.run.evaluation.history import decimals, value_in_words
from msrl_jax.run.experiment.trust import algorithm_of, code_of
from msrl_jax.run.outputs.summary import saved
from msrl_jax.run.result import Result
from msrl_jax.search.space import Axis, Trial, by_return, mean
from msrl_jax.search.trial_scheduler import SWEEP

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE, TABLE_CSV = "table.json", "table.csv"
SHOWN = 20  # rows of a printed table; the files have all rows


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SweepResult:
    """The result of a sweep.

    Attributes:
      trials: all trials with their results, by number.
      runs: the runs that trained the trials: their folders, or their results if the sweep has no folder.
      status: "finished", or "interrupted" by a signal or the time limit.
      stop_reason: why the sweep was interrupted, as in `Result`.
      description: what the sweep computes, as plain data.
      env: the environment, or its name, if given.
      objects: fields of the config that were given as objects, or as names in modules.
      folder: the sweep's folder, if it has one.
      trust: whether the code that the folder names may run.
    """

    trials: tuple[Trial, ...]
    runs: tuple[Path | Result, ...]
    status: Literal["finished", "interrupted"]
    stop_reason: str
    description: Mapping[str, Any]
    env: Environment | str | None = None
    objects: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    folder: Path | None = None
    trust: bool = False

    @property
    def interrupted(self) -> bool:
        """Whether a signal (such as Ctrl-C) or the time limit ended the sweep."""
        return self.status == "interrupted"

    @property
    def best(self) -> Trial:
        """The trial with rank 1.

        Raises:
          ValueError: if no trial has a return, because all diverged or none was trained.
        """
        best = min(self.trials, key=by_return) if self.trials else None
        if best is None or math.isnan(best.mean):
            raise ValueError("no trial of this sweep has a return: their parameters are not finite, or none was trained")
        return best

    @entry
    def run(self, trial: Trial | int | None = None) -> Result:
        """Returns the run that trained a trial; its members from `trial.member` on are the trial's seeds.

        Args:
          trial: the trial or its number; the best one if None.

        Returns:
          The result of the run, which may also contain members of other trials.

        Raises:
          ValueError: if the trial was not trained.
        """
        chosen = self.trial(trial)
        if chosen.run is None:
            raise ValueError(f"{chosen} was not trained: {self.stop_reason} ended the sweep; continue it with resume=True")
        found = self.runs[chosen.run]
        return found if isinstance(found, Result) else Result.load(found, env=self.env, trust=self.trust, **self.objects)

    def trial(self, trial: Trial | int | None = None) -> Trial:
        """Returns a trial by its number; the best one if None."""
        if isinstance(trial, Trial):
            return trial
        if trial is not None and trial not in range(len(self.trials)):
            raise ValueError(f"trial={trial!r}: this sweep has the trials 0 to {len(self.trials) - 1}")
        return self.best if trial is None else self.trials[trial]

    def table(self) -> list[dict[str, Any]]:
        """Returns a row for each trial: its values, its steps, the mean, minimum and maximum return of its seeds, its rank.

        For each metric of the environment, the row has the mean over the seeds, `METRIC_mean`.
        """
        return [
            {
                "trial": trial.number, "program": trial.program, **trial.values, "rung": trial.rung, "steps": trial.steps,
                "return_mean": (of := dataclasses.replace(trial, rank_by="return")).mean, "return_min": of.min,
                "return_max": of.max, **{f"{name}_mean": mean(trial.metrics.get(name, ())) for name in self._metrics},
                "rank": trial.rank,
            }
            for trial in self.trials
        ]  # fmt: skip

    @property
    def _metrics(self) -> list[str]:
        return list(dict.fromkeys(name for trial in self.trials for name in trial.metrics))

    def summary(self) -> dict[str, Any]:
        """Returns the sweep as plain data."""
        about = {name: self.description[name] for name in ("algorithm", "env", "policy", "method", "seeds", "total_steps")}
        ended = {"status": self.status} | ({"stop_reason": self.stop_reason} if self.stop_reason else {})
        best = None if math.isnan(min(self.trials, key=by_return).mean) else self.best.number
        return about | ended | {"best": best, "trials": self.table(), "folder": self.folder}

    def command(self, trial: Trial | int | None = None) -> str:
        """Returns the command line that trains a trial's setting, with its seeds, from the start.

        Its numbers are constants of the program, so results may differ from the sweep in the last bits.

        Args:
          trial: the trial or its number; the best one if None.

        Raises:
          ValueError: if the environment, a distribution of its parameters, or a data set cannot be written as text.
        """
        about, chosen = self.description, self.trial(trial)
        params: dict[str, str] | str | None = about["env_params"]
        objects = {"env": about["env_spec"] is None, "env_params": isinstance(params, str)}
        objects |= {name: isinstance(value, dict) for name, value in about["config"].items()}
        if nameless := [name for name, is_object in objects.items() if is_object]:
            raise ValueError(f"{nameless[0]} was given as an object, which a command line cannot hold; use train")
        algo = algorithm_of(about)
        check_trust(f"the sweep in {self.folder}", code_of({"algo": algo}), self.trust)
        options = {"algo": files.saved(about), "env": about["env_spec"]}
        options |= {"rank_by": chosen.rank_by} if chosen.rank_by != "return" else {}
        options |= {name: about[name] for name in ("policy", "total_steps", "seed", "seeds", "eval_episodes")}
        if isinstance(params, dict):
            options["env_params"] = ",".join(f"{name}={text}" for name, text in params.items())
        usual, values = folder.to_json(algorithms.get(algo)()), about["config"] | folder.to_json(chosen.values)
        words = ["msrl-jax", "train"]
        for name, value in (*options.items(), *(x for x in values.items() if x[1] != usual.get(x[0]))):
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words += [f"--{flag}", *(map(str, value) if isinstance(value, list) else [str(value)])]
        return shlex.join(words)

    def plot(self, path: str | os.PathLike | None = None) -> "Figure":
        """Draws a panel for each swept field, returns over its values, and parallel coordinates of all fields.

        Args:
          path: file for the figure, in the format of its suffix; None writes no file.

        Returns:
          The figure; a notebook shows it if it is the value of a cell.

        Raises:
          ValueError: if no trial has a return.
        """
        trials = [trial for trial in self.trials if not math.isnan(trial.mean)]
        if not trials:
            raise ValueError("no trial of this sweep has a return, so there is nothing to draw")
        axes = [
            Axis(field, Distribution(about["kind"], tuple(about["numbers"])), about["is_whole"])
            for field, about in self.description["fields"].items()
        ]
        return saved(_figure(trials, axes, f"{self.description['algorithm']} on {self.description['env']}"), path)

    def __repr__(self) -> str:
        about, seeds = self.description, self.description["seeds"]
        why = f"{self.status}: {self.stop_reason}" if self.stop_reason else self.status
        each = f" with {seeds} seeds each" if seeds > 1 else ""
        lines = [f"SweepResult: {about['algorithm']} on {about['env']}, {len(self.trials)} trials{each} ({why})"]
        order = sorted((t for t in self.trials if t.returns), key=by_return)
        lines += _table(order[:SHOWN], seeds) if order else []
        if len(order) > SHOWN:
            lines.append(f"  and {len(order) - SHOWN} more")
        if untrained := len(self.trials) - len(order):
            lines.append(f"  {untrained} trials were not trained")
        if self.folder is not None:
            lines.append(f"  saved in {self.folder}")
        return "\n".join(lines)

    @classmethod
    @entry
    def load(
        cls, path: str | os.PathLike, *, env: Environment | str | None = None, trust: bool = False, **objects: Any
    ) -> "SweepResult":
        """Loads a completed sweep from its folder.

        Args:
          path: the folder.
          env: the environment, if `sweep` got an environment object.
          trust: whether the code that the folder names may run, as in `Result.load`.
          **objects: fields of the config that were given to `sweep` as objects or as names in modules.

        Returns:
          The result, which loads its runs on demand.

        Raises:
          RunFolderError: a ValueError, if the folder holds no sweep, or a sweep that has not ended.
        """
        path = Path(path)
        about = folder.read_json(path / SWEEP, "sweep")["sweep"]
        ended = folder.read_json(path / TABLE, "status", "stop_reason", "runs", "trials")
        runs = tuple(path / run for run in ended["runs"])
        trials = tuple(map(_read_trial, ended["trials"]))
        return cls(trials, runs, ended["status"], ended["stop_reason"], about, env, objects, path, trust)


def _read_trial(row: Mapping[str, Any]) -> Trial:
    def numbers(values: Sequence[float | None]) -> tuple[float, ...]:
        return tuple(math.nan if x is None else x for x in values)

    values = {name: tuple(value) if isinstance(value, list) else value for name, value in row["values"].items()}
    metrics = {name: numbers(x) for name, x in row.get("metrics", {}).items()}
    return Trial(**{**row, "values": values, "returns": numbers(row["returns"]), "metrics": metrics})


def write_table(result: SweepResult, path: Path) -> None:
    """Writes `table.json` and `table.csv`."""
    about = {"status": result.status, "stop_reason": result.stop_reason}
    runs = [str(run.relative_to(path)) for run in result.runs if isinstance(run, Path)]
    folder.write_json(path / TABLE, {**about, "runs": runs, "trials": list(result.trials)})
    folder.write_csv(path / TABLE_CSV, result.table)


def _table(trials: Sequence[Trial], seeds: int) -> list[str]:
    means = [trial.mean for trial in trials if not math.isnan(trial.mean)]
    digits = decimals(max(means), max(means) - min(means)) if means else 0
    by = trials[0].rank_by
    head = ["rank", "trial", *trials[0].values, "steps", by, *(["least", "most"] if seeds > 1 else [])]
    cells = [
        [
            str(trial.rank), str(trial.number), *map(value_in_words, trial.values.values()), f"{trial.steps:,}",
            *(f"{x:.{digits}f}" for x in (trial.mean, *((trial.min, trial.max) if seeds > 1 else ()))),
        ]
        for trial in trials
    ]  # fmt: skip
    return table(head, cells, indent=2)


def _figure(trials: Sequence[Trial], axes: Sequence[Axis], title: str) -> "Figure":
    import matplotlib.pyplot as plt  # a slow import, and only plots need it
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    figure = plt.figure(figsize=(max(7.0, 3.0 * len(axes)), 7.0), layout="constrained")
    parts: Any = figure.subfigures(2, 1)
    panels, lower = parts[0].subplots(1, len(axes), sharey=True, squeeze=False)[0], parts[1].subplots()
    means = np.array([trial.mean for trial in trials])
    around = means - [trial.min for trial in trials], np.array([trial.max for trial in trials]) - means
    coordinates = []  # per parallel axis: the name, the heights of all trials, and the text at both ends
    for panel, axis in zip(panels, axes, strict=True):
        at, labels = _positions(axis, trials)
        panel.errorbar(at, means, yerr=around, fmt="o", alpha=0.7, ms=4, lw=1)
        panel.set_xlabel(axis.field.replace("_", " "))
        panel.margins(x=0.15)
        panel.grid(alpha=0.3)
        numbers, is_choice = axis.values.numbers, axis.values.kind == "choice"
        # Options that span two decades also get a logarithmic axis.
        is_log = labels is None and (axis.is_log or (is_choice and min(numbers) > 0 and max(numbers) >= 100 * min(numbers)))
        if labels is not None:
            panel.set_xticks(range(len(labels)), labels)
        elif is_log:
            panel.set_xscale("log")
            # A narrow panel has room for only three ticks with one digit each.
            ticks = sorted({float(f"{x:.1g}") for x in np.geomspace(at.min(), at.max(), 3)})
            panel.set_xticks(ticks, [f"{x:g}" for x in ticks])
            panel.set_xticks([], minor=True)
        elif is_choice:
            panel.set_xticks(sorted({*at}))
        ends = [f"{x:.4g}" if labels is None else labels[int(x)] for x in (at.min(), at.max())]
        coordinates.append((axis.field.replace("_", " "), _height(np.log(at) if is_log else at), ends))
    by = trials[0].rank_by.replace("_", " ")
    panels[0].set_ylabel(by)
    coordinates.append((by, _height(means), [f"{x:.4g}" for x in (means.min(), means.max())]))
    colors = ScalarMappable(Normalize(means.min(), means.max()), "viridis")
    for i in np.argsort(means):
        lower.plot([heights[i] for _, heights, _ in coordinates], color=colors.to_rgba(means[i]), alpha=0.8)
    for i, (_, _, (low, high)) in enumerate(coordinates):
        lower.text(i, -0.03, low, ha="center", va="top")
        lower.text(i, 1.03, high, ha="center", va="bottom")
    lower.set_xticks(range(len(coordinates)), [name for name, _, _ in coordinates])
    lower.set_yticks([])
    lower.set_ylim(-0.12, 1.12)
    lower.grid(axis="x", alpha=0.3)
    parts[1].colorbar(colors, ax=lower, label=by)
    figure.suptitle(title)
    plt.close(figure)  # otherwise a notebook shows it twice
    return figure


def _positions(axis: Axis, trials: Sequence[Trial]) -> tuple[np.ndarray, list[str] | None]:
    """Returns the positions of the trials' values on an axis, and the labels of options that are not numbers."""
    values = [trial.values[axis.field] for trial in trials]
    if all(isinstance(x, int | float) and not isinstance(x, bool) for x in axis.values.numbers):
        return np.array(values, float), None
    labels = list(dict.fromkeys(value_in_words(tuple(x) if isinstance(x, list) else x) for x in axis.values.numbers))
    return np.array([labels.index(value_in_words(x)) for x in values], float), labels


def _height(values: np.ndarray) -> np.ndarray:
    """Rescales values to [0, 1]; 0.5 if all are equal."""
    spread = np.ptp(values)
    return (values - values.min()) / spread if spread else np.full(len(values), 0.5)
