"""Curves of several seeds: their mean and its interval, and figures of them as SVG."""

import contextlib
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from msrl_jax.report.statistics import Estimate, estimate, mean
from msrl_jax.run.evaluation.history import last_known

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINTS = 50  # of a curve in a figure


def mean_curve(
    steps: Sequence[int] | np.ndarray, values: np.ndarray, *, spread: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Computes the mean over seeds, in about 50 groups of points.

    Args:
      steps: steps of each point, `[C]`.
      values: values `[C, S]`, nan where unknown; the last known value is used there.
      spread: whether to return the lowest and the highest value instead of the interval.

    Returns:
      Steps, the mean over the seeds, and the ends of its 95% interval, nan with one seed. `[N]` each
    """
    groups = np.array_split(np.arange(len(values)), min(_POINTS, max(len(values), 1)))
    means = np.array([[_known_mean(column) for column in values[rows].T] for rows in groups])
    known_means = last_known(means)  # where no episode ended, use the last mean
    points = [(rows[-1], row) for rows, row in zip(groups, known_means, strict=True) if not np.isnan(row).any()]
    estimates = [Estimate(row.mean(), row.min(), row.max()) if spread else estimate([row], mean) for _, row in points]
    middle, low, high = (np.array([getattr(interval, name) for interval in estimates]) for name in ("value", "low", "high"))
    return np.asarray(steps)[[row for row, _ in points]], middle, low, high


def _known_mean(values: np.ndarray) -> float:
    """Returns the mean of known values; nan if there are none."""
    known_values = values[~np.isnan(values)]
    return float(known_values.mean()) if len(known_values) else np.nan


def styled() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which figures look the same on every machine."""
    import matplotlib  # a slow import

    return matplotlib.rc_context({"svg.hashsalt": "msrl_jax", "svg.fonttype": "none", "font.size": 9})


def figure_of(panels: int) -> tuple["Figure", np.ndarray]:
    """Makes a figure with panels in one column; returns the figure and the panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 0.6 + 2.6 * panels), layout="constrained")
    return figure, figure.subplots(panels, squeeze=False)[:, 0]


def draw_curve(
    panel: "Axes", label: str, number: int, steps: np.ndarray, middle: np.ndarray, low: np.ndarray, high: np.ndarray
) -> None:
    """Draws a curve and its interval in the colour of its number; a single point is a dot."""
    panel.plot(steps, middle, color=f"C{number % 10}", label=label, lw=1.4, marker="o" if len(steps) == 1 else "")
    panel.fill_between(steps, low, high, color=f"C{number % 10}", alpha=0.2, lw=4 * (len(steps) == 1))


def finished(figure: "Figure") -> "Figure":
    """Adds grids and legends to a figure, and returns it."""
    for panel in figure.axes:
        panel.grid(alpha=0.3)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=8)
    return figure


def svg_of(figure: "Figure") -> str:
    """Returns a figure as SVG: the same text for the same data."""
    stream = io.StringIO()
    with styled():
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()


def inline(svg: str) -> str:
    """Returns an SVG file as an element of a page."""
    return re.sub(r"^.*?(?=<svg)", "", svg, flags=re.DOTALL)
