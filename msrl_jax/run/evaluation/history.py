"""Metrics on the host: one row per chunk of iterations, and the check for non-finite values.

In the shape descriptions of this package, `N` denotes the number of iterations of a chunk, `C` the number of chunks of a run,
and `M` the number of members (seeds) of a run; a run of one seed has no member dimension.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from msrl_jax.fragments.metrics import Mean

Row: TypeAlias = dict[str, float | np.ndarray]
HostMetrics: TypeAlias = Mapping[str, np.ndarray | Mean]

SKIPPED = "skipped_updates"  # the metric that counts dropped updates, with `guard="skip"`


def reduce_chunk(metrics: HostMetrics, *, finite: bool = False) -> Row:
    """Averages each metric of a chunk, `[N]` or `[N, M]`, in float64; for a `Mean`, iterations are weighted by their samples.

    `finite` (`guard="skip"`) ignores iterations in which a metric is non-finite, and sums the counts of dropped updates.
    """
    row = {}
    for name, value in metrics.items():
        if isinstance(value, Mean) or (finite and name != SKIPPED):
            row[name] = _sums(value, finite).mean(axis=0)
        else:
            reduced = (np.sum if finite else np.mean)(np.asarray(value, np.float64), axis=0)
            row[name] = reduced if np.ndim(reduced) else float(reduced)
    return row


def _sums(value: np.ndarray | Mean, finite: bool) -> Mean:
    """Converts a metric to sums and counts in float64; `finite` ignores non-finite entries."""
    sums = value if isinstance(value, Mean) else Mean(value, np.ones_like(value))
    total, count = (np.asarray(x, np.float64) for x in (sums.total, sums.count))
    fine = np.isfinite(total) if finite else True
    return Mean(np.where(fine, total, 0.0), np.where(fine, count, 0.0))


_EPISODES = 100  # the number of last episodes per member that measure its score during training


@dataclasses.dataclass(frozen=True)
class LastEpisodes:
    """The scores of the last episodes of each member, by the iteration in which they ended, independent of the chunk lengths.

    Each member has at most 100 entries, the newest last; shorter lists are padded with zeros at the front.
    """

    iterations: np.ndarray  # the iterations in which they ended. `[K]` or `[K, M]`
    total: np.ndarray  # the sums of their scores
    count: np.ndarray  # the numbers of episodes

    def add(self, start: int, scores: Mean | np.ndarray, *, finite: bool = False) -> "LastEpisodes":
        """Adds the metric of a chunk, `[N]` or `[N, M]`, after `start` iterations; `finite` is as in `reduce_chunk`."""
        sums = _sums(scores, finite)
        ends = np.full_like(sums.total, start + 1) + np.arange(len(sums.total)).reshape(-1, *[1] * (sums.total.ndim - 1))
        pairs = zip((self.iterations, self.total, self.count), (ends, sums.total, sums.count), strict=True)
        combined = LastEpisodes(*(np.concatenate([earlier.reshape(-1, *x.shape[1:]), x]) for earlier, x in pairs))
        later = np.cumsum(combined.count[::-1], axis=0)[::-1] - combined.count
        return combined._select((combined.count > 0) & (later < _EPISODES))

    def until(self, iteration: int) -> "LastEpisodes":
        """Returns the episodes that had ended after an iteration."""
        return self._select((self.count > 0) & (self.iterations <= iteration))

    def _select(self, mask: np.ndarray) -> "LastEpisodes":
        """Returns some of the entries."""
        size = np.count_nonzero(mask, axis=0).max(initial=0)
        order = np.argsort(mask, axis=0, kind="stable")[len(mask) - size :]  # moves the kept entries to the end, in their order
        columns = (self.iterations, self.total, self.count)
        return LastEpisodes(*(np.take_along_axis(np.where(mask, x, 0.0), order, axis=0) for x in columns))

    def mean(self) -> float | np.ndarray:
        """Returns the mean score of each member; nan if none of its episodes has ended."""
        return Mean(self.total, self.count).mean(axis=0)


NO_EPISODES = LastEpisodes(*(np.zeros(0) for _ in range(3)))


def first_non_finite(metrics: HostMetrics) -> tuple[str, int, int | None] | None:
    """Finds the earliest iteration of a chunk in which a metric is nan or infinite."""
    hits = []
    for name, value in metrics.items():
        bad = ~np.isfinite(np.asarray(value.total if isinstance(value, Mean) else value))
        if bad.any():
            iteration, *member = np.argwhere(bad)[0]
            hits.append((int(iteration), name, int(member[0]) if member else None))
    if not hits:
        return None
    iteration, name, member = min(hits, key=lambda f: f[0])
    return name, iteration, member


def usual_row(about: Mapping[str, Any]) -> Row:
    """Returns a row of nan with the columns that runs have in common; `about` is the description of the run."""
    settings = about["settings"] or {}
    members = about["seeds"] * max(map(len, settings.values()), default=1)
    nans = np.full((members,) if settings or about["seeds"] > 1 else (), np.nan)
    kinds = ["episode"] * (about.get("unit") != "updates") + ["eval"] * (about["eval_episodes"] > 0)
    of_members = [f"{kind}_{name}" for kind in kinds for name in ("return", "length")]
    return dict.fromkeys(("step", "iteration", "seconds", "steps_per_second"), np.nan) | dict.fromkeys(of_members, nans)


def stack_rows(rows: Sequence[Row], about: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Converts the rows of a run to columns; a run that ended before its first row has the usual columns, empty."""
    nans: dict[str, np.ndarray] = {}
    count, rows = len(rows), rows or [usual_row(about)]
    for row in rows:
        nans |= {name: np.full(np.shape(value), np.nan) for name, value in row.items() if name not in nans}
    columns = {name: np.stack([np.asarray(row.get(name, nan)) for row in rows]) for name, nan in nans.items()}
    return {name: column[:count] for name, column in columns.items()}


