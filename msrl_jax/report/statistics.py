"""Statistics of scores over seeds and tasks, as Agarwal et al. recommend (2108.13264), and whether two sets of scores agree.

In the shape descriptions, `S` denotes the number of seeds of a task, which may differ between tasks.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from msrl_jax.fragments.support.checks import check_seed, shown
from msrl_jax.run.evaluation.history import decimals

Scores: TypeAlias = Sequence[np.ndarray]  # the scores of each task. `[S]` each

FALSE_ALARM = 0.01  # probability that `agreement` finds a difference between equal distributions
_RESAMPLES = 2_000
_PERMUTATIONS, _BATCH = 20_000, 1_000  # permutations, and permutations per batch
_AT_ONCE = 2**24  # maximum count of numbers in memory, unless one resample has more
_SAME = 1e-6  # relative difference below which means count as equal
_TRIMMED = 0.25  # fraction of scores that the interquartile mean drops at each end


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A statistic with its confidence interval; nan if there are too few scores for one."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        has_interval = math.isfinite(self.high - self.low)
        digits = decimals(self.value, self.high - self.low if has_interval else 0.0)
        return f"{self.value:.{digits}f}" + (f" [{self.low:.{digits}f}, {self.high:.{digits}f}]" if has_interval else "")


def mean(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    """Returns the mean of scores `[..., S]`."""
    return np.mean(scores, axis=axis)


def interquartile_mean(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    """Returns the mean of the middle half of scores `[..., S]`."""
    return stats.trim_mean(scores, _TRIMMED, axis=axis)


def estimate(
    scores: Scores, statistic: Callable[..., np.ndarray] = interquartile_mean, *, confidence: float = 0.95, seed: int = 0
) -> Estimate:
    """Estimates a statistic of the scores of all tasks, with a stratified bootstrap interval: seeds are resampled per task.

    Args:
      scores: the scores of every task, `[S]` each; scores of several tasks should have the same scale.
      statistic: `mean`, `interquartile_mean`, or another function of `(scores, axis)`.
      confidence: nominal probability that the percentile interval contains the true value. With few scores, the actual
        probability is lower: for 95%, about 80% for the mean of five scores, and 90% for the mean of ten.
      seed: the seed of the bootstrap.

    Returns:
      The estimate, without an interval if a task has fewer than two scores.

    Raises:
      ValueError: if `scores` is empty, a task has no scores, a score is not finite, or `confidence` is invalid.
    """
    _check_share("confidence", confidence)
    if not callable(statistic):
        raise ValueError(f"statistic={shown(statistic)} is not a function; use one of (scores, axis), such as statistics.mean")
    tasks = _check_scores(scores)

    def joined(*samples: np.ndarray, axis: int = -1) -> np.ndarray:
        return statistic(np.concatenate(samples, axis=axis), axis=axis)

    return _bootstrap(tasks, joined, confidence, seed, sum(map(len, tasks)))


def _bootstrap(
    samples: list[np.ndarray], statistic: Callable[..., np.ndarray], confidence: float, seed: int, size: int
) -> Estimate:
    """Estimates a statistic of several samples, `(*samples, axis)`, with an interval; each sample is resampled independently.
    Every resample needs `size` numbers."""
    rng = np.random.default_rng(check_seed(seed))
    value = float(statistic(*samples))
    if min(map(len, samples)) < 2:
        return Estimate(value, math.nan, math.nan)
    if all(np.ptp(sample) == 0 for sample in samples):  # all resamples are equal
        return Estimate(value, value, value)
    interval = stats.bootstrap(
        samples,
        statistic,
        n_resamples=_RESAMPLES,
        vectorized=True,
        confidence_level=confidence,
        method="percentile",
        rng=rng,
        batch=max(1, _AT_ONCE // size),
    ).confidence_interval
    return Estimate(value, float(interval.low), float(interval.high))


def performance_profile(scores: Scores, thresholds: np.ndarray) -> np.ndarray:
    """Returns the fraction of runs with a score above each threshold, averaged over tasks.

    Args:
      scores: as in `estimate`.
      thresholds: scores `[N]`.

    Returns:
      Fractions from 0 to 1, `[N]` float64.

    Raises:
      ValueError: as in `estimate`, and if the thresholds are not valid numbers.
    """
    limits = _check_array(thresholds, "the thresholds")
    return np.mean([(task[:, None] > limits).mean(0) for task in _check_scores(scores)], axis=0)


def probability_of_improvement(ours: Scores, theirs: Scores, *, seed: int = 0) -> Estimate:
    """Estimates the probability that a run of ours scores higher than one of theirs, averaged over tasks; ties count half.

    Args:
      ours: the scores of every task, `[S]` each.
      theirs: the other scores of the same tasks.
      seed: the seed of the bootstrap, which resamples the seeds of every task.

    Returns:
      The estimate.

    Raises:
      ValueError: if the numbers of tasks differ, and as in `estimate`.
    """
    ours, theirs = _check_scores(ours), _check_scores(theirs)
    if len(ours) != len(theirs):
        raise ValueError(f"there are {len(ours)} tasks of ours and {len(theirs)} of theirs; give the scores of the same tasks")
    pairs = list(zip(ours, theirs, strict=True))

    def above(*samples: np.ndarray, axis: int = -1) -> np.ndarray:
        halves = zip(samples[: len(pairs)], samples[len(pairs) :], strict=True)
        wins = [np.sign(x[..., :, None] - y[..., None, :]).mean((-2, -1)) / 2 + 0.5 for x, y in halves]
        return np.mean(wins, axis=0)

    size = sum(len(x) * len(y) for x, y in pairs)
    return _bootstrap([x for x, _ in pairs] + [y for _, y in pairs], above, 0.95, seed, size)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Whether the means of two sets of scores agree.

    Attributes:
      verdict: "too few" if the test could not find any difference; else "agrees" or "does not agree". Means with a relative
        difference below a millionth agree.
      difference: the mean of the first scores minus the mean of the second scores.
      probability: the p-value of the permutation test.
    """

    verdict: Literal["agrees", "does not agree", "too few"]
    difference: float
    probability: float


