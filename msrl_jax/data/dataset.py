"""Data sets: transitions in order, as NumPy arrays.

In the shape descriptions of this package, `N` is the number of transitions (rows), `K` the number of episodes, `G` the number
of shards of a buffer, and `A` the number of agents in an environment.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from msrl_jax.envs import MaskedObservation
from msrl_jax.envs.base import PyTree
from msrl_jax.envs.check_types import show
from msrl_jax.envs.privileged import PrivilegedObservation
from msrl_jax.fragments.support.terminal import significant
from msrl_jax.fragments.support.tracebacks import entry

FIELDS = ("obs", "action", "reward", "terminated", "truncated", "next_obs")
MASKS = {"obs": "action_mask", "next_obs": "next_action_mask"}  # the fields with the legal actions of observations
PRESENT = "valid"  # the field that only multi-agent data sets have
OPTIONAL = (*MASKS.values(), PRESENT)
NESTED = ("obs", "next_obs")
"""The fields that may have parts, in nested dicts and tuples. In columns and files, a part is named by its path: `obs/position`
is the entry `position` of a dict, and `obs/0` is the first entry of a tuple.
"""


class Episodes(NamedTuple):
    """The episodes of a data set, in order; an incomplete episode at the end of the data is included.

    Attributes:
      start: first row of each episode. shape=(K,), dtype=int64
      length: number of rows of each episode. shape=(K,), dtype=int64
      returns: undiscounted sum of the rewards of each episode. shape=(K,), or (K, A) of several agents; dtype=float64
    """

    start: np.ndarray
    length: np.ndarray
    returns: np.ndarray


@entry
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Transitions in order. The successor of a row is the next row, unless the row ends an episode.

    A gap follows the last row, and every row whose `next_obs` is not the `obs` of the next row. `truncated` and `cut` are set
    for a row before a gap, unless the row ends its episode. Therefore any rows in any order are a valid data set, and n-step
    returns stop at gaps.

    A row with several agents is a step of one environment: `obs`, `action`, `reward`, `terminated`, `next_obs` and the masks
    have an entry per agent, in the order of `about["agents"]`: shape=(N, A, ...). Such a data set has the field `valid`. An
    episode of several agents ends when it is truncated or when all agents have terminated.

    Observations with several parts are nested dicts and tuples of arrays. In `columns`, and in files, a part is named by its
    path, such as `obs/position`. If critics see more than actors, observations are `PrivilegedObservation`s, with the parts
    `obs/obs` and `obs/privileged_state`.

    Attributes:
      obs: the observations: an array, or nested dicts and tuples of arrays. shape=(N, ...)
      action: the environment's actions. shape=(N, ...)
      reward: the rewards. shape=(N,), dtype=float32
      terminated: whether the episode ended in a terminal state. shape=(N,), dtype=bool
      truncated: whether the episode was cut short. shape=(N,), dtype=bool
      next_obs: the true successors, before any reset, with the same parts. shape=(N, ...)
      about: the origin of the rows, as plain data.
      cut: whether the data stop at a row while the episode continues; such rows are `truncated` too. None marks only the
        rows before gaps. shape=(N,), dtype=bool
      action_mask: whether each of `n` discrete actions is legal in `obs`; None if the environment has no legal actions.
        shape=(N, n), dtype=bool
      next_action_mask: the same for `next_obs`. shape=(N, n), dtype=bool
      valid: which of several agents had not terminated when they acted; the actions of the others are meaningless. None for
        one agent. shape=(N, A), dtype=bool

    Raises:
      ValueError: if the shapes or dtypes are inconsistent, or an array is not numeric; the message names the field.
    """

    obs: PyTree
    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    next_obs: PyTree
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    cut: Any = None
    action_mask: Any = None
    next_action_mask: Any = None
    valid: Any = None

    def __post_init__(self):
        if masked := [name for name, array in self.columns.items() if isinstance(array, np.ma.MaskedArray)]:
            raise ValueError(f"{masked[0]} of a data set is a masked array; remove the masked rows, or use its filled(value)")
        arrays = {name: np.asarray(array) for name, array in self.columns.items()}
        first_path, *other_paths = [name for name in arrays if top_fields([name]) == {"obs": None}]
        successors = [name for name in arrays if top_fields([name]) == {"next_obs": None}]
        if successors != [f"next_{name}" for name in (first_path, *other_paths)]:
            raise ValueError(
                f"a data set has {', '.join(successors)} with {', '.join((first_path, *other_paths))}; use the same parts for "
                "observations and their successors"
            )
        num_rows = arrays[first_path].shape[:1]
        if 0 in num_rows or not num_rows:
            raise ValueError("a data set needs at least one row: obs of shape [N, ...]")
        for name, array in arrays.items():
            if array.dtype.kind not in "biuf":
                raise ValueError(f"{name} of a data set is {show(array)}, which is not numeric; pass an array of numbers")
            if name in ("terminated", "truncated", *OPTIONAL):
                if not ((array == 0) | (array == 1)).all():
                    raise ValueError(f"{name} of a data set is {show(array)} with values other than 0 and 1; pass bool")
                arrays[name] = array.astype(bool)
        arrays["reward"] = arrays["reward"].astype(np.float32)
        lead = arrays[first_path].shape[:2] if self.has_agents else num_rows
        shapes = dict.fromkeys(("reward", "terminated", PRESENT), lead)
        shapes |= {"truncated": num_rows} | {f"next_{name}": arrays[name].shape for name in (first_path, *other_paths)}
        if self.has_masks:
            shapes |= dict.fromkeys(MASKS.values(), (*lead, *arrays["action_mask"].shape[-1:]))
        for name in arrays:
            shape = shapes.get(name, lead + arrays[name].shape[len(lead) :])
            if arrays[name].shape != shape:
                row_content = "observation, and all but truncated an entry per agent" if self.has_agents else "observation"
                valid_hint = ", or valid too if there are several agents" if name == "reward" and not self.has_agents else ""
                raise ValueError(
                    f"{name} of a data set is {show(arrays[name])}, but {first_path} is {show(arrays[first_path])}; every "
                    f"field has one row per {row_content}, so pass {name} with shape {list(shape)}{valid_hint}"
                )
        differs = np.zeros(num_rows[0] - 1, bool)
        for name in (first_path, *other_paths):
            obs, successor = arrays[name], arrays[f"next_{name}"]
            if successor.dtype != obs.dtype:
                raise ValueError(
                    f"next_{name} of a data set is {successor.dtype}, but {name} is {obs.dtype}; use the same dtype"
                )
            differs |= (successor[:-1] != obs[1:]).any(axis=tuple(range(1, obs.ndim)))
        is_terminated = _all_terminated(arrays["terminated"], arrays["truncated"])
        gap = np.append(differs, True) & ~is_terminated & ~arrays["truncated"]
        if gap.any():
            arrays["truncated"] = arrays["truncated"] | gap
        cut = np.zeros(num_rows, bool) if self.cut is None else np.asarray(self.cut)
        if cut.shape != num_rows or cut.dtype != bool:
            raise ValueError(f"cut of a data set is {show(cut)}; pass bool{list(num_rows)}, or None")
        arrays["cut"] = (cut | gap) & arrays["truncated"] & ~is_terminated
        for name in top_fields(arrays):
            object.__setattr__(self, name, nest_parts(arrays, name))

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def has_masks(self) -> bool:
        """Whether the data set has the legal actions of its observations."""
        return self.action_mask is not None or self.next_action_mask is not None

    @property
    def has_agents(self) -> bool:
        """Whether the rows are steps of several agents, i.e. whether there is a field `valid`."""
        return self.valid is not None

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields with one row per transition, except `cut`."""
        return (*FIELDS, *(MASKS.values() if self.has_masks else ()), *((PRESENT,) if self.has_agents else ()))

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The arrays of these fields by name; parts of observations by path, such as `obs/position`."""
        arrays: dict[str, np.ndarray] = {}
        for name in self.fields:
            arrays |= parts_by_path(getattr(self, name), name) if name in NESTED else {name: getattr(self, name)}
        return arrays

    @property
    def ended(self) -> np.ndarray:
        """Whether a row ends an episode or a part of one: it is truncated, or terminated for all agents. shape=(N,)"""
        return self.truncated | _all_terminated(self.terminated, self.truncated)

    def __repr__(self) -> str:
        returns, cut = self._whole_returns()
        description = f" of {self.about['env']}" if "env" in self.about else ""
        description += f", {self.reward.shape[1]} agents" if self.has_agents else ""
        mean = f": return {significant(returns.mean())} ± {significant(returns.std())}" if len(returns) else ""
        noun = "episode" if len(returns) == 1 else "episodes"
        parts = f", and parts of {cut:,} more" if cut else ""
        return f"Dataset({len(self):,} rows, {len(returns):,} whole {noun}{description}{mean}{parts})"

    @property
    def episodes(self) -> Episodes:
        """The starts, lengths and returns of the episodes."""
        end = np.flatnonzero(self.ended)
        start = np.append(0, end[:-1] + 1)
        return Episodes(start, end + 1 - start, np.add.reduceat(self.reward.astype(np.float64), start))

    def _whole_returns(self) -> tuple[np.ndarray, int]:
        """Computes the returns of the complete episodes, summed over the agents, and the number of incomplete ones."""
        start, length, returns = self.episodes
        cut = self.cut[start + length - 1]
        return (returns.sum(-1) if self.has_agents else returns)[~cut], int(cut.sum())

    def describe(self) -> dict[str, Any]:
        """Summarizes the data set.

        Returns:
          `rows`; `episodes`, the number of complete episodes; `cut_episodes`, the number of incomplete ones; `mean_return` of
          the complete episodes, summed over the agents, nan if there are none; and the items of `about`.
        """
        returns, cut = self._whole_returns()
        mean = float(returns.mean()) if len(returns) else float("nan")
        counts = {"rows": len(self), "episodes": len(returns), "cut_episodes": cut}
        return counts | {"mean_return": mean} | dict(self.about)

    def fingerprint(self) -> str:
        """Returns the SHA-256 hash of all fields with their dtypes and shapes, in hexadecimal."""
        digest = hashlib.sha256()
        for name, array in (self.columns | {"cut": self.cut}).items():
            array = np.ascontiguousarray(array)
            digest.update(f"{name} {show(array)}".encode())
            digest.update(array.data)
        return digest.hexdigest()

    def select(self, rows: np.ndarray | slice) -> "Dataset":
        """Selects rows.

        Args:
          rows: row numbers, or a slice.

        Returns:
          The data set of these rows in this order, with gaps marked.
        """
        return from_columns({name: array[rows] for name, array in (self.columns | {"cut": self.cut}).items()}, self.about)

    def split(self, fraction: float, seed: int = 0) -> tuple["Dataset", "Dataset"]:
        """Splits off some of the episodes.

        Args:
          fraction: share of the episodes to split off, above 0 and below 1; each side gets at least one episode.
          seed: seed of the random choice of episodes.

        Returns:
          The data set of the remaining episodes and that of the split-off ones, e.g. for training and validation.

        Raises:
          ValueError: if the fraction is out of range or there is only one episode.
        """
        if not 0 < fraction < 1:
            raise ValueError(f"fraction={fraction!r}: use a number above 0 and below 1")
        start, length, _ = self.episodes
        if len(start) < 2:
            raise ValueError("the data set has a single episode, which cannot be split; collect more, or do not split")
        count = min(max(round(fraction * len(start)), 1), len(start) - 1)
        is_selected = np.zeros(len(start), bool)
        is_selected[np.random.default_rng(seed).choice(len(start), count, replace=False)] = True
        rows = np.repeat(is_selected, length)
        return self.select(np.flatnonzero(~rows)), self.select(np.flatnonzero(rows))


