"""Checks that a data set fits an environment: shapes, dtypes and ranges."""

import dataclasses
import math
import os
from typing import Any

import jax
import numpy as np

from msrl_jax.data.dataset import Dataset, nest_parts, parts_by_path
from msrl_jax.data.formats import load
from msrl_jax.envs import Box, Dict, Discrete, Environment, Space, Tuple, has_agents
from msrl_jax.envs.actions import policy_actions
from msrl_jax.envs.base import PyTree, env_name
from msrl_jax.envs.masks import has_masks
from msrl_jax.envs.privileged import are_privileged
from msrl_jax.envs.spaces import struct
from msrl_jax.fragments.runtime.memory import check_fits_host, tree_bytes
from msrl_jax.fragments.support.tracebacks import entry

_REMEDY = "use the environment that the data set was made in"
_TOLERANCE = 1e-4  # tolerated rounding error outside a Box, relative to the larger of the bound and 1


@entry
def check_spaces(dataset: Dataset, env: Environment) -> Dataset:
    """Checks that a data set fits the spaces of an environment.

    Some environments violate their declared observation bounds, so bounds of observations are not checked if the data set
    comes from an environment with the same observation space.

    Args:
      dataset: the data set.
      env: the environment, of one agent or several.

    Returns:
      The data set with observations and actions in the environment's dtypes.

    Raises:
      ValueError: if the numbers of agents, the parts of observations, shapes or dtypes differ, or if a value is not finite or
        outside its space; the message names the field and the row.
      TypeError: if the space of actions is neither a `Box` nor `Discrete`.
    """
    name, data_agents, agents = env_name(env), dataset.reward.shape[1:], (len(env.agents),) if has_agents(env) else ()  # type: ignore
    if data_agents != agents:
        data_count, env_count = (f"{count[0]} agents" if count else "one agent" for count in (data_agents, agents))
        raise ValueError(
            f"reward of the data set is of {data_count}, and {name} has {env_count}; {_REMEDY}, or record another one"
        )
    spaces = {"obs": env.observation_space, "action": env.action_space, "next_obs": env.observation_space}
    is_same_space = dataset.about.get("observation_space") == str(env.observation_space)
    check_actions(env)
    converted = {}
    for field, space in spaces.items():
        arrays, parts = parts_by_path(getattr(dataset, field), field), _spaces_of(space, field)
        if arrays.keys() != parts.keys():
            raise ValueError(
                f"the data set has {', '.join(arrays)}, but the observation_space of {name} is {space}, with "
                f"{', '.join(parts)}; {_REMEDY}, or convert one of the two"
            )
        bounds = field == "action" or not is_same_space
        fitted = {path: _fit_field(array, parts[path], path, name, agents, bounds=bounds) for path, array in arrays.items()}
        converted[field] = nest_parts(fitted, field)
    if (bad := np.argwhere(~np.isfinite(dataset.reward))).size:
        raise ValueError(
            f"reward of the data set is {dataset.reward[(*bad[0],)]} {_describe_rows(bad[:, 0])}; remove such rows"
        )
    _check_masks(dataset, env)
    return dataclasses.replace(dataset, **converted)


def _check_masks(dataset: Dataset, env: Environment) -> None:
    name, data_has_masks = env_name(env), dataset.has_masks
    if data_has_masks != has_masks(env):
        owner, other = ("the data set", name) if data_has_masks else (name, "the data set")
        raise ValueError(f"{owner} has legal actions (action_mask) and {other} has none; {_REMEDY}, or record another one")
    if not data_has_masks:
        return
    space, mask = env.action_space, dataset.action_mask
    if mask.shape[-1:] != (space.n,):  # type: ignore[attr-defined]
        raise ValueError(f"action_mask of the data set has {mask.shape[-1]} actions in every row, but {name} has {space}")
    if (bad := np.argwhere(~np.take_along_axis(mask, dataset.action.astype(np.int64)[..., None], -1)[..., 0])).size:
        raise ValueError(f"action of the data set is illegal by its action_mask {_describe_rows(bad[:, 0])}; remove such rows")