def agreement(ours: np.ndarray, theirs: np.ndarray, *, false_alarm: float = FALSE_ALARM, seed: int = 0) -> Agreement:
    """Tests whether two sets of scores may come from the same distribution: a permutation test of means (exact for few scores).

    Args:
      ours: scores `[S]`.
      theirs: scores `[S]`; the number may differ.
      false_alarm: the largest probability of "does not agree" for scores of the same distribution.
      seed: the seed of the permutations, if there are too many to try them all.

    Returns:
      The verdict.

    Raises:
      ValueError: if `ours` or `theirs` is empty, or if a score is not finite.
    """
    _check_share("false_alarm", false_alarm)
    x, y = _check_array(ours, "ours"), _check_array(theirs, "theirs")
    rng = np.random.default_rng(check_seed(seed))
    difference = float(x.mean() - y.mean())
    if abs(difference) <= _SAME * max(abs(x.mean()), abs(y.mean())):  # rounding differences, such as on another processor
        difference = 0.0
    if _smallest_p_value(len(x), len(y)) > false_alarm:
        return Agreement("too few", difference, math.nan)
    if difference == 0:
        return Agreement("agrees", 0.0, 1.0)

    def apart(x: np.ndarray, y: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.mean(x, axis=axis) - np.mean(y, axis=axis)

    test = stats.permutation_test(
        (x, y),
        apart,
        vectorized=True,
        n_resamples=_PERMUTATIONS,
        alternative="two-sided",
        rng=rng,
        batch=min(_BATCH, max(1, _AT_ONCE // (len(x) + len(y)))),
    )
    return Agreement("agrees" if test.pvalue > false_alarm else "does not agree", difference, float(test.pvalue))


def fewest(count_of_others: int) -> int | None:
    """Returns the fewest scores with which `agreement` can find a difference from `count_of_others` scores; None for one."""
    if count_of_others < 2:
        return None
    return next(count for count in itertools.count(2) if _smallest_p_value(count, count_of_others) <= FALSE_ALARM)


def _smallest_p_value(ours: int, theirs: int) -> float:
    """Returns the smallest p-value of the permutation test; 1 if one side has a single score, which cannot be tested."""
    return max(2 / math.comb(ours + theirs, ours), 2 / (_PERMUTATIONS + 1)) if min(ours, theirs) > 1 else 1.0


def _check_share(name: str, value: float) -> None:
    if not isinstance(value, float | int) or not 0 < value < 1:
        raise ValueError(f"{name}={shown(value)} is not between 0 and 1; give a probability, such as 0.01 or 0.95")


def _check_scores(scores: Scores) -> list[np.ndarray]:
    if not isinstance(scores, Sequence | np.ndarray | jax.Array) or isinstance(scores, str):
        raise ValueError(f"scores of type {type(scores).__name__} are not a list; give an array [S] for each task")
    if not len(scores):
        raise ValueError("the list of tasks is empty; give the scores of at least one")
    return [_check_array(task, f"the scores of task {number}") for number, task in enumerate(scores)]


def _check_array(values: Any, name: str) -> np.ndarray:
    """Converts numbers to float64 `[N]`; raises ValueError if they are something else."""
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} are not an array ({error}); give numbers, [N]") from None
    if array.ndim != 1 or not len(array):
        remedy = "put those of one task into a list, [scores]" if array.ndim == 0 else "give one for each seed, [S]"
        raise ValueError(f"{name} have shape {list(array.shape)}; {remedy}")
    if not any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)):
        raise ValueError(f"{name} are of type {array.dtype}; give real numbers")
    if np.ma.is_masked(values):
        raise ValueError(f"{name} are partly masked; leave such runs out, and say so")
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise ValueError(f"{name} are not all finite; leave such runs out, and say so")
    return array