def parts_by_path(value: Any, name: str) -> dict[str, Any]:
    """Returns the parts of nested dicts and tuples by path, starting with `name`; ValueError if there are none or a key is
    invalid.
    """
    if isinstance(value, PrivilegedObservation):
        value = value._asdict()
    if not isinstance(value, Mapping | tuple):
        return {name: value}
    if not value:
        raise ValueError(f"{name} is an empty {type(value).__name__}, which data sets cannot store; add a part")
    parts: dict[str, Any] = {}
    for key, part in sorted(value.items()) if isinstance(value, Mapping) else enumerate(value):
        if isinstance(value, Mapping) and (not isinstance(key, str) or not key or "/" in key or key.isdigit()):
            raise ValueError(
                f"{name} has a part with the name {key!r}, which data sets cannot store, because its path would be ambiguous; "
                "use text without '/' that is not a number"
            )
        parts |= parts_by_path(part, f"{name}/{key}")
    return parts


def nest_parts(arrays: Mapping[str, Any], name: str) -> Any:
    """Reassembles the parts of a value, the inverse of `parts_by_path`; raises ValueError if a tuple lacks a part."""
    if name in arrays:
        return arrays[name]
    keys = sorted({path[len(name) + 1 :].partition("/")[0] for path in arrays if path.startswith(f"{name}/")})
    if not all(key.isdigit() for key in keys):
        parts = {key: nest_parts(arrays, f"{name}/{key}") for key in keys}
        return PrivilegedObservation(**parts) if tuple(keys) == PrivilegedObservation._fields else parts
    if lacking := [str(i) for i in range(len(keys)) if str(i) not in keys]:
        raise ValueError(f"{name} has the parts {', '.join(keys)} of a tuple, but not {name}/{lacking[0]}; add it")
    return tuple(nest_parts(arrays, f"{name}/{i}") for i in range(len(keys)))


