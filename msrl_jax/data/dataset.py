"""Data sets: transitions in order, as NumPy arrays.

In the shape descriptions of this package, `N` is the number of transitions (rows), `K` the number of episodes and `G` the
number of shards of a buffer.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

FIELDS = ("obs", "action", "reward", "terminated", "truncated", "next_obs")


class Episodes(NamedTuple):
    """The episodes of a data set, in order; one that the data stop in counts as an episode.

    Attributes:
      start: their first rows. shape=(K,), dtype=int64
      length: how many rows each has. shape=(K,), dtype=int64
      returns: undiscounted sums of their rewards. shape=(K,), dtype=float64
    """

    start: np.ndarray
    length: np.ndarray
    returns: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Transitions. A row that ends no episode is followed by its successor.

    There is a gap behind a row whose `next_obs` is not the `obs` of the next row, and behind the last row. Unless such a row
    ends its episode, `truncated` and `cut` are set for it. So any rows in any order are a data set, and no return that is
    summed over several steps reaches across a gap.

    Attributes:
      obs: the observations acted on. shape=(N, ...)
      action: the actions, as the environment takes them. shape=(N, ...)
      reward: the rewards. shape=(N,), dtype=float32
      terminated: whether the episode ended in a terminal state. shape=(N,), dtype=bool
      truncated: whether the episode was cut short. shape=(N,), dtype=bool
      next_obs: the true successors, before any reset. shape=(N, ...)
      about: where the rows come from, as plain data.
      cut: whether the data stop there while the episode went on; such rows are `truncated` too. None marks the rows before
        gaps only. shape=(N,), dtype=bool

    Raises:
      ValueError: if the arrays do not fit each other, or hold no numbers; the message names the field.
    """

    obs: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    next_obs: np.ndarray
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    cut: Any = None

    def __post_init__(self):
        arrays = {name: np.asarray(getattr(self, name)) for name in FIELDS}
        num_rows = arrays["obs"].shape[:1]
        if 0 in num_rows or not num_rows:
            raise ValueError("a data set needs at least one row: obs of shape [N, ...]")
        for name, x in arrays.items():
            if x.dtype.kind not in "biuf":
                raise ValueError(f"{name} of a data set is {_kind(x)}, which holds no numbers; give an array of numbers")
            if name in ("terminated", "truncated"):
                if not ((x == 0) | (x == 1)).all():
                    raise ValueError(f"{name} of a data set is {_kind(x)} with values other than 0 and 1; give bool[N]")
                arrays[name] = x.astype(bool)
        arrays["reward"] = arrays["reward"].astype(np.float32)
        wanted = dict.fromkeys(("reward", "terminated", "truncated"), num_rows) | {"next_obs": arrays["obs"].shape}
        for name in FIELDS:
            shape = wanted.get(name, num_rows + arrays[name].shape[1:])
            if arrays[name].shape != shape:
                raise ValueError(
                    f"{name} of a data set is {_kind(arrays[name])}, but obs is {_kind(arrays['obs'])}; every field has a row "
                    f"for each observation, so give {name} of shape {list(shape)}"
                )
        if arrays["next_obs"].dtype != arrays["obs"].dtype:
            raise ValueError(
                f"next_obs of a data set is {arrays['next_obs'].dtype}, but obs is {arrays['obs'].dtype}; give them one"
            )
        differs = arrays["next_obs"][:-1] != arrays["obs"][1:]
        gap = np.append(differs.any(axis=tuple(range(1, differs.ndim))), True) & ~arrays["terminated"] & ~arrays["truncated"]
        if gap.any():
            arrays["truncated"] = arrays["truncated"] | gap
        cut = np.zeros(num_rows, bool) if self.cut is None else np.asarray(self.cut)
        if cut.shape != num_rows or cut.dtype != bool:
            raise ValueError(f"cut of a data set is {_kind(cut)}; give bool{list(num_rows)}, or None")
        arrays["cut"] = (cut | gap) & arrays["truncated"] & ~arrays["terminated"]
        for name, x in arrays.items():
            object.__setattr__(self, name, x)

    def __len__(self) -> int:
        return len(self.reward)

    def __repr__(self) -> str:
        returns, cut = self._returns()
        of = f" of {self.about['env']}" if "env" in self.about else ""
        mean = f": return {returns.mean():.4g} ± {returns.std():.2g}" if len(returns) else ""
        noun = "episode" if len(returns) == 1 else "episodes"
        parts = f", and parts of {cut:,} more" if cut else ""
        return f"Dataset({len(self):,} rows, {len(returns):,} whole {noun}{of}{mean}{parts})"

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(getattr(self, name).nbytes for name in FIELDS)

    @property
    def episodes(self) -> Episodes:
        """Where episodes start, how long they are, and their returns."""
        end = np.flatnonzero(self.terminated | self.truncated)
        start = np.append(0, end[:-1] + 1)
        return Episodes(start, end + 1 - start, np.add.reduceat(self.reward.astype(np.float64), start))

    def _returns(self) -> tuple[np.ndarray, int]:
        """The returns of the whole episodes, and how many others there are."""
        start, length, returns = self.episodes
        cut = self.cut[start + length - 1]
        return returns[~cut], int(cut.sum())

    def describe(self) -> dict[str, Any]:
        """The data set in a few numbers, as plain data.

        Returns:
          `rows`; `episodes`, how many are whole; `cut_episodes`, how many are not; `mean_return` of the whole ones, nan if
          there are none; and the items of `about`.
        """
        returns, cut = self._returns()
        mean = float(returns.mean()) if len(returns) else float("nan")
        counts = {"rows": len(self), "episodes": len(returns), "cut_episodes": cut}
        return counts | {"mean_return": mean} | dict(self.about)

    def select(self, rows: np.ndarray | slice) -> "Dataset":
        """Takes rows.

        Args:
          rows: their numbers, or a slice.

        Returns:
          The data set of these rows, in this order; gaps between them are marked.
        """
        return Dataset(*(getattr(self, name)[rows] for name in FIELDS), about=self.about, cut=self.cut[rows])

    def split(self, fraction: float, seed: int = 0) -> tuple["Dataset", "Dataset"]:
        """Splits off a part of the episodes.

        Args:
          fraction: which part of them, above 0 and below 1; at least one episode goes to each side.
          seed: of the choice.

        Returns:
          The data sets of the other episodes and of those split off, such as for training and for validation.

        Raises:
          ValueError: if the fraction is out of range or there is one episode only.
        """
        if not 0 < fraction < 1:
            raise ValueError(f"fraction={fraction!r}: use a number above 0 and below 1")
        start, length, _ = self.episodes
        if len(start) < 2:
            raise ValueError("the data set is one episode, which cannot be split; gather more, or hold nothing out")
        count = min(max(round(fraction * len(start)), 1), len(start) - 1)
        held = np.zeros(len(start), bool)
        held[np.random.default_rng(seed).choice(len(start), count, replace=False)] = True
        rows = np.repeat(held, length)
        return self.select(np.flatnonzero(~rows)), self.select(np.flatnonzero(rows))