def final(history: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Returns the mean of a column over the last tenth of training; nan if the column does not exist."""
    return last_mean(history[name]) if name in history else np.array(np.nan)


def last_mean(column: np.ndarray, fraction: float = 0.1) -> np.ndarray:
    """Averages a column, `[C]` or `[C, M]`, over the last part of the run, ignoring nan; or takes the last known value."""
    column = np.asarray(column, np.float64)
    if not len(column):
        return np.full(column.shape[1:], np.nan)
    tail = column[-max(1, round(len(column) * fraction)) :]
    is_known = ~np.isnan(tail)
    mean = np.asarray(Mean(np.where(is_known, tail, 0.0), is_known).mean(axis=0))
    return np.where(np.isnan(mean), last_known(column)[-1], mean)


def last_known(column: np.ndarray) -> np.ndarray:
    """Replaces each nan in a history column `[C]` or `[C, M]` by the previous value, if there is one."""
    rows = np.arange(len(column)).reshape(-1, *[1] * (column.ndim - 1))
    latest = np.maximum.accumulate(np.where(np.isnan(column), 0, rows), axis=0)
    return np.take_along_axis(column, latest, axis=0)


def decimals(mean: float | np.ndarray, spread: float | np.ndarray = 0.0) -> int:
    """Returns the number of useful decimals: two digits of the spread, but at most four digits of the mean."""
    size = max(float(np.max(np.abs(spread))), float(np.max(np.abs(mean))) / 100)
    return max(0, 1 - math.floor(math.log10(size))) if 0 < size < math.inf else 1


def in_words(setting: Mapping[str, Any]) -> str:
    """Formats a setting as text, such as `seed 3, learning_rate=0.001`."""
    return ", ".join(f"seed {x}" if name == "seed" else f"{name}={value_in_words(x)}" for name, x in setting.items())


def value_in_words(value: object) -> str:
    """Formats a value of a field as short text."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def team_of(column: str, name: str) -> str:
    """Returns the team of a column `NAME/TEAM` of a metric; empty if it is another column."""
    return column.removeprefix(f"{name}/") if column.startswith(f"{name}/") else ""


def scalars(metrics: Mapping[str, float | np.ndarray]) -> dict[str, float]:
    """Flattens a row to floats: an array `[M]` becomes its mean under its name, and one entry `name/i` per member."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        flat[name] = float(np.mean(value))
        if np.ndim(value):
            flat |= {f"{name}/{i}": float(element) for i, element in enumerate(np.asarray(value))}
    return flat
