"""The search space of a sweep: the swept fields of a config, the trials and their ranks, and the order of training."""

import dataclasses
import importlib.util
import itertools
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args, get_origin

import jax
import numpy as np

from msrl_jax import algorithms
from msrl_jax.agents.schedules import is_adaptive, is_ramp
from msrl_jax.configs.names import all_fields
from msrl_jax.configs.replacing import import_options
from msrl_jax.envs.param_distributions import ParamDistribution, choice, is_value, parse_param
from msrl_jax.fragments.support import naming
from msrl_jax.fragments.support.checks import suggestion, whole
from msrl_jax.fragments.support.text_values import split_specs
from msrl_jax.run.evaluation.history import in_words
from msrl_jax.run.prepare import is_several

_MOST_TRIALS = 2**20  # all trials are in memory

Method: TypeAlias = Literal["random", "grid", "sobol", "optuna"]  # how the trials of a sweep are chosen


@dataclasses.dataclass(frozen=True)
class Axis:
    """A swept field."""

    field: str
    values: ParamDistribution  # its options (`choice`), or the distribution of its values
    is_whole: bool  # whether its values are integers

    @property
    def is_log(self) -> bool:
        """Whether the values are log-uniform."""
        return self.values.kind == "log_uniform"

    def at(self, fraction: float) -> Any:
        """Returns the quantile of the values at a fraction in [0, 1)."""
        if self.values.kind == "choice":
            return self.values.numbers[int(fraction * len(self.values.numbers))]
        low, high = self.values.numbers
        upper = high + 1 if self.is_whole else high  # each integer has its own interval
        value = low + fraction * (upper - low)
        if self.is_log:
            value = math.exp(math.log(low) + fraction * (math.log(upper) - math.log(low)))
        return min(max(math.floor(value) if self.is_whole else value, low), high)

    def points(self, count: int | None) -> list[Any]:
        """Returns the grid values: all options, or `count` values between the bounds, spaced evenly or logarithmically."""
        if self.values.kind == "choice":
            return list(self.values.numbers)
        if count is None:
            raise ValueError(
                f'{self.field}={self.values} with method="grid": a grid over a range needs num=, the points per field; '
                "give it, or a list of values"
            )
        low, high = self.values.numbers
        values = (np.geomspace if self.is_log else np.linspace)(low, high, count).tolist()
        return list(dict.fromkeys(map(round, values))) if self.is_whole else values


def read_axes(kind: type, fields: Mapping[str, Any]) -> tuple[list[Axis], dict[str, Any]]:
    """Splits the given fields of a config into swept fields and constants; raises ValueError if a value is invalid."""
    import_options(kind, fields)
    hints = {name: f.type for name, f in all_fields(kind).items()}
    if unknown_fields := fields.keys() - hints.keys():
        algorithms.make(kind, {min(unknown_fields): None})  # raises an error that suggests the nearest field
    axes, constants = [], {}
    for field, value in fields.items():
        setting = _read_field(f"{kind.__name__}.{field}", value, hints[field])
        if isinstance(setting, ParamDistribution):
            axes.append(Axis(field, setting, _is_whole(hints[field])))
        else:
            constants[field] = setting
    if not axes:
        raise ValueError(
            "no field has several values; give one of them a list, a distribution (envs.uniform, envs.log_uniform) or text "
            "such as log:1e-4:1e-2, or use train"
        )
    return axes, constants


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if type(None) in get_args(hint) else (hint,)


def _is_whole(hint: Any) -> bool:
    return int in _alternatives(hint) and float not in _alternatives(hint)


def _read_field(place: str, value: Any, hint: Any) -> Any:
    """Returns a distribution if the field is swept, else its value."""
    is_number = bool({int, float} & set(_alternatives(hint)))
    if isinstance(value, str) and is_number:
        parts = split_specs(value)
        schedules = [is_ramp(item) or is_adaptive(item) or naming.is_path(item) for item in parts]
        if any(schedules):
            value = [
                item if is_schedule else parse_param(place, item) for item, is_schedule in zip(parts, schedules, strict=True)
            ]
        value = parse_param(place, value) if isinstance(value, str) else value[0] if len(value) == 1 else value
    if isinstance(value, np.ndarray | jax.Array):
        value = np.asarray(value).tolist()
    if is_several(value):
        options: list[Any] = list(value)
        if all(get_origin(part) is not tuple for part in _alternatives(hint)):
            value = choice(options)
        elif options and all(isinstance(item, list | tuple) for item in options):
            value = choice([tuple(item) for item in options])
    if not is_value(value):
        return _read_number(place, value, hint)
    if not isinstance(value, ParamDistribution):
        raise ValueError(f"{place}={value}: envs.ramp is for parameters of environments; give a distribution or a list")
    if not value.numbers:
        raise ValueError(f"{place} has no values; give at least one")
    bounds: Any = tuple(_read_number(place, item, hint) for item in value.numbers)
    if value.kind == "choice":
        return choice(bounds)
    if not is_number:
        raise ValueError(f"{place}={value}: a range needs a field of numbers; give a list of values")
    low, high = bounds
    fine = (
        all(isinstance(item, numbers.Real) and not isinstance(item, bool) and math.isfinite(item) for item in bounds)
        and low <= high
    )
    if not fine or (value.kind == "log_uniform" and low <= 0):
        raise ValueError(f"{place}={value}: give numbers low <= high{' above 0' * (value.kind == 'log_uniform')}")
    return dataclasses.replace(value, numbers=bounds)


