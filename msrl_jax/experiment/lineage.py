"""The lineage of a population: who copied whom, and which hyper-parameters were in effect when."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from msrl_jax.experiment.evolve import PARENT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PREFIX = "pbt/"


class Copied(NamedTuple):
    """A member took over another one.

    Attributes:
      step: steps done by then.
      member: its number.
      parent: the number of the one that it copied.
    """

    step: int
    member: int
    parent: int


def copies(history: Mapping[str, np.ndarray], every: int) -> list[Copied]:
    """Lists what members copied."""
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


def plot_lineage(history: Mapping[str, np.ndarray], pbt: Mapping[str, Any], *, unit: str, title: str) -> "Figure":
    """Draws the hyper-parameters of all members against steps, with a line to each member from the one that it copied."""
    import matplotlib.pyplot as plt  # a slow import, and only plots need it

    fields = list(final_values(history))
    figure, panels = plt.subplots(
        len(fields), 1, squeeze=False, sharex=True, figsize=(7, 1 + 3 * len(fields)), layout="constrained"
    )
    ends = np.asarray(history["step"])
    begins = np.concatenate([[0], ends[:-1]])
    for panel, name in zip(panels[:, 0], fields, strict=True):
        values = history[f"{_PREFIX}{name}"]
        for member, column in enumerate(values.T):
            panel.hlines(column, begins, ends, color=f"C{member % 10}", lw=1.5)
        for step, member, parent in copies(history, pbt["every"]):
            after = int(np.searchsorted(begins, step))
            line = values[after - 1, parent], values[after, member]
            panel.plot([step, step], line, color=f"C{parent % 10}", lw=0.7, marker=".")
        panel.set_yscale("log" if pbt["search"][name].startswith("log") else "linear")
        panel.set_ylabel(name.replace("_", " "))
        panel.grid(alpha=0.3)
    panels[-1, 0].set_xlabel(unit)
    panels[0, 0].set_title(title)
    plt.close(figure)  # otherwise a notebook shows it twice
    return figure
