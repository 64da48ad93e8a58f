"""Figures of a run's history."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from msrl_jax.experiment.history import last_known, team_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MOST_LINES = 10
"""With more settings than this, a figure shows the mean over all of them."""


def plot_history(
    history: Mapping[str, np.ndarray],
    metrics: Sequence[str],
    *,
    unit: str,
    title: str,
    groups: Mapping[str, Sequence[int]] | None = None,
) -> "Figure":
    """Draws columns of a history against steps: the mean over the members, and their range."""
    import matplotlib.pyplot as plt  # a slow import, and only plots need it

    if missing := [name for name in metrics if name not in history]:
        raise ValueError(f"the history has no column {missing[0]!r}; it has {sorted(history)}")
    figure, panels = plt.subplots(
        len(metrics), 1, squeeze=False, sharex=True, figsize=(7, 1 + 3 * len(metrics)), layout="constrained"
    )
    lines = groups or {}
    for panel, name in zip(panels[:, 0], metrics, strict=True):
        if 0 < len(lines) <= MOST_LINES:
            for label, members in lines.items():
                _draw(panel, history["step"], history[name][:, list(members)], label, "-")
            _finish(panel, name)
            continue
        _draw(panel, history["step"], history[name], name.replace("_", " "), "-")
        for column in history:
            if (team := team_of(column, name)) and name == "episode_return":
                _draw(panel, history["step"], history[column], f"team {team}", "-")
        if (greedy := name.replace("episode_", "eval_")) in history and name.startswith("episode_return"):
            _draw(panel, history["step"], history[greedy], "greedy evaluation", "o")
        _finish(panel, name)
    panels[-1, 0].set_xlabel(unit)
    panels[0, 0].set_title(title)
    plt.close(figure)  # otherwise a notebook shows it twice
    return figure


def _finish(panel: Any, name: str) -> None:
    panel.set_ylabel(name.replace("_", " "))
    panel.grid(alpha=0.3)
    panel.legend()


def _draw(panel: Any, steps: np.ndarray, column: np.ndarray, label: str, style: str) -> None:
    known = ~np.isnan(column).all(axis=tuple(range(1, column.ndim)))
    steps, column = steps[known], last_known(column)[known]  # of members of which no episode has ended in a chunk
    known = ~np.isnan(column).any(axis=tuple(range(1, column.ndim)))
    steps, column = steps[known], column[known]
    mean = column.mean(axis=1) if column.ndim > 1 else column
    (line,) = panel.plot(steps, mean, style, label=label)
    if column.ndim > 1:
        panel.fill_between(steps, column.min(axis=1), column.max(axis=1), color=line.get_color(), alpha=0.2, lw=0)
