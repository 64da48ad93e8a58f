"""`SweepResult`: the table of a sweep, and access to its runs."""

import dataclasses
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msrl_jax import algorithms
from msrl_jax.envs import Environment
from msrl_jax.fragments.support.naming import check_trust
from msrl_jax.fragments.support.terminal import table
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.registry import files
from msrl_jax.run.disk import folder
from msrl_jax.run.evaluation.history import decimals, value_in_words
from msrl_jax.run.experiment.trust import algorithm_of, code_of
from msrl_jax.run.result import Result
from msrl_jax.search.space import Trial, by_return, mean_objective
from msrl_jax.search.trial_scheduler import SWEEP

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
        trained_trial = self.trial(trial)
        if trained_trial.run is None:
            raise ValueError(
                f"{trained_trial} was not trained: {self.stop_reason} ended the sweep; continue it with resume=True"
            )
        run = self.runs[trained_trial.run]
        return run if isinstance(run, Result) else Result.load(run, env=self.env, trust=self.trust, **self.objects)

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
                "trial": trial.number,
                "program": trial.program,
                **trial.values,
                "rung": trial.rung,
                "steps": trial.steps,
                "return_mean": (by_return_trial := dataclasses.replace(trial, rank_by="return")).mean,
                "return_min": by_return_trial.min,
                "return_max": by_return_trial.max,
                **{f"{name}_mean": mean_objective(trial.metrics.get(name, ())) for name in self._metrics},
                "rank": trial.rank,
            }
            for trial in self.trials
        ]

    @property
    def _metrics(self) -> list[str]:
        return list(dict.fromkeys(name for trial in self.trials for name in trial.metrics))

    def summary(self) -> dict[str, Any]:
        """Returns the sweep as plain data."""
        about = {name: self.description[name] for name in ("algorithm", "env", "policy", "method", "seeds", "total_steps")}
        status = {"status": self.status} | ({"stop_reason": self.stop_reason} if self.stop_reason else {})
        best = None if math.isnan(min(self.trials, key=by_return).mean) else self.best.number
        return about | status | {"best": best, "trials": self.table(), "folder": self.folder}

    def command(self, trial: Trial | int | None = None) -> str:
        """Returns the command line that trains a trial's setting, with its seeds, from the start.

        Its numbers are constants of the program, so results may differ from the sweep in the last bits.

        Args:
          trial: the trial or its number; the best one if None.

        Raises:
          ValueError: if the environment, a distribution of its parameters, or a data set cannot be written as text.
        """
        about, chosen_trial = self.description, self.trial(trial)
        params: dict[str, str] | str | None = about["env_params"]
        objects = {"env": about["env_spec"] is None, "env_params": isinstance(params, str)}
        objects |= {name: isinstance(value, dict) for name, value in about["config"].items()}
        if nameless := [name for name, is_object in objects.items() if is_object]:
            raise ValueError(f"{nameless[0]} was given as an object, which a command line cannot hold; use train")
        algo = algorithm_of(about)
        check_trust(f"the sweep in {self.folder}", code_of({"algo": algo}), self.trust)
        options = {"algo": files.saved(about), "env": about["env_spec"]}
        options |= {"rank_by": chosen_trial.rank_by} if chosen_trial.rank_by != "return" else {}
        options |= {name: about[name] for name in ("policy", "total_steps", "seed", "seeds", "eval_episodes")}
        if isinstance(params, dict):
            options["env_params"] = ",".join(f"{name}={text}" for name, text in params.items())
        defaults, values = folder.to_json(algorithms.get(algo)()), about["config"] | folder.to_json(chosen_trial.values)
        words = ["msrl-jax", "train"]
        for name, value in (*options.items(), *(item for item in values.items() if item[1] != defaults.get(item[0]))):
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words += [f"--{flag}", *(map(str, value) if isinstance(value, list) else [str(value)])]
        return shlex.join(words)

    def __repr__(self) -> str:
        about, seeds = self.description, self.description["seeds"]
        ending = f"{self.status}: {self.stop_reason}" if self.stop_reason else self.status
        seeds_text = f" with {seeds} seeds each" if seeds > 1 else ""
        lines = [f"SweepResult: {about['algorithm']} on {about['env']}, {len(self.trials)} trials{seeds_text} ({ending})"]
        order = sorted((t for t in self.trials if t.returns), key=by_return)
        lines += _format_table(order[:SHOWN], seeds) if order else []
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
        saved_table = folder.read_json(path / TABLE, "status", "stop_reason", "runs", "trials")
        runs = tuple(path / run for run in saved_table["runs"])
        trials = tuple(map(_read_trial, saved_table["trials"]))
        return cls(trials, runs, saved_table["status"], saved_table["stop_reason"], about, env, objects, path, trust)


def _read_trial(row: Mapping[str, Any]) -> Trial:
    def numbers(values: Sequence[float | None]) -> tuple[float, ...]:
        return tuple(math.nan if value is None else value for value in values)

    values = {name: tuple(value) if isinstance(value, list) else value for name, value in row["values"].items()}
    metrics = {name: numbers(scores) for name, scores in row.get("metrics", {}).items()}
    return Trial(**{**row, "values": values, "returns": numbers(row["returns"]), "metrics": metrics})


def write_sweep_table(result: SweepResult, path: Path) -> None:
    """Writes `table.json` and `table.csv`."""
    about = {"status": result.status, "stop_reason": result.stop_reason}
    runs = [str(run.relative_to(path)) for run in result.runs if isinstance(run, Path)]
    folder.write_json(path / TABLE, {**about, "runs": runs, "trials": list(result.trials)})
    folder.write_csv(path / TABLE_CSV, result.table)


def _format_table(trials: Sequence[Trial], seeds: int) -> list[str]:
    means = [trial.mean for trial in trials if not math.isnan(trial.mean)]
    digits = decimals(max(means), max(means) - min(means)) if means else 0
    score_name = trials[0].rank_by
    head = ["rank", "trial", *trials[0].values, "steps", score_name, *(["least", "most"] if seeds > 1 else [])]
    cells = [
        [
            str(trial.rank),
            str(trial.number),
            *map(value_in_words, trial.values.values()),
            f"{trial.steps:,}",
            *(f"{score:.{digits}f}" for score in (trial.mean, *((trial.min, trial.max) if seeds > 1 else ()))),
        ]
        for trial in trials
    ]
    return table(head, cells, indent=2)
