"""Figures of a sweep: each field against the return, and parallel coordinates."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from msrl_jax.search.space import Axis
from msrl_jax.search.trials import Trial, value_in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_sweep(trials: Sequence[Trial], axes: Sequence[Axis], title: str) -> "Figure":
    """Draws a panel for each field, its values against the return, and parallel coordinates of all fields.

    Args:
      trials: trials with returns.
      axes: the swept fields.
      title: title of the figure.

    Returns:
      The figure.

    Raises:
      ValueError: if there is no trial.
    """
    import matplotlib.pyplot as plt  # a slow import, and only plots need it

    if not trials:
        raise ValueError("no trial of this sweep has a return, so there is nothing to draw")
    count = len(axes)
    figure = plt.figure(figsize=(max(7.0, 3.0 * count), 7.0), layout="constrained")
    parts: Any = figure.subfigures(2, 1)
    upper, lower = parts
    panels = upper.subplots(1, count, sharey=True, squeeze=False)[0]
    means = np.array([trial.mean for trial in trials])
    below = means - [trial.min for trial in trials], np.array([trial.max for trial in trials]) - means
    for panel, axis in zip(panels, axes, strict=True):
        at, labels = _positions(axis, trials)
        panel.errorbar(at, means, yerr=below, fmt="o", alpha=0.7, ms=4, lw=1)
        panel.set_xlabel(axis.field.replace("_", " "))
        panel.margins(x=0.15)
        panel.grid(alpha=0.3)
        if labels is not None:
            panel.set_xticks(range(len(labels)), labels)
        elif _is_log(axis):
            panel.set_xscale("log")
            _few_ticks(panel, at)
        elif axis.values.kind == "choice":
            panel.set_xticks(sorted({*at}))
    panels[0].set_ylabel("return")
    _parallel(lower, lower.subplots(), trials, axes, means)
    figure.suptitle(title)
    plt.close(figure)  # otherwise a notebook shows it twice
    return figure


def _few_ticks(panel: Any, at: np.ndarray) -> None:
    """Labels three places of a logarithmic axis, by one digit each: a narrow panel has no room for more."""
    ticks = sorted({float(f"{x:.1g}") for x in np.geomspace(at.min(), at.max(), 3)})
    panel.set_xticks(ticks, [f"{x:g}" for x in ticks])
    panel.set_xticks([], minor=True)


def _is_log(axis: Axis) -> bool:
    """Whether an axis of the figure is logarithmic: that of a log-uniform field, or of options that span two decades."""
    numbers = axis.values.numbers
    return axis.is_log or (axis.values.kind == "choice" and min(numbers) > 0 and max(numbers) >= 100 * min(numbers))


def _positions(axis: Axis, trials: Sequence[Trial]) -> tuple[np.ndarray, list[str] | None]:
    """The places of the trials' values on an axis, and the labels of options that are no numbers."""
    values = [trial.values[axis.field] for trial in trials]
    if all(isinstance(x, int | float) and not isinstance(x, bool) for x in axis.values.numbers):
        return np.array(values, float), None
    labels = list(dict.fromkeys(value_in_words(tuple(x) if isinstance(x, list) else x) for x in axis.values.numbers))
    return np.array([labels.index(value_in_words(x)) for x in values], float), labels


def _parallel(figure: Any, panel: Any, trials: Sequence[Trial], axes: Sequence[Axis], means: np.ndarray) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    heights, ends = [], []
    for axis in axes:
        at, labels = _positions(axis, trials)
        ends.append([f"{x:.4g}" if labels is None else labels[int(x)] for x in (float(at.min()), float(at.max()))])
        heights.append(_height(np.log(at) if labels is None and _is_log(axis) else at))
    ends.append([f"{x:.4g}" for x in (means.min(), means.max())])
    heights.append(_height(means))
    colors = ScalarMappable(Normalize(means.min(), means.max()), "viridis")
    for i in np.argsort(means):
        panel.plot([height[i] for height in heights], color=colors.to_rgba(means[i]), alpha=0.8)
    panel.set_xticks(range(len(axes) + 1), [*(axis.field.replace("_", " ") for axis in axes), "return"])
    panel.set_yticks([])
    panel.set_ylim(-0.12, 1.12)
    for i, (low, high) in enumerate(ends):
        panel.text(i, -0.03, low, ha="center", va="top")
        panel.text(i, 1.03, high, ha="center", va="bottom")
    panel.grid(axis="x", alpha=0.3)
    figure.colorbar(colors, ax=panel, label="return")


def _height(values: np.ndarray) -> np.ndarray:
    """Values from 0 to 1; 0.5 if all are equal."""
    spread = np.ptp(values)
    return (values - values.min()) / spread if spread else np.full(len(values), 0.5)
