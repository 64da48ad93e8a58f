"""Curves of one or several runs in one figure."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from msrl_jax._checks import as_path
from msrl_jax._tracebacks import entry
from msrl_jax.experiment import Result
from msrl_jax.experiment.folder import check_target
from msrl_jax.experiment.history import in_words
from msrl_jax.experiment.outcome import Outcome
from msrl_jax.report.curves import draw, figure_of, finished, mean_curve, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_CURVES = 10  # of settings of one run; more are one curve
_X = {"steps": "step", "time": "seconds"}  # columns of the history


@entry
def plot_runs(
    runs: Result | str | os.PathLike | Sequence[Any] | Mapping[str, Any],
    path: str | os.PathLike | None = None,
    *,
    metrics: Sequence[str] = (),
    x: Literal["steps", "time"] = "steps",
) -> "Figure":
    """Draws the curves of runs, with 95% intervals over seeds.

    Args:
      runs: a run, or several: results, or folders of runs; a mapping gives them names.
      path: file for the figure, `.pdf`, `.svg` or `.png`; None writes none.
      metrics: columns of the history, a panel each; those of returns and of `rank_by` if empty.
      x: against steps, or against the seconds since the start of training.

    Returns:
      The figure; a notebook shows it if it is the value of a cell.

    Raises:
      ValueError: if there is no run, two have one name, no run has a metric, or the file cannot be written.
      RunFolderError: if a folder holds no run.
    """
    if x not in _X:
        raise ValueError(f"x={x!r}: use {' or '.join(map(repr, _X))}")
    if path is not None:
        check_target("figure", as_path("path", path), (".pdf", ".svg", ".png"))
    found = named(runs)
    shown = shown_of(found, metrics)
    if not shown:
        raise ValueError("no return of these runs is known yet; name columns of their histories, metrics=[...]")
    figure = curves_of(found, shown, x)
    if path is not None:
        with styled():
            figure.savefig(path)
    return figure


def shown_of(found: Mapping[str, Outcome], metrics: Sequence[str]) -> list[str]:
    """The columns to draw: those that are asked for, or the usual ones; raises ValueError if no run has one."""
    if metrics and isinstance(metrics, str):
        raise ValueError(f"metrics={metrics!r}: give a list of columns, [{metrics!r}]")
    for name in metrics:
        if not any(name in run.history for run in found.values()):
            known = sorted({column for run in found.values() for column in run.history})
            raise ValueError(f"no run has the metric {name!r}; they have {', '.join(known)}")
    return list(metrics) or usual(found.values())


def named(runs: Any) -> dict[str, Outcome]:
    """The runs by name: that of a mapping, of the folder (its path, if folders have one name), or what was trained."""
    names = list(map(str, runs)) if isinstance(runs, Mapping) else []
    given = runs.values() if isinstance(runs, Mapping) else [runs] if isinstance(runs, Outcome | str | os.PathLike) else runs
    results = [run if isinstance(run, Outcome) else Outcome.read(Path(run)) for run in given]
    if not results:
        raise ValueError("there is no run to write about; give a result or the folder of a run")
    if not names:
        folders = [run.folder for run in results if run.folder is not None]
        alike = len({folder.name for folder in folders}) < len(folders)
        names = [what(run) if run.folder is None else str(run.folder) if alike else run.folder.name for run in results]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two runs are named {twice[0]!r}; name each once, or give a mapping with a name for each")
    return dict(zip(names, results, strict=True))


def what(run: Outcome) -> str:
    """A run in a few words."""
    return "{algorithm} on {env}, seed {seed}".format(**run.description)


def usual(runs: Any) -> list[str]:
    """The columns that tell how good agents are."""
    scores = dict.fromkeys(["return", *(run.rank_by for run in runs)])
    wanted = [f"{kind}_{score}" for score in scores for kind in ("episode", "eval")]
    return [name for name in [*wanted, "validation_loss"] if any(is_known(run.history.get(name)) for run in runs)]


def is_known(column: Any) -> bool:
    """Whether there is a column, and not all of it is unknown."""
    return column is not None and not np.isnan(column).all()


def curves_of(found: Mapping[str, Outcome], metrics: Sequence[str], x: str = "steps") -> "Figure":
    """A panel for each metric, with a curve for each run, or for each of its settings over their seeds."""
    with styled():
        figure, panels = figure_of(len(metrics))
        for panel, metric in zip(panels, metrics, strict=True):
            number = 0
            for name, run in found.items():
                for label, members in _groups(run):
                    column = run.history.get(metric)
                    if column is None or not is_known(column):
                        continue
                    values = np.reshape(column, (len(column), -1))[:, members]
                    known = ~np.isnan(values).all(1)  # evaluations are few
                    curve = mean_curve(run.history[_X[x]][known], values[known])
                    draw(panel, ", ".join(filter(None, [name, label])), number, *curve)
                    number += 1
            panel.set(ylabel=metric.replace("_", " "))
        units = dict.fromkeys(run.unit for run in found.values())
        panels[-1].set(xlabel=" or ".join(units) if x == "steps" else "seconds")
        return finished(figure)


def _groups(run: Outcome) -> list[tuple[str, list[int]]]:
    """The members of each setting of a run, with its words."""
    groups: dict[str, list[int]] = {}
    for member, setting in enumerate(run.settings):
        groups.setdefault(in_words({name: x for name, x in setting.items() if name != "seed"}), []).append(member)
    several = 1 < len(groups) <= _MOST_CURVES and run.description["pbt"] is None
    return list(groups.items()) if several else [("", list(range(run.members)))]