def _read_number(place: str, value: Any, hint: Any) -> Any:
    """Converts a single value to plain Python data; to an integer for an integer field."""
    value = value.item() if isinstance(value, np.generic) else value
    if is_value(value):
        raise ValueError(f"{place}: {value} is nested in a list or another distribution; use numbers")
    return int(value) if _is_whole(hint) and isinstance(value, float) and value.is_integer() else value


def choose_trials(axes: Sequence[Axis], method: str, num: int | None, seed: int) -> list[dict[str, Any]]:
    """Chooses the values of all trials, with any method except "optuna"; drops duplicates, which few options soon give."""
    names = [axis.field for axis in axes]
    if method == "grid":
        if num is not None and all(axis.values.kind == "choice" for axis in axes):
            raise ValueError(f'num={num} with method="grid": the trials are the combinations of the lists; leave num out')
        rows = itertools.product(*(axis.points(num) for axis in axes))
    else:
        assert num is not None
        random = np.random.default_rng(seed)
        if method == "sobol":  # Sobol, 1967; scrambled
            from scipy.stats import qmc  # a slow import

            # Sobol points are balanced in powers of two, so draw a power of two and take the first points.
            fractions = qmc.Sobol(len(axes), rng=random).random_base2(math.ceil(math.log2(num)))[:num]
        else:
            fractions = random.random((num, len(axes)))
        rows = ([axis.at(u) for axis, u in zip(axes, row, strict=True)] for row in fractions.tolist())
    return list({repr(row): row for row in (dict(zip(names, row, strict=True)) for row in rows)}.values())


def check_method(method: object, num: int | None, halving: object) -> int | None:
    """Checks the method of a sweep and its arguments; returns the number of trials."""
    methods = get_args(Method)
    if method not in methods:
        hint = suggestion(method, methods) if isinstance(method, str) else ""
        raise ValueError(f"method={method!r}{hint}; use one of {', '.join(methods)}")
    if num is None and method != "grid":
        raise ValueError(f'method="{method}" needs num=, the number of trials; method="grid" takes all combinations of lists')
    if method == "optuna" and halving is not None:
        raise ValueError('halving= does not work with method="optuna", which chooses trials one after another; leave it out')
    if method == "optuna" and importlib.util.find_spec("optuna") is None:
        raise ImportError("method=\"optuna\" needs the package optuna: pip install optuna (or 'msrl-jax[optuna]')")
    return None if num is None else whole("num", num, most=_MOST_TRIALS)


@dataclasses.dataclass(frozen=True)
class Trial:
    """A trial of a sweep and its results."""

    number: int  # from 0
    values: Mapping[str, Any]  # of the swept fields
    program: int  # trials of one program differ only in numbers, and are vmapped together
    steps: int = 0  # steps done by each of its members
    rung: int = 0  # the last rung of successive halving that it finished
    # The return of each seed after these steps; nan for a member whose parameters are not finite. Empty without training.
    returns: tuple[float, ...] = ()
    metrics: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict[str, tuple[float, ...]])  # likewise
    rank_by: str = "return"  # or the name of a metric
    rank: int | None = None  # 1 for the best: trials of a higher rung come first, then those with a higher mean
    run: int | None = None  # the number of the run that trained it last, in `SweepResult.runs`
    member: int = 0  # the number of its first member in this run

    @property
    def scores(self) -> tuple[float, ...]:
        """The score of each seed, which ranks the trial: the return, or the metric `rank_by`."""
        return self.returns if self.rank_by == "return" else self.metrics.get(self.rank_by, ())

    @property
    def mean(self) -> float:
        """The mean score of its seeds; nan if one of them is nan."""
        return mean_objective(self.scores)

    @property
    def min(self) -> float:
        """The lowest score of its seeds."""
        return math.nan if math.isnan(self.mean) else min(self.scores)

    @property
    def max(self) -> float:
        """The highest score of its seeds."""
        return math.nan if math.isnan(self.mean) else max(self.scores)

    def __str__(self) -> str:
        return f"trial {self.number} ({in_words(self.values)})"


