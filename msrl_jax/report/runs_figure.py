"""Curves of one or several runs in one figure."""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from msrl_jax._files import as_path
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.report.curves import draw_curve, figure_of, finished, mean_curve, styled
from msrl_jax.run import Result
from msrl_jax.run.disk.folder import check_target
from msrl_jax.run.evaluation.history import in_words
from msrl_jax.run.outcome import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_CURVES = 10  # settings of one run; above this, one curve with a band from the lowest to the highest member
_X = {"steps": "step", "time": "seconds"}  # columns of the history


@entry
def plot_runs(
    runs: Result | str | os.PathLike | Sequence[Any] | Mapping[str, Any],
    path: str | os.PathLike | None = None,
    *,
    metrics: Sequence[str] = (),
    x: Literal["steps", "time"] = "steps",
) -> "Figure":
    """Draws a curve for each setting of each run, with a 95% interval over its seeds, and a panel for each environment.

    A population, or a run with more than 10 settings, is one curve: the mean, with a band from the lowest to the highest.

    Args:
      runs: one run or several, as results or as folders of runs; use a mapping to name them.
      path: file for the figure, `.pdf`, `.svg` or `.png`; None writes none.
      metrics: columns of the history, one panel per column and environment; the columns of returns and `rank_by` if empty.
      x: the x axis: steps, or seconds since the start of training.

    Returns:
      The figure; a notebook shows it if it is the value of a cell.

    Raises:
      ValueError: if `runs` is empty, two runs share a name, no run has a metric, or the file cannot be written.
      RunFolderError: if a folder holds no run.
    """
    if x not in _X:
        raise ValueError(f"x={x!r}: use {' or '.join(map(repr, _X))}")
    if path is not None:
        check_target("figure", as_path("path", path), (".pdf", ".svg", ".png"))
    outcomes = runs_by_name(runs)
    columns = shown_of(outcomes, metrics)
    if not columns:
        raise ValueError("these runs have no returns yet; choose columns of their histories with metrics=[...]")
    figure = curves_of(outcomes, columns, x)
    if path is not None:
        with styled():
            figure.savefig(path)
    return figure


def shown_of(outcomes: Mapping[str, Outcome], metrics: Sequence[str]) -> list[str]:
    """Returns the columns to draw: `metrics`, or the default ones; raises ValueError if no run has a column."""
    if metrics and isinstance(metrics, str):
        raise ValueError(f"metrics={metrics!r}: give a list of columns, [{metrics!r}]")
    for name in metrics:
        if not any(name in run.history for run in outcomes.values()):
            columns = sorted({column for run in outcomes.values() for column in run.history})
            raise ValueError(f"no run has the metric {name!r}; they have {', '.join(columns)}")
    return list(metrics) or usual(outcomes.values())


def runs_by_name(runs: Any) -> dict[str, Outcome]:
    """Returns the runs by name: the mapping's key, the folder's name (its path if ambiguous), or what was trained."""
    names = list(map(str, runs)) if isinstance(runs, Mapping) else []
    sources = runs.values() if isinstance(runs, Mapping) else [runs] if isinstance(runs, Outcome | str | os.PathLike) else runs
    results = [run if isinstance(run, Outcome) else Outcome.read(Path(run)) for run in sources]
    if not results:
        raise ValueError("no run was given; give a result or the folder of a run")
    if not names:
        folders = [run.folder for run in results if run.folder is not None]
        repeated = len({folder.name for folder in folders}) < len(folders)
        names = [what(run) if run.folder is None else str(run.folder) if repeated else run.folder.name for run in results]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two runs are named {twice[0]!r}; name each once, or give a mapping with a name for each")
    return dict(zip(names, results, strict=True))


def what(run: Outcome) -> str:
    """Describes a run briefly."""
    return "{algorithm} on {env}, seed {seed}".format(**run.description)


def usual(runs: Collection[Outcome]) -> list[str]:
    """Returns the columns that measure the quality of agents."""
    scores = dict.fromkeys(["return", *(run.rank_by for run in runs)])
    names = [f"{kind}_{score}" for score in scores for kind in ("episode", "eval")]
    return [name for name in [*names, "validation_loss"] if any(is_known(run.history.get(name)) for run in runs)]


def is_known(column: np.ndarray | None) -> bool:
    """Whether a column exists and has known values."""
    return column is not None and not np.isnan(column).all()


def environments_of(outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, Outcome]]:
    """Groups runs by environment, so that their returns have the same scale."""
    by_environment: dict[str, dict[str, Outcome]] = {}
    for name, run in outcomes.items():
        by_environment.setdefault(run.description["env"], {})[name] = run
    return by_environment


