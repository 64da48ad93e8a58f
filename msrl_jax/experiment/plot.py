"""Figures of a run's history, and the lineage of a population: who copied whom, and which hyper-parameters were in effect."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from msrl_jax.experiment.evolve import PARENT
from msrl_jax.experiment.history import last_known, team_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LINES = 10
"""With more settings than this, a figure shows the mean over all of them."""

_PREFIX = "pbt/"


class Copied(NamedTuple):
    """A member took over another one, its `parent`, after a number of steps."""

    step: int
    member: int
    parent: int


def copies(history: Mapping[str, np.ndarray], every: int) -> list[Copied]:
    """What members copied, in the order of time; an exploit at the very end has no chunk behind it, and is left out."""
    found = []
    begins = zip([0, *history["iteration"][:-1]], [0, *history["step"][:-1]], history[PARENT], strict=True)
    for iteration, step, parents in begins:
        if iteration and iteration % every == 0:
            found += [Copied(int(step), m, int(parent)) for m, parent in enumerate(parents) if int(parent) != m]
    return found


def final_values(history: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The hyper-parameters in effect in the last chunk, `[M]` by field; empty if no population was trained."""
    columns = {name.removeprefix(_PREFIX): x for name, x in history.items() if name.startswith(_PREFIX) and name != PARENT}
    return {name: column[-1] for name, column in columns.items() if len(column)}


def _figure(names: Sequence[str], unit: str, title: str) -> tuple["Figure", Any]:
    """A figure with a panel for each name."""
    import matplotlib.pyplot as plt  # a slow import, and only plots need it

    size = (7, 1 + 3 * len(names))
    figure, panels = plt.subplots(len(names), 1, squeeze=False, sharex=True, figsize=size, layout="constrained")
    for panel, name in zip(panels[:, 0], names, strict=True):
        panel.set_ylabel(name.replace("_", " "))
        panel.grid(alpha=0.3)
    panels[-1, 0].set_xlabel(unit)
    panels[0, 0].set_title(title)
    plt.close(figure)  # otherwise a notebook shows it twice
    return figure, panels[:, 0]


def plot_history(
    history: Mapping[str, np.ndarray], metrics: Sequence[str], groups: Mapping[str, Sequence[int]], *, unit: str, title: str
) -> "Figure":
    """Draws columns of a history against steps: the mean over the members, and their range; up to `MOST_LINES` groups of
    members have a line each, by its label."""
    if missing := [name for name in metrics if name not in history]:
        raise ValueError(f"the history has no column {missing[0]!r}; it has {sorted(history)}")
    figure, panels = _figure(metrics, unit, title)
    for panel, name in zip(panels, metrics, strict=True):
        column = history[name]
        if 0 < len(groups) <= MOST_LINES and column.ndim > 1:
            for label, members in groups.items():
                _draw(panel, history["step"], column[:, list(members)], label, "-")
        else:
            _draw(panel, history["step"], column, name.replace("_", " "), "-")
            for other in history:
                if (team := team_of(other, name)) and name == "episode_return":
                    _draw(panel, history["step"], history[other], f"team {team}", "-")
            if (greedy := name.replace("episode_", "eval_")) in history and name.startswith("episode_return"):
                _draw(panel, history["step"], history[greedy], "greedy evaluation", "o")
        panel.legend()
    return figure


def _draw(panel: Any, steps: np.ndarray, column: np.ndarray, label: str, style: str) -> None:
    known = ~np.isnan(column).all(axis=tuple(range(1, column.ndim)))
    steps, column = steps[known], last_known(column)[known]  # of members of which no episode has ended in a chunk
    known = ~np.isnan(column).any(axis=tuple(range(1, column.ndim)))
    steps, column = steps[known], column[known]
    mean = column.mean(axis=1) if column.ndim > 1 else column
    (line,) = panel.plot(steps, mean, style, label=label)
    if column.ndim > 1:
        panel.fill_between(steps, column.min(axis=1), column.max(axis=1), color=line.get_color(), alpha=0.2, lw=0)


def plot_lineage(history: Mapping[str, np.ndarray], pbt: Any, *, unit: str, title: str) -> "Figure":
    """Draws the hyper-parameters of all members against steps, with a line to each member from the one that it copied."""
    fields = list(final_values(history))
    figure, panels = _figure(fields, unit, title)
    ends = np.asarray(history["step"])
    begins = np.concatenate([[0], ends[:-1]])
    for panel, name in zip(panels, fields, strict=True):
        values = history[f"{_PREFIX}{name}"]
        for member, column in enumerate(values.T):
            panel.hlines(column, begins, ends, color=f"C{member % 10}", lw=1.5)
        for step, member, parent in copies(history, pbt.every):
            after = int(np.searchsorted(begins, step))
            line = values[after - 1, parent], values[after, member]
            panel.plot([step, step], line, color=f"C{parent % 10}", lw=0.7, marker=".")
        panel.set_yscale("log" if pbt.search[name].kind.startswith("log") else "linear")
    return figure
