"""Some members of a run as a run of their own, to act with, to save, and to go on with."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from msrl_jax.experiment.agents import map_members
from msrl_jax.experiment.evaluate import Evaluation
from msrl_jax.experiment.spec import Experiment

Result: TypeAlias = Any
"""A `msrl_jax.Result`, whose methods call this module."""


def select_settings(result: Result, settings: Sequence[int]) -> Result:
    """The members of some settings with all their seeds, in this order; raises ValueError if there are no such settings."""
    was, seeds = result.experiment.settings, result.seeds
    count = len(next(iter(was.values()))) if was else 0
    chosen: list[Any] = np.atleast_1d(np.asarray(settings, object)).tolist()
    if not chosen or len(set(chosen)) < len(chosen) or not all(_is_number(x) and 0 <= x < count for x in chosen):
        has = f"settings 0 to {count - 1}" if count else "one setting; select(member=0) takes one of its seeds"
        raise ValueError(f"settings={settings!r}: this run has {has}; name some of them, each once")
    rows = np.array([s * seeds + i for s in chosen for i in range(seeds)])
    return _of_rows(result, rows, settings={name: tuple(values[s] for s in chosen) for name, values in was.items()})


def select_member(result: Result, member: int | None) -> Result:
    """One member (the best one if None) as a run of one seed; with one setting, if the members differ in their config."""
    number = result.member(member)
    if not result.has_members:
        return result
    setting = dict(result.settings[number])
    seed = setting.pop("seed")
    if not setting:
        return _of_rows(result, number, seed=seed, seeds=1)
    return _of_rows(result, np.array([number]), seed=seed, seeds=1, settings={name: (x,) for name, x in setting.items()})


def _is_number(x: Any) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def _of_rows(result: Result, rows: np.ndarray | int, **changes: Any) -> Result:
    if result.experiment.pbt:
        raise ValueError("the members of a population evolve together, so some are no run; act and evaluate take member=")
    agent, members = result.behavior.agent, result.members

    def column(x: np.ndarray) -> np.ndarray:
        return x[:, rows] if x.ndim > 1 and x.shape[1] == members else x

    last = result.evaluation
    if last is not None:
        fields = [f.name for f in dataclasses.fields(Evaluation)]
        last = Evaluation(**{name: jax.tree.map(lambda x: x[rows], getattr(last, name)) for name in fields})
    state = map_members(lambda x: x[rows], agent.without_data(result.run_state))
    return dataclasses.replace(
        with_experiment(result, changed(result.experiment, **changes)),
        history={name: column(x) for name, x in result.history.items()},
        run_state=agent.with_data(state),
        registers=tuple(x[rows] for x in result.registers),
        evaluation=last,
        folder=None,
    )


def changed(experiment: Experiment, **changes: Any) -> Experiment:
    """An experiment with other members; its config has the numbers of the first setting."""
    first = {name: values[0] for name, values in changes.get("settings", {}).items()}
    return experiment.replaced(**changes, algorithm=dataclasses.replace(experiment.algorithm, **first))


def with_experiment(result: Result, experiment: Experiment) -> Result:
    """A result with another experiment, and a description that says so; the data set of a loaded one is described as it was."""
    about = experiment.to_json()
    if about["data"] is None:
        about |= {"data": result.description["data"]}
        about["config"] |= {"data": result.description["config"]["data"]} if "data" in about["config"] else {}
    return dataclasses.replace(result, experiment=experiment, description={**result.description, **about})