def curves_of(outcomes: Mapping[str, Outcome], metrics: Sequence[str], x: str = "steps") -> "Figure":
    """Draws a panel for each metric of each environment, with a curve for each run or each of its settings over seeds."""
    environments = environments_of(outcomes)
    panel_contents = [
        (metric, env, runs)
        for metric in metrics
        for env, runs in environments.items()
        if any(metric in run.history for run in runs.values())
    ]
    with styled():
        figure, panels = figure_of(len(panel_contents))
        for panel, (metric, env, runs) in zip(panels, panel_contents, strict=True):
            for number, group in enumerate(groups_of(runs, _MOST_CURVES)):
                if (points := _points(group, metric, _X[x])) is not None:
                    of_members = any(np.ndim(run.history.get(metric, 0)) > 1 or run.members == 1 for run, _ in group.parts)
                    words = [group.names, group.label * of_members, "lowest to highest" * (group.mixed and of_members)]
                    draw_curve(panel, ", ".join(filter(None, words)), number, *mean_curve(*points, spread=group.mixed))
            units = dict.fromkeys(run.unit for run in runs.values())
            panel.set(ylabel=metric.replace("_", " "), xlabel=" or ".join(units) if x == "steps" else "seconds")
            panel.set_title(env if len(environments) > 1 else "")
        return finished(figure)


class Group(NamedTuple):
    """Members shown as one curve: the seeds of one setting, from one or several runs, or all members of a population."""

    names: str  # of the runs
    label: str  # their setting; empty if no run has several
    parts: list[tuple[Outcome, list[int]]]  # each run, and its members
    mixed: bool  # whether they are more than the seeds of one setting, so that an interval would not show seed variance


def groups_of(outcomes: Mapping[str, Outcome], max_settings: int) -> list[Group]:
    """Groups the members of runs by setting. All members of a run are one group if it is a population, or has more than
    `max_settings` settings. Runs with the same seed, such as under two policies, are not pooled.
    """
    parts = [(name, run, *part) for name, run in outcomes.items() for part in _members_by_setting(run, max_settings)]
    several = [run for _, run, members, mixed in parts if not mixed and len(members) < run.members]
    varied = {field for run in several for field in run.settings[0]}
    groups: list[tuple[list[str], dict[str, Any], Group]] = []
    for name, run, members, mixed in parts:
        setting, seeds = _setting_of(run, members[0]), {run.settings[member]["seed"] for member in members}
        for names, group_setting, group in groups:
            group_seeds = {part.settings[member]["seed"] for part, group_members in group.parts for member in group_members}
            if group_setting == setting and not (mixed or group.mixed or seeds & group_seeds):
                names.append(name)
                group.parts.append((run, members))
                break
        else:
            label = mixed or in_words({field: value for field, value in setting.items() if field in varied})
            groups.append(([name], setting, Group(name, label, [(run, members)], bool(mixed))))
    return [group._replace(names=_join_names(names)) for names, _, group in groups]


def _members_by_setting(run: Outcome, max_settings: int) -> list[tuple[list[int], str]]:
    """Returns the members of each setting of a run, with a description if they are more than the seeds of one setting."""
    members_by_setting: dict[str, list[int]] = {}
    for member in range(run.members):
        members_by_setting.setdefault(in_words(_setting_of(run, member)), []).append(member)
    if run.description["pbt"] is not None:
        return [(list(range(run.members)), f"population of {run.members}")]
    if len(members_by_setting) > max_settings:
        return [(list(range(run.members)), f"{len(members_by_setting)} settings")]
    return [(members, "") for members in members_by_setting.values()]


def _setting_of(run: Outcome, member: int) -> dict[str, Any]:
    """Returns everything that determines the computation of a member, except its seed."""
    about, member_setting = run.description, {name: value for name, value in run.settings[member].items() if name != "seed"}
    shared = {name: about.get(name) for name in ("algorithm", "env", "env_params", "total_steps", "rank_by", "guard", "data")}
    return shared | about["config"] | member_setting


def _join_names(names: list[str]) -> str:
    return ", ".join(names if len(names) < 5 else [*names[:3], f"{len(names) - 3} more"])


def _points(group: Group, metric: str, x: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the x positions `[C]` and values `[C, S]` of a metric for the members of a group; None if nothing is known.

    Runs record metrics at different steps, so several runs are interpolated at the steps of the run with the fewest.
    """
    parts = []
    for run, members in group.parts:
        column = run.history.get(metric)
        if column is None or not is_known(column):
            continue
        if column.ndim == 1 and run.members > 1:  # a metric of the whole run, such as its steps per second
            if 0 not in members:
                continue
            members = [0]
        values = np.reshape(column, (len(column), -1))[:, members]
        is_known_row = ~np.isnan(values).all(1)  # most rows have no evaluation
        parts.append((run.history[x][is_known_row], values[is_known_row]))
    if len(parts) < 2:
        return parts[0] if parts else None
    positions = min((run_positions for run_positions, _ in parts), key=len)
    positions = positions[positions <= min(run_positions[-1] for run_positions, _ in parts)]
    return positions, np.stack(
        [_interpolate(positions, run_positions, column) for run_positions, values in parts for column in values.T], axis=1
    )


def _interpolate(positions: np.ndarray, known_positions: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Interpolates the values of a member at other points; nan before the first known value, and if none is known."""
    is_value = ~np.isnan(values)
    return (
        np.interp(positions, known_positions[is_value], values[is_value], left=np.nan)
        if is_value.any()
        else np.full(len(positions), np.nan)
    )
