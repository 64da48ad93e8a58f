"""The order of a sweep: which trials are trained next, and for how long, from what is known of those before."""

import importlib
import importlib.util
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from msrl_jax.search.space import Axis
from msrl_jax.search.sw_halving import survivors
from msrl_jax.search.sw_trials import Trial


class Stage(NamedTuple):
    """Trials that are trained next, side by side.

    Attributes:
      trials: the trials.
      until: the steps after which they are compared.
      rung: the rung of successive halving.
    """

    trials: Sequence[Trial]
    until: int
    rung: int = 0


Order: TypeAlias = Generator[Stage, Sequence[Trial], None]
"""Gives stages, and is sent the trials of each with their returns."""


def rungs(trials: Sequence[Trial], steps: Sequence[int], factor: int | None) -> Order:
    """Trains all trials to the first number of steps, and the best of them further.

    Args:
      trials: the trials.
      steps: the steps of each rung.
      factor: one of this many goes on.
    """
    alive = list(trials)
    for i, until in enumerate(steps):
        done = yield Stage(alive, until, i)
        if i + 1 < len(steps):
            assert factor is not None
            alive = survivors(done, factor)
        if not alive:
            return


def asked(
    axes: Sequence[Axis], make: Callable[[Sequence[Mapping[str, Any]], int], Sequence[Trial]], *, num: int, each: int,
    until: int, seed: int,
) -> Order:  # fmt: skip
    """Asks a study of Optuna for trials, and tells it their returns.

    Args:
      axes: the swept fields.
      make: makes trials of their values and the number of the first.
      num: number of trials.
      each: trials of a stage.
      until: steps of each trial.
      seed: seed of the study.
    """
    optuna = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=seed)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for first in range(0, num, each):
        asks = [study.ask() for _ in range(min(each, num - first))]
        done = yield Stage(make([{axis.field: _suggested(ask, axis) for axis in axes} for ask in asks], first), until)
        for ask, trial in zip(asks, done, strict=True):
            failed = math.isnan(trial.mean)
            state = optuna.trial.TrialState.FAIL if failed else optuna.trial.TrialState.COMPLETE
            study.tell(ask, None if failed else trial.mean, state)


def check_optuna() -> None:
    """Raises ImportError if Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise ImportError('method="optuna" needs the package optuna: pip install optuna (or \'msrl-jax[optuna]\')')


def _suggested(ask: Any, axis: Axis) -> Any:
    numbers = axis.values.numbers
    if axis.values.kind == "choice":  # a study knows options by their number, which may be of any kind
        return numbers[ask.suggest_categorical(axis.field, list(range(len(numbers))))]
    suggest = ask.suggest_int if axis.is_whole else ask.suggest_float
    return suggest(axis.field, *numbers, log=axis.is_log)
