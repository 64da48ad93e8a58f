"""Figures of a run: curves of its history, and the lineage of a population."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from msrl_jax.fragments.support.checks import check_loaded
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.run.experiment.pbt import PARENT
from msrl_jax.run.outcome import Outcome
from msrl_jax.run.result import Result
from msrl_jax.run.summary import PREFIX, final_values, panels_of, plot_history

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@entry
def plot(result: Outcome, path: str | os.PathLike | None = None, *, metrics: Sequence[str] = ("episode_return",)) -> "Figure":
    """Plots columns of a run's history against steps (`Agent.unit`): the mean over the members, and their range.

    For up to ten settings of the config, each setting has one line, over its seeds.

    Args:
      result: the run.
      path: file for the figure, in the format of its suffix; None writes no file.
      metrics: names of the columns; panels of an `episode_return` also show the evaluations and the returns of the teams.

    Returns:
      The figure; a notebook displays it as the value of a cell.

    Raises:
      ValueError: if the history does not have a column.
    """
    check_loaded(result)
    return save_figure(plot_history(result, metrics), path)


@entry
def plot_lineage(result: Result, path: str | os.PathLike | None = None) -> "Figure":
    """Plots the hyperparameters of a trained population against steps, and which member copied which.

    Args:
      result: the run.
      path: as in `plot`.

    Returns:
      The figure, as in `plot`.

    Raises:
      ValueError: if the members of the run are independent, or the run has no chunk yet.
    """
    check_loaded(result)
    if result.experiment.pbt is None or not len(result.history["step"]):
        raise ValueError("this run has no lineage; train with pbt=msrl.PBT(...), for at least one chunk")
    history, pbt = result.history, result.experiment.pbt
    fields = list(final_values(history))
    figure, panels = panels_of(result, fields)
    ends = np.asarray(history["step"])
    begins = np.concatenate([[0], ends[:-1]])
    for panel, name in zip(panels, fields, strict=True):
        values = history[f"{PREFIX}{name}"]
        for member, column in enumerate(values.T):
            panel.hlines(column, begins, ends, color=f"C{member % 10}", lw=1.5)
        for step, member, parent in copies(history, pbt.every):
            chunk = int(np.searchsorted(begins, step))
            line = values[chunk - 1, parent], values[chunk, member]
            panel.plot([step, step], line, color=f"C{parent % 10}", lw=0.7, marker=".")
        panel.set_yscale("log" if pbt.search[name].kind.startswith("log") else "linear")
    return save_figure(figure, path)


def copies(history: Mapping[str, np.ndarray], every: int) -> list[tuple[int, int, int]]:
    """Lists the copies of members in order of time: the steps before the chunk, the member, and its parent."""
    copies_of_members = []
    begins = zip([0, *history["iteration"][:-1]], [0, *history["step"][:-1]], history[PARENT], strict=True)
    for iteration, step, parents in begins:
        if iteration and iteration % every == 0:
            copies_of_members += [(int(step), m, int(parent)) for m, parent in enumerate(parents) if int(parent) != m]
    return copies_of_members


def save_figure(figure: "Figure", path: str | os.PathLike | None) -> "Figure":
    """Returns the figure; writes it to the file if there is a path."""
    if path is not None:
        figure.savefig(path)
    return figure
