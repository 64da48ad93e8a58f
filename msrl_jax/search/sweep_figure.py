"""The figure of a sweep."""

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from msrl_jax.envs.param_distributions import ParamDistribution
from msrl_jax.fragments.support.checks import check_loaded
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.run.evaluation.history import value_in_words
from msrl_jax.run.outputs.figures import save_figure
from msrl_jax.search.space import Axis, Trial
from msrl_jax.search.sweep_result import SweepResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@entry
def plot_sweep(swept: SweepResult, path: str | os.PathLike | None = None) -> "Figure":
    """Plots a sweep: a panel for each swept field, returns over its values, and parallel coordinates of all fields.

    Args:
      swept: the sweep.
      path: file for the figure, in the format of its suffix; None writes no file.

    Returns:
      The figure; a notebook shows it if it is the value of a cell.

    Raises:
      ValueError: if no trial has a return.
    """
    check_loaded(swept, "SweepResult.load")
    trials = [trial for trial in swept.trials if not math.isnan(trial.mean)]
    if not trials:
        raise ValueError("no trial of this sweep has a return, so there is nothing to draw")
    axes = [
        Axis(field, ParamDistribution(about["kind"], tuple(about["numbers"])), about["is_whole"])
        for field, about in swept.description["fields"].items()
    ]
    return save_figure(_draw_figure(trials, axes, f"{swept.description['algorithm']} on {swept.description['env']}"), path)


def _draw_figure(trials: Sequence[Trial], axes: Sequence[Axis], title: str) -> "Figure":
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
        positions, labels = _positions(axis, trials)
        panel.errorbar(positions, means, yerr=around, fmt="o", alpha=0.7, ms=4, lw=1)
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
            ticks = sorted({float(f"{number:.1g}") for number in np.geomspace(positions.min(), positions.max(), 3)})
            panel.set_xticks(ticks, [f"{number:g}" for number in ticks])
            panel.set_xticks([], minor=True)
        elif is_choice:
            panel.set_xticks(sorted({*positions}))
        ends = [f"{number:.4g}" if labels is None else labels[int(number)] for number in (positions.min(), positions.max())]
        coordinates.append((axis.field.replace("_", " "), _rescale(np.log(positions) if is_log else positions), ends))
    score_name = trials[0].rank_by.replace("_", " ")
    panels[0].set_ylabel(score_name)
    coordinates.append((score_name, _rescale(means), [f"{number:.4g}" for number in (means.min(), means.max())]))
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
    parts[1].colorbar(colors, ax=lower, label=score_name)
    figure.suptitle(title)
    plt.close(figure)  # otherwise a notebook shows it twice
    return figure


def _positions(axis: Axis, trials: Sequence[Trial]) -> tuple[np.ndarray, list[str] | None]:
    """Returns the positions of the trials' values on an axis, and the labels of options that are not numbers."""
    values = [trial.values[axis.field] for trial in trials]
    if all(isinstance(option, int | float) and not isinstance(option, bool) for option in axis.values.numbers):
        return np.array(values, float), None
    labels = list(
        dict.fromkeys(value_in_words(tuple(option) if isinstance(option, list) else option) for option in axis.values.numbers)
    )
    return np.array([labels.index(value_in_words(option)) for option in values], float), labels


def _rescale(values: np.ndarray) -> np.ndarray:
    """Rescales values to [0, 1]; 0.5 if all are equal."""
    spread = np.ptp(values)
    return (values - values.min()) / spread if spread else np.full(len(values), 0.5)