def _fit_field(values: np.ndarray, space: Space, field: str, name: str, agents: tuple[int, ...], *, bounds: bool) -> np.ndarray:
    field_name = f"{field} of the data set"
    field, _, part = field.partition("/")
    kind = "action_space" if field == "action" else f"observation_space/{part}" if part else "observation_space"
    assert isinstance(space, Box | Discrete)
    if values.shape[1:] != (*agents, *space.shape):
        raise ValueError(
            f"{field_name} has shape {list(values.shape[1:])} in every row, but the {kind} of {name} is {space}, of shape "
            f"{[*agents, *space.shape]}; {_REMEDY}, or convert one of the two"
        )
    if not np.can_cast(values.dtype, np.dtype(space.dtype), "same_kind"):
        raise ValueError(
            f"{field_name} is {values.dtype}, but the {kind} of {name} is {space} of {space.dtype}, which would lose "
            f"precision; convert it explicitly, or {_REMEDY}"
        )
    rows = values.reshape(len(values), math.prod(agents), -1)
    with np.errstate(over="ignore"):
        fitted = values.astype(space.dtype)
    if (bad := np.flatnonzero(~np.isfinite(fitted.reshape(rows.shape)).all((1, 2)))).size:
        raise ValueError(f"{field_name} is not finite in {np.dtype(space.dtype)} {_describe_rows(bad)}; remove such rows")
    if not bounds:
        return fitted
    low, high = (np.ravel(bound).astype(np.float64) for bound in (space.low, space.high))
    if np.issubdtype(space.dtype, np.floating):
        low, high = (b + s * _TOLERANCE * np.maximum(np.abs(b), 1) for b, s in ((low, -1), (high, 1)))
    is_outside = (rows < low) | (rows > high)
    if (bad := np.flatnonzero(is_outside.any((1, 2)))).size:
        value = rows[bad[0]][is_outside[bad[0]]][0]
        raise ValueError(
            f"{field_name} is outside the {kind} of {name}, {space}: it has {value:.6g} {_describe_rows(bad)}; "
            f"{_REMEDY}, or correct the space of that environment"
        )
    return fitted


def _describe_rows(bad: np.ndarray) -> str:
    bad = np.unique(bad)
    return f"in row {bad[0]}" + (f" and in {len(bad) - 1} more" if len(bad) > 1 else "")


def check_actions(env: Environment) -> None:
    """Raises TypeError unless the actions of an environment are arrays, which data sets require."""
    if not isinstance(env.action_space, Box | Discrete):
        raise TypeError(
            f"data sets need actions that are arrays, but the action_space of {env_name(env)} is {env.action_space}; wrap the "
            "environment to use a Box or Discrete"
        )


def _spaces_of(space: Space, name: str) -> dict[str, Space]:
    """Returns the spaces of the parts of a value by path, as in `parts_by_path`."""

    def by_part(space: Space) -> PyTree:
        if are_privileged(space):
            return jax.tree.map(by_part, space.spaces)
        if isinstance(space, Dict):
            return {key: by_part(part) for key, part in space.spaces.items()}
        return tuple(map(by_part, space.spaces)) if isinstance(space, Tuple) else space

    return parts_by_path(by_part(space), name)


def check_recordable(env: Environment) -> None:
    """Raises TypeError unless actions are arrays, ValueError if the name of an observation part cannot be part of a path."""
    check_actions(env)
    try:
        _spaces_of(env.observation_space, "obs")
    except ValueError as error:
        raise ValueError(f"{env_name(env)} cannot be recorded: {error}") from None


def bytes_per_step(env: Environment) -> int:
    """Returns the number of bytes per step of an environment in a data set; raises as `check_recordable` does."""
    check_recordable(env)
    obs, action = struct(env.observation_space), struct(env.action_space)
    masks = 2 * env.action_space.n if has_masks(env) else 0  # type: ignore[attr-defined]
    row = 2 * tree_bytes(obs) + tree_bytes(action) + 4 + 1 + masks  # the reward, and `terminated`
    if has_agents(env):
        row = (row + 1) * len(env.agents)  # type: ignore[attr-defined]  # and whether it is valid
    return row + 1  # `truncated`


def agents_of(env: Any) -> dict[str, list[str]]:
    """Returns the names of the agents for `Dataset.about`; empty if there is one agent."""
    return {"agents": list(env.agents)} if has_agents(env) else {}


def check_rows_fit(env: Environment, rows: int, remedy: str) -> None:
    """Raises ValueError, with the `remedy` at the end, if `rows` steps of an environment exceed the host's memory."""
    row = bytes_per_step(env)
    check_fits_host(2 * rows * row, f"a data set of {rows:,} rows of {row} bytes, twice while its parts are joined,", remedy)


def load_for(env: Environment, source: str | os.PathLike[str] | Dataset) -> Dataset:
    """Reads a data set for an environment, with a policy's actions; raises ValueError if it cannot be read, or does not fit."""
    dataset = check_spaces(load(source), env)
    return dataclasses.replace(dataset, action=policy_actions(env.action_space, dataset.action))