def top_fields(paths: Iterable[str]) -> dict[str, None]:
    """Returns the fields that paths start with, in order of appearance."""
    return dict.fromkeys(path.partition("/")[0] if path.startswith(tuple(f"{f}/" for f in NESTED)) else path for path in paths)


def columns(rows: Any) -> dict[str, Any]:
    """Returns the arrays of `Transition`s by the names of `Dataset.columns`."""
    arrays: dict[str, Any] = {}
    masks: dict[str, Any] = {}
    for name in FIELDS:
        value = getattr(rows, name)
        if isinstance(value, MaskedObservation):
            value, masks[MASKS[name]] = value
        arrays |= parts_by_path(value, name)
    return arrays | masks | ({} if rows.valid is None else {PRESENT: rows.valid})


def from_columns(arrays: Mapping[str, Any], about: Mapping[str, Any]) -> Dataset:
    """Makes a data set from arrays by the names of `Dataset.columns`, and `cut`, if known."""
    return Dataset(**{name: nest_parts(arrays, name) for name in top_fields(arrays)}, about=about)


def from_lanes(rows: Mapping[str, Any], about: Mapping[str, Any]) -> Dataset:
    """Joins columns `[T, E, ...]`, environment by environment, each cut at its end, dropping steps that are not `valid`."""
    fields = {name: np.swapaxes(np.asarray(array), 0, 1) for name, array in rows.items()}
    cut = np.zeros_like(fields["truncated"])
    cut[:, -1] = ~(fields["truncated"] | _all_terminated(fields["terminated"], fields["truncated"]))[:, -1]
    fields |= {"truncated": fields["truncated"] | cut, "cut": cut}
    del rows
    for name in fields:  # one after another, since data may be large
        fields[name] = fields[name].reshape(-1, *fields[name].shape[2:])
    if PRESENT in fields and fields[PRESENT].ndim == 1:  # single-agent steps that the environment did not answer
        keep = fields.pop(PRESENT)
        fields = {name: array[keep] for name, array in fields.items()}
    return from_columns(fields, about)


