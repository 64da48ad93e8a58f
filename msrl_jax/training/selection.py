"""Some members of a run as a run of their own, to act with, to save, and to go on with."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from msrl_jax.training.evaluate import Evaluation

Result: TypeAlias = Any
"""A `msrl_jax.Result`, whose methods call this module."""


def select_settings(result: Result, settings: Sequence[int]) -> Result:
    """The members of some settings, with all their seeds.

    Args:
      result: a run whose config has several settings.
      settings: their numbers, in the order in which the new run has them.

    Returns:
      The result of a run of these members only.

    Raises:
      ValueError: if there is no such setting, if one is named twice, or if the run is a population.
    """
    was: Mapping[str, Sequence[float]] = result.description.get("settings") or {}
    count = len(next(iter(was.values()))) if was else 0
    chosen: list[Any] = np.atleast_1d(np.asarray(settings, object)).tolist()
    if not chosen or len(set(chosen)) < len(chosen) or not all(_is_number(x) and 0 <= x < count for x in chosen):
        has = f"settings 0 to {count - 1}" if count else "one setting; select(member=0) takes one of its seeds"
        raise ValueError(f"settings={settings!r}: this run has {has}; name some of them, each once")
    seeds = result.seeds
    rows = np.array([s * seeds + i for s in chosen for i in range(seeds)])
    now = {name: [values[s] for s in chosen] for name, values in was.items()}
    return _of_rows(result, rows, {"settings": now})


def select_member(result: Result, member: int | None) -> Result:
    """One member as a run of one seed; with one setting, if the members of the run differ in their config.

    Args:
      result: a run.
      member: the number of the member; the best one if None.

    Returns:
      The result of a run of this member only.

    Raises:
      ValueError: if there is no such member, or if the run is a population.
    """
    number = result.member(member)
    if not result.has_members:
        return result
    setting = dict(result.settings[number])
    alone = {"seed": setting.pop("seed"), "seeds": 1}
    if not setting:
        return _of_rows(result, number, alone)
    return _of_rows(result, np.array([number]), alone | {"settings": {name: [x] for name, x in setting.items()}})


def _is_number(x: Any) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def _of_rows(result: Result, rows: np.ndarray | int, about: Mapping[str, Any]) -> Result:
    if result.description.get("pbt"):
        raise ValueError("the members of a population evolve together, so some are no run; act and evaluate take member=")
    agent, members = result.behavior.agent, result.members

    def column(x: np.ndarray) -> np.ndarray:
        return x[:, rows] if x.ndim > 1 and x.shape[1] == members else x

    def episodes(value: Any) -> Any:
        return jax.tree.map(lambda x: x[rows], value)

    last = result.evaluation
    if last is not None:
        last = Evaluation(**{f.name: episodes(getattr(last, f.name)) for f in dataclasses.fields(Evaluation)})
    first = {name: values[0] for name, values in (about.get("settings") or {}).items()}
    return dataclasses.replace(
        result,
        history={name: column(x) for name, x in result.history.items()},
        config=dataclasses.replace(result.config, **first),
        state=agent.with_data(jax.tree.map(lambda x: x[rows], agent.without_data(result.state))),
        registers=tuple(x[rows] for x in result.registers),
        evaluation=last,
        description={**result.description, **about, "config": {**result.description["config"], **first}},
        folder=None,
    )