def mean_objective(values: Sequence[float]) -> float:
    """Returns the mean; nan if a value is nan, or without values."""
    return math.fsum(values) / len(values) if values else math.nan


def ranked(trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """Returns the trials with their ranks, by number."""
    trials = sorted(trials, key=lambda trial: trial.number)
    ranks = {t.number: rank for rank, t in enumerate(sorted((t for t in trials if t.returns), key=by_return), 1)}
    return tuple(dataclasses.replace(trial, rank=ranks.get(trial.number)) for trial in trials)


def by_return(trial: Trial) -> tuple[Any, ...]:
    """Returns a key that sorts trials from the best to the worst; nan comes last."""
    return -trial.rung, math.isnan(trial.mean), 0.0 if math.isnan(trial.mean) else -trial.mean, trial.number


def survivors(trials: Sequence[Trial], factor: int) -> list[Trial]:
    """Returns the best `1 / factor` of the trials, at least one; never a trial whose return is nan."""
    best = sorted(trials, key=by_return)[: -(-len(trials) // factor)]
    return sorted((trial for trial in best if not math.isnan(trial.mean)), key=lambda trial: trial.number)


class Stage(NamedTuple):
    """Trials to train next, and the steps after which to compare them.

    When a generator of stages resumes, it finds the returns of the last stage in `trials`, the trials by number.
    """

    trials: Sequence[Trial]
    until: int
    rung: int = 0  # of successive halving


def halving_stages(trials: Mapping[int, Trial], steps: Sequence[int], factor: int | None) -> Iterator[Stage]:
    """Yields stages: all trials up to the first number of steps, then the best `1 / factor` of them up to the next number."""
    alive = list(trials.values())
    for i, until_steps in enumerate(steps):
        yield Stage(alive, until_steps, i)
        if factor is not None:
            alive = survivors([trials[trial.number] for trial in alive], factor)
        if not alive:
            return


def optuna_stages(
    trials: Mapping[int, Trial],
    axes: Sequence[Axis],
    make: Callable[[Sequence[Mapping[str, Any]], int], Sequence[Trial]],
    *,
    num: int,
    trials_per_stage: int,
    steps: int,
    seed: int,
) -> Iterator[Stage]:
    """Asks a study of Optuna for `num` trials, `trials_per_stage` in a stage, made by `make`, and tells it their returns."""
    optuna = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    for first_number in range(0, num, trials_per_stage):
        suggestions = [study.ask() for _ in range(min(trials_per_stage, num - first_number))]
        yield Stage(
            make([{axis.field: _suggest_value(ask, axis) for axis in axes} for ask in suggestions], first_number), steps
        )
        for number, ask in enumerate(suggestions, first_number):
            mean = trials[number].mean
            failed = math.isnan(mean)
            state = optuna.trial.TrialState.FAIL if failed else optuna.trial.TrialState.COMPLETE
            study.tell(ask, None if failed else mean, state)


def _suggest_value(ask: Any, axis: Axis) -> Any:
    numbers = axis.values.numbers
    if axis.values.kind == "choice":  # the study gets option indices, because options may have any type
        return numbers[ask.suggest_categorical(axis.field, list(range(len(numbers))))]
    return (ask.suggest_int if axis.is_whole else ask.suggest_float)(axis.field, *numbers, log=axis.is_log)


def rung_steps(total_steps: int, factor: int | None, min_steps: int | None, trials: int, min_first: int) -> list[int]:
    """Returns the steps after which trials are compared, the total last (Jamieson and Talwalkar, 2016, arXiv 1502.07943).

    `min_first` is the number of steps of one iteration, or until the first update.
    """
    if factor is None:
        if min_steps is not None:
            raise ValueError(f"min_steps={min_steps} has no effect without halving=; give the factor, such as halving=3")
        return [total_steps]
    factor = whole("halving", factor, least=2)
    if min_steps is None:
        count = 1
        while factor**count <= trials and total_steps // factor**count >= min_first:
            count += 1
        steps = [total_steps // factor**i for i in reversed(range(count))]
    else:
        steps = [whole("min_steps", min_steps)]
        while steps[-1] * factor < total_steps:
            steps.append(steps[-1] * factor)
        steps.append(total_steps)
    if steps[0] < min_first or steps[0] >= total_steps:
        raise ValueError(
            f"halving={factor}: the first comparison is after {steps[0]} of total_steps={total_steps}; it needs at least the "
            f"{min_first} steps of one iteration and up to the first update, and fewer than all"
        )
    return steps
