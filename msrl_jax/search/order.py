"""The order of a sweep: which trials are trained next, and for how long, from what is known of those before."""

import importlib
import importlib.util
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from msrl_jax._checks import whole
from msrl_jax.search.space import Axis
from msrl_jax.search.trials import Trial, survivors


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
    """Trains all trials to the first of these numbers of steps, and the best, one of `factor`, to the next one."""
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
    """Asks a study of Optuna for `num` trials, `each` in a stage, and tells it their returns.

    `make` makes trials of their values and the number of the first.
    """
    optuna = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
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
    return (ask.suggest_int if axis.is_whole else ask.suggest_float)(axis.field, *numbers, log=axis.is_log)


def rung_steps(
    total_steps: int, factor: int | None, rungs: int | None, min_steps: int | None, trials: int, least: int
) -> list[int]:
    """The steps after which trials are compared, and at last those of all (Jamieson and Talwalkar, 2016, arXiv 1502.07943).

    Args:
      total_steps: steps of the trials that go on to the end.
      factor: one of this many trials goes on; None trains all to the end.
      rungs: number of comparisons, the last one included; None for as many as leave one trial.
      min_steps: steps of the first rung, in place of `rungs`; each rung has `factor` times as many.
      trials: number of trials.
      least: steps of one iteration.
    """
    if factor is None:
        for name, value in (("rungs", rungs), ("min_steps", min_steps)):
            if value is not None:
                raise ValueError(f"{name}={value} has no effect without halving=; give the factor, such as halving=3")
        return [total_steps]
    factor = whole("halving", factor, least=2)
    if rungs is not None and min_steps is not None:
        raise ValueError(f"rungs={rungs} and min_steps={min_steps} both choose the first rung; leave one out")
    if min_steps is not None:
        found, given = [whole("min_steps", min_steps)], f"min_steps={min_steps}"
        while found[-1] * factor < total_steps:
            found.append(found[-1] * factor)
        found.append(total_steps)
    else:
        count = 1 if rungs is None else whole("rungs", rungs, least=2)
        while rungs is None and factor**count <= trials and total_steps // factor**count >= least:
            count += 1
        found, given = [total_steps // factor**i for i in reversed(range(count))], f"halving={factor} with rungs={count}"
    if found[0] < least or found[0] >= total_steps:
        raise ValueError(
            f"{given}: the first rung has {found[0]} of total_steps={total_steps}; it needs at least the {least} steps of one "
            "iteration, and fewer than all"
        )
    return found