def from_lanes(rows: Any, about: Mapping[str, Any]) -> Dataset:
    """Lays environments that ran side by side one after another.

    Args:
      rows: the fields of a data set as attributes, with the steps of `E` environments. `[T, E, ...]`
      about: where they come from.

    Returns:
      The data set: all steps of the first environment, then those of the second, and so on, each cut at its end.
    """
    fields = {name: np.swapaxes(np.asarray(getattr(rows, name)), 0, 1) for name in FIELDS}
    cut = np.zeros_like(fields["truncated"])
    cut[:, -1] = ~fields["terminated"][:, -1] & ~fields["truncated"][:, -1]
    fields |= {"truncated": fields["truncated"] | cut, "cut": cut}
    return Dataset(**{name: x.reshape(-1, *x.shape[2:]) for name, x in fields.items()}, about=about)


def concatenate(datasets: Sequence[Dataset], about: Mapping[str, Any] | None = None) -> Dataset:
    """Joins data sets, one after another.

    Args:
      datasets: at least one.
      about: where the rows come from; `about` of the first data set if not given.

    Returns:
      The data set of all rows.

    Raises:
      ValueError: if there is no data set, or shapes or dtypes differ.
    """
    if not datasets:
        raise ValueError("there is nothing to concatenate; give at least one data set")
    first = datasets[0]
    for name in FIELDS:
        for i, other in enumerate(datasets):
            a, b = getattr(first, name), getattr(other, name)
            if a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
                raise ValueError(f"{name} is {_kind(a)} in the first data set and {_kind(b)} in number {i + 1}; convert one")
    about = first.about if about is None else about
    arrays = {name: np.concatenate([getattr(d, name) for d in datasets]) for name in (*FIELDS, "cut")}
    return Dataset(**arrays, about=about)


def _kind(x: np.ndarray) -> str:
    return f"{x.dtype}{list(x.shape)}"