@entry
def concatenate(datasets: Sequence[Dataset], about: Mapping[str, Any] | None = None) -> Dataset:
    """Joins data sets in order.

    Args:
      datasets: at least one.
      about: the origin of the rows; `about` of the first data set if None.

    Returns:
      The data set of all rows.

    Raises:
      ValueError: if no data set is given, or shapes or dtypes differ.
    """
    if not datasets:
        raise ValueError("there is nothing to concatenate; pass at least one data set")
    first_dataset = datasets[0]
    column_sets = [dataset.columns | {"cut": dataset.cut} for dataset in datasets]
    for i, other in enumerate(column_sets):
        if odd := sorted(other.keys() ^ column_sets[0].keys()):
            raise ValueError(f"only one of the first data set and number {i + 1} has {', '.join(odd)}; give both the same")
    for name in first_dataset.columns:
        for i, other in enumerate(column_sets):
            a, b = column_sets[0][name], other[name]
            if a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
                raise ValueError(f"{name} is {show(a)} in the first data set and {show(b)} in number {i + 1}; convert one")
    about = first_dataset.about if about is None else about
    return from_columns({name: np.concatenate([arrays[name] for arrays in column_sets]) for name in column_sets[0]}, about)


def _all_terminated(terminated: np.ndarray, truncated: np.ndarray) -> np.ndarray:
    """Whether the episode has terminated, with the shape of `truncated`; with several agents, whether all have."""
    return terminated if terminated.ndim == truncated.ndim else np.all(terminated, -1)
