"""`SweepResult`: the table of a sweep, its figures, and the way back to its runs."""

import dataclasses
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msrl_jax import algorithms
from msrl_jax._tables import table
from msrl_jax.envs import Environment
from msrl_jax.envs.distributions import Distribution
from msrl_jax.experiment import folder
from msrl_jax.experiment.history import decimals
from msrl_jax.experiment.result import Result
from msrl_jax.search import saved
from msrl_jax.search.space import Axis
from msrl_jax.search.trials import Trial, by_return, table_of, value_in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 20
"""Rows of a printed table; the files have all."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SweepResult:
    """The result of a sweep.

    Attributes:
      trials: every trial and what became of it, by number.
      runs: the runs that trained the trials: their folders, or their results if the sweep has no folder.
      status: "finished", or "interrupted" by a signal or the time limit.
      stop_reason: why the sweep was interrupted, as in `Result`.
      description: what the sweep computes, as plain data.
      env: the environment if it was given as an object.
      folder: the sweep's folder, if it has one.
    """

    trials: tuple[Trial, ...]
    runs: tuple[Path | Result, ...]
    status: Literal["finished", "interrupted"]
    stop_reason: str
    description: Mapping[str, Any]
    env: Environment | None = None
    folder: Path | None = None

    @property
    def interrupted(self) -> bool:
        """Whether a signal (such as Ctrl-C) or the time limit ended the sweep."""
        return self.status == "interrupted"

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The swept fields."""
        return tuple(
            Axis(field, Distribution(about["kind"], tuple(about["numbers"])), about["is_whole"])
            for field, about in self.description["fields"].items()
        )

    @property
    def best(self) -> Trial:
        """The trial with rank 1.

        Raises:
          ValueError: if no trial has a return: all diverged, or none was trained.
        """
        best = min(self.trials, key=by_return) if self.trials else None
        if best is None or math.isnan(best.mean):
            raise ValueError("no trial of this sweep has a return: their parameters are not finite, or none was trained")
        return best

    def run(self, trial: Trial | int | None = None) -> Result:
        """The run that trained a trial; its members from `trial.member` on are the trial's seeds.

        Args:
          trial: the trial or its number; the best one if None.

        Returns:
          The result of the run, which has the members of other trials, too.

        Raises:
          ValueError: if the trial was not trained.
        """
        chosen = self.trial(trial)
        if chosen.run is None:
            raise ValueError(f"{chosen} was not trained: {self.stop_reason} ended the sweep; go on with resume=True")
        found = self.runs[chosen.run]
        return found if isinstance(found, Result) else Result.load(found, env=self.env)

    def trial(self, trial: Trial | int | None = None) -> Trial:
        """A trial by its number; the best one if None."""
        if isinstance(trial, Trial):
            return trial
        if trial is not None and trial not in range(len(self.trials)):
            raise ValueError(f"trial={trial!r}: this sweep has the trials 0 to {len(self.trials) - 1}")
        return self.best if trial is None else self.trials[trial]

    def table(self) -> list[dict[str, Any]]:
        """A row for each trial: its values, its steps, the mean, minimum and maximum return of its seeds, its rank."""
        return table_of(self.trials)

    def summary(self) -> dict[str, Any]:
        """The sweep as plain data."""
        about = {name: self.description[name] for name in ("algorithm", "env", "policy", "method", "seeds", "total_steps")}
        ended = {"status": self.status} | ({"stop_reason": self.stop_reason} if self.stop_reason else {})
        best = None if math.isnan(min(self.trials, key=by_return).mean) else self.best.number
        return about | ended | {"best": best, "trials": self.table(), "folder": self.folder}

    def command(self, trial: Trial | int | None = None) -> str:
        """The command line that trains a trial's setting, with its seeds, from the start.

        Its numbers are constants of the program, so XLA may compute other last bits than in the sweep.

        Args:
          trial: the trial or its number; the best one if None.

        Raises:
          ValueError: if the environment, what its parameters are drawn from, or a data set has no text.
        """
        about, chosen = self.description, self.trial(trial)
        params: dict[str, str] | str | None = about["env_params"]
        nameless = [
            *(["env"] if about["env_spec"] is None else []),
            *(["env_params"] if isinstance(params, str) else []),
            *(name for name, value in about["config"].items() if isinstance(value, dict)),
        ]
        if nameless:
            raise ValueError(f"{nameless[0]} was given as an object, which a command line cannot name; use train")
        algo = about["algorithm"] if about["class"].startswith("msrl_jax.") else about["class"]
        words = ["msrl-jax", "train", "--algo", algo, "--env", about["env_spec"], "--policy", about["policy"]]
        words += ["--total-steps", str(about["total_steps"]), "--seed", str(about["seed"]), "--seeds", str(about["seeds"])]
        words += ["--eval-episodes", str(about["eval_episodes"])]
        values: dict[str, Any] = about["config"] | folder.to_json(chosen.values)
        if isinstance(params, dict):
            words += ["--env-params", ",".join(f"{name}={text}" for name, text in params.items())]
        usual = folder.to_json(algorithms.get(algo)())
        for name, value in values.items():
            if value != usual[name]:
                words += _flag(name.replace("_", "-"), value)
        return shlex.join(words)

    def plot(self, path: str | os.PathLike | None = None) -> "Figure":
        """Draws a panel for each swept field, its values against returns, and parallel coordinates of all fields.

        Args:
          path: file for the figure, in the format of its suffix; None writes no file.

        Returns:
          The figure; a notebook shows it if it is the value of a cell.

        Raises:
          ValueError: if no trial has a return.
        """
        from msrl_jax.search.plot import plot_sweep  # matplotlib is slow to import

        title = f"{self.description['algorithm']} on {self.description['env']}"
        figure = plot_sweep([t for t in self.trials if not math.isnan(t.mean)], self.axes, title)
        if path is not None:
            figure.savefig(path)
        return figure

    def __repr__(self) -> str:
        about, seeds = self.description, self.description["seeds"]
        why = f"{self.status}: {self.stop_reason}" if self.stop_reason else self.status
        each = f" with {seeds} seeds each" if seeds > 1 else ""
        lines = [f"SweepResult: {about['algorithm']} on {about['env']}, {len(self.trials)} trials{each} ({why})"]
        order = sorted((t for t in self.trials if t.returns), key=by_return)
        lines += _table(order[:SHOWN], seeds, indent=2) if order else []
        if hidden := len(order) - SHOWN:
            lines += [f"  and {hidden} more"] * (hidden > 0)
        if untrained := len(self.trials) - len(order):
            lines.append(f"  {untrained} trials were not trained")
        if self.folder is not None:
            lines.append(f"  saved in {self.folder}")
        return "\n".join(lines)

    @classmethod
    def load(cls, path: str | os.PathLike, *, env: Environment | None = None) -> "SweepResult":
        """Reads a sweep that has ended from its folder.

        Args:
          path: the folder.
          env: the environment, if `sweep` got an environment object.

        Returns:
          The result; its runs are read when they are asked for.

        Raises:
          RunFolderError: a ValueError, if the folder holds no sweep, or one that has not ended.
        """
        path = Path(path)
        about = folder.read_json(path / saved.SWEEP, "sweep")["sweep"]
        ended = folder.read_json(path / saved.TABLE, "status", "stop_reason", "runs", "trials")
        runs = tuple(path / run for run in ended["runs"])
        trials = saved.read_trials(ended["trials"])
        return cls(trials, runs, ended["status"], ended["stop_reason"], about, env, path)


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]


def _table(trials: Sequence[Trial], seeds: int, indent: int) -> list[str]:
    means = [trial.mean for trial in trials if not math.isnan(trial.mean)]
    digits = decimals(max(means), max(means) - min(means)) if means else 0
    head = ["rank", "trial", *trials[0].values, "steps", "return", *(["least", "most"] if seeds > 1 else [])]
    cells = [
        [
            str(trial.rank), str(trial.number), *map(value_in_words, trial.values.values()), f"{trial.steps:,}",
            *(f"{x:.{digits}f}" for x in (trial.mean, *((trial.min, trial.max) if seeds > 1 else ()))),
        ]
        for trial in trials
    ]  # fmt: skip
    return table(head, cells, indent)
