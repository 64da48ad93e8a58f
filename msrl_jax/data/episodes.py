"""Episodes with one more observation than actions, as in RLDS and Minari."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from msrl_jax.data.dataset import Dataset, from_columns, named

NAMES = {
    "obs": ("obs", "observation", "observations"),
    "action": ("action", "actions"),
    "reward": ("reward", "rewards"),
    "terminated": ("terminated", "terminations", "is_terminal"),
    "truncated": ("truncated", "truncations"),
}
"""The names of each field: ours, and those of RLDS and Minari."""


def from_episodes(episodes: Iterable[Mapping[str, Any]], about: Mapping[str, Any] | None = None) -> Dataset:
    """Makes a data set of whole episodes (RLDS: Ramos et al., 2021, arXiv 2111.02767).

    Args:
      episodes: the arrays of every episode. An episode of `T` steps has `T + 1` observations; actions and rewards `[T, ...]`,
        or `[T + 1, ...]` with a meaningless last entry, as in RLDS; `terminated [T]`, whether a step ended in a terminal
        state, or `is_terminal [T + 1]`, whether an observation is terminal; and optionally `truncated [T]`, whether a limit
        ended the episode after a step. Observations may be nested dicts and tuples of arrays. Plural names work too.
      about: the origin of the episodes.

    Returns:
      The data set; an episode that does not end in a terminal state is truncated.

    Raises:
      ValueError: if there is no episode, if an array is missing or has a wrong length, or if there are rewards of several
        agents; the message names the array.
    """
    columns: dict[str, list[np.ndarray]] = {}
    for number, episode in enumerate(episodes):
        rows = _rows(episode, f"episode {number}")
        if number and (odd := sorted(rows.keys() ^ columns.keys())):
            raise ValueError(f"only some of the episodes 0 to {number} have {odd[0]}; give all the same parts of observations")
        for name, x in rows.items():
            columns.setdefault(name, []).append(x)
    if not columns:
        raise ValueError("there are no episodes; give at least one")
    for name, parts in columns.items():
        kinds = sorted({f"{x.dtype}{list(x.shape[1:])}" for x in parts})
        if len(kinds) > 1:
            raise ValueError(f"{name} is {' in some episodes and '.join(kinds)} in others; convert them to one of these")
    return from_columns({name: np.concatenate(parts) for name, parts in columns.items()}, about or {})


def _rows(episode: Mapping[str, Any], where: str) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    obs: dict[str, np.ndarray] = {}
    terminal = False
    for name, names in NAMES.items():
        given = [other for other in names if other in episode]
        if given:
            value = episode[given[0]]
            if name == "obs":
                obs = {path: np.asarray(x) for path, x in named(value, name).items()}
                continue
            if isinstance(value, Mapping | tuple):
                raise ValueError(f"{given[0]} of {where} is a {type(value).__name__} of arrays; make it one array (flatten it)")
            found[name] = np.asarray(value)
            terminal |= given[0] == "is_terminal"
        elif name != "truncated":
            raise ValueError(f"{where} has no {' or '.join(names)}; it has {', '.join(sorted(episode))}")
    lengths = {path: len(x) if x.ndim else 0 for path, x in obs.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the parts of the observations of {where} have different lengths, {lengths}; give as many of each")
    steps = max(lengths.values()) - 1
    if steps < 1:
        raise ValueError(f"{where} has {steps + 1} observations; give one more than there are steps, so at least two")
    for name, x in found.items():
        lengths = [steps + 1] if name == "terminated" and terminal else [steps, steps + 1]
        if x.ndim == 0 or len(x) not in lengths:
            raise ValueError(
                f"{name} of {where} is of shape {list(x.shape)}, but there are {steps + 1} observations; give one per step, "
                f"[{' or '.join(map(str, lengths))}, ...]"
            )
        if name == "reward" and x.ndim > 1:
            raise ValueError(
                f"reward of {where} is of shape {list(x.shape)}; these episodes are of one agent, so give one number per step; "
                "for several agents, make a Dataset with the field present"
            )
        found[name] = x[1:] if name == "terminated" and terminal else x[:steps]
    truncated = found.setdefault("truncated", np.zeros(steps, bool)).astype(bool)
    truncated[-1] |= not found["terminated"][-1]
    before, after = {path: x[:-1] for path, x in obs.items()}, {f"next_{path}": x[1:] for path, x in obs.items()}
    return {**found, **before, **after, "truncated": truncated}
