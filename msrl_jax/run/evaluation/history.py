"""Metrics on the host: one row per chunk of iterations, and the check for divergence.

In the shape descriptions of this package, `N` denotes the number of iterations of a chunk, `C` the number of chunks of a run
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

SKIPPED = "skipped_updates"  # the metric that counts dropped updates, of `guard="skip"`


def reduce_chunk(metrics: HostMetrics, *, finite: bool = False) -> Row:
    """The mean of each metric of a chunk, `[N]` or `[N, M]`, in float64; that of a `Mean` weighs an iteration by its samples.

    `finite` (`guard="skip"`) leaves out the iterations in which a metric is not finite, and sums up those with dropped updates.
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
    """A metric as sums and counts in float64; `finite` leaves out those that are not finite."""
    given = value if isinstance(value, Mean) else Mean(value, np.ones_like(value))
    total, count = (np.asarray(x, np.float64) for x in (given.total, given.count))
    fine = np.isfinite(total) if finite else True
    return Mean(np.where(fine, total, 0.0), np.where(fine, count, 0.0))


_EPISODES = 100  # how many of the last episodes of each member tell its success during training


@dataclasses.dataclass(frozen=True)
class LastEpisodes:
    """The scores of the last episodes of each member, by the iteration in which they ended, however chunks were cut.

    Each member has at most 100 entries, the newest one last; one that has fewer than another begins with entries of 0.
    """

    iterations: np.ndarray  # in which they ended. `[K]` or `[K, M]`
    total: np.ndarray  # their sums
    count: np.ndarray  # numbers of episodes

    def add(self, first: int, scores: Mean | np.ndarray, *, finite: bool = False) -> "LastEpisodes":
        """Adds the metric of a chunk, `[N]` or `[N, M]`, after `first` iterations; `finite` as in `reduce_chunk`."""
        new = _sums(scores, finite)
        ended = np.full_like(new.total, first + 1) + np.arange(len(new.total)).reshape(-1, *[1] * (new.total.ndim - 1))
        pairs = zip((self.iterations, self.total, self.count), (ended, new.total, new.count), strict=True)
        joined = LastEpisodes(*(np.concatenate([old.reshape(-1, *x.shape[1:]), x]) for old, x in pairs))
        later = np.cumsum(joined.count[::-1], axis=0)[::-1] - joined.count
        return joined._only((joined.count > 0) & (later < _EPISODES))

    def until(self, iteration: int) -> "LastEpisodes":
        """Those that had ended after an iteration."""
        return self._only((self.count > 0) & (self.iterations <= iteration))

    def _only(self, kept: np.ndarray) -> "LastEpisodes":
        """Some of the entries."""
        most = np.count_nonzero(kept, axis=0).max(initial=0)
        order = np.argsort(kept, axis=0, kind="stable")[len(kept) - most :]  # those that are kept, last and in their order
        columns = (self.iterations, self.total, self.count)
        return LastEpisodes(*(np.take_along_axis(np.where(kept, x, 0.0), order, axis=0) for x in columns))

    def mean(self) -> float | np.ndarray:
        """The mean of each member; nan if none of its episodes has ended."""
        return Mean(self.total, self.count).mean(axis=0)


NO_EPISODES = LastEpisodes(*(np.zeros(0) for _ in range(3)))


def first_non_finite(metrics: HostMetrics) -> tuple[str, int, int | None] | None:
    """Finds the earliest iteration of a chunk in which a metric is nan or infinite."""
    found = []
    for name, value in metrics.items():
        bad = ~np.isfinite(np.asarray(value.total if isinstance(value, Mean) else value))
        if bad.any():
            iteration, *member = np.argwhere(bad)[0]
            found.append((int(iteration), name, int(member[0]) if member else None))
    if not found:
        return None
    iteration, name, member = min(found, key=lambda f: f[0])
    return name, iteration, member


def stack_rows(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Turns rows into columns."""
    unknown: dict[str, np.ndarray] = {}
    for row in rows:
        unknown |= {name: np.full(np.shape(value), np.nan) for name, value in row.items() if name not in unknown}
    return {name: np.stack([np.asarray(row.get(name, nan)) for row in rows]) for name, nan in unknown.items()}


def final(history: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """The mean of a column over the last tenth of training; nan if there is no such column."""
    return last_mean(history[name]) if name in history else np.array(np.nan)


def last_mean(column: np.ndarray, fraction: float = 0.1) -> np.ndarray:
    """The mean of a column, `[C]` or `[C, M]`, over the last part of the run without nan entries, or the last known value."""
    column = np.asarray(column, np.float64)
    tail = column[-max(1, round(len(column) * fraction)) :]
    known = ~np.isnan(tail)
    mean = np.asarray(Mean(np.where(known, tail, 0.0), known).mean(axis=0))
    return np.where(np.isnan(mean), last_known(column)[-1], mean)


def last_known(column: np.ndarray) -> np.ndarray:
    """A history column `[C]` or `[C, M]` with the value before in place of each nan, if there is one."""
    rows = np.arange(len(column)).reshape(-1, *[1] * (column.ndim - 1))
    latest = np.maximum.accumulate(np.where(np.isnan(column), 0, rows), axis=0)
    return np.take_along_axis(column, latest, axis=0)


def decimals(mean: float | np.ndarray, spread: float | np.ndarray = 0.0) -> int:
    """The number of useful decimals: they show two digits of the spread, but at most four digits of the mean."""
    size = max(float(np.max(np.abs(spread))), float(np.max(np.abs(mean))) / 100)
    return max(0, 1 - math.floor(math.log10(size))) if 0 < size < math.inf else 1


def in_words(setting: Mapping[str, Any]) -> str:
    """A setting as text, such as `seed 3, learning_rate=0.001`."""
    return ", ".join(f"seed {x}" if name == "seed" else f"{name}={value_in_words(x)}" for name, x in setting.items())


def value_in_words(value: Any) -> str:
    """A value of a field as short text."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def team_of(column: str, name: str) -> str:
    """The team of a column `NAME/TEAM` of a metric; empty if it is another column."""
    return column.removeprefix(f"{name}/") if column.startswith(f"{name}/") else ""


def scalars(metrics: Mapping[str, float | np.ndarray]) -> dict[str, float]:
    """Flattens a row to floats: an array `[M]` gives its mean under its name, and one entry `name/i` per member."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        flat[name] = float(np.mean(value))
        if np.ndim(value):
            flat |= {f"{name}/{i}": float(x) for i, x in enumerate(np.asarray(value))}
    return flat
