"""Statistics of scores over seeds and tasks, as Agarwal et al. recommend (2108.13264), and whether two sets of scores agree.

In the shape descriptions, `S` denotes the seeds of a task; tasks may have different numbers of them.
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

FALSE_ALARM = 0.01  # probability with which `agreement` finds a difference where there is none
_RESAMPLES = 2_000
_PERMUTATIONS, _BATCH = 20_000, 1_000  # of them at a time
_AT_ONCE = 2**24  # numbers in memory at most, unless one resample has more
_SAME = 1e-6  # relative difference of means that are the same
_TRIMMED = 0.25  # part of the scores that an interquartile mean leaves out at each end


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A statistic with its confidence interval; nan if there are too few scores for one."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        known = math.isfinite(self.high - self.low)
        digits = decimals(self.value, self.high - self.low if known else 0.0)
        return f"{self.value:.{digits}f}" + (f" [{self.low:.{digits}f}, {self.high:.{digits}f}]" if known else "")


def mean(scores: Any, axis: int = -1) -> Any:
    """The mean of scores `[..., S]`."""
    return np.mean(scores, axis=axis)


def interquartile_mean(scores: Any, axis: int = -1) -> Any:
    """The mean of the middle half of scores `[..., S]`."""
    return stats.trim_mean(scores, _TRIMMED, axis=axis)


def estimate(
    scores: Scores, statistic: Callable[..., Any] = interquartile_mean, *, confidence: float = 0.95, seed: int = 0
) -> Estimate:
    """A statistic of the scores of all tasks, with a stratified bootstrap interval: the seeds of every task are drawn anew.

    Args:
      scores: the scores of every task, `[S]` each; of several tasks, they should have the same scale.
      statistic: `mean`, `interquartile_mean`, or another function of `(scores, axis)`.
      confidence: probability that the interval holds the true value, by percentiles of the bootstrap. With few scores it is
        less: 95% become about 80% for the mean of five, and 90% for that of ten.
      seed: the seed of what is drawn.

    Returns:
      The estimate. Without an interval if a task has fewer than two scores.

    Raises:
      ValueError: if there are no tasks, or no scores of one, or if a score is not finite, or on a confidence that is none.
    """
    _check_share("confidence", confidence)
    if not callable(statistic):
        raise ValueError(f"statistic={shown(statistic)} is no function; give statistics.mean, or another one of (scores, axis)")
    tasks = _checked(scores)

    def joined(*each: np.ndarray, axis: int = -1) -> Any:
        return statistic(np.concatenate(each, axis=axis), axis=axis)

    return _bootstrapped(tasks, joined, confidence, seed, sum(map(len, tasks)))


def _bootstrapped(
    samples: list[np.ndarray], statistic: Callable[..., Any], confidence: float, seed: int, size: int
) -> Estimate:
    """A statistic of several samples, `(*samples, axis)`, with an interval for which each is drawn anew by itself; `size`
    numbers are needed for each resample."""
    rng = np.random.default_rng(check_seed(seed))
    value = float(statistic(*samples))
    if min(map(len, samples)) < 2:
        return Estimate(value, math.nan, math.nan)
    if all(np.ptp(sample) == 0 for sample in samples):  # whatever is drawn is the same
        return Estimate(value, value, value)
    interval = stats.bootstrap(
        samples, statistic, n_resamples=_RESAMPLES, vectorized=True, confidence_level=confidence, method="percentile",
        rng=rng, batch=max(1, _AT_ONCE // size),
    ).confidence_interval  # fmt: skip
    return Estimate(value, float(interval.low), float(interval.high))


def performance_profile(scores: Scores, thresholds: np.ndarray) -> np.ndarray:
    """The part of the runs whose score is above each threshold, the mean over the tasks.

    Args:
      scores: as in `estimate`.
      thresholds: scores `[N]`.

    Returns:
      Parts from 0 to 1, `[N]` float64.

    Raises:
      ValueError: as in `estimate`, and if the thresholds are not such numbers.
    """
    limits = _array(thresholds, "the thresholds")
    return np.mean([(task[:, None] > limits).mean(0) for task in _checked(scores)], axis=0)


def probability_of_improvement(ours: Scores, theirs: Scores, *, seed: int = 0) -> Estimate:
    """The probability that a run of ours has a higher score than one of theirs, ties counted half: the mean over the tasks.

    Args:
      ours: the scores of every task, `[S]` each.
      theirs: those of the same tasks.
      seed: the seed of the bootstrap, in which the seeds of every task are drawn anew.

    Returns:
      The estimate.

    Raises:
      ValueError: if there are not equally many tasks, and as in `estimate`.
    """
    ours, theirs = _checked(ours), _checked(theirs)
    if len(ours) != len(theirs):
        raise ValueError(f"there are {len(ours)} tasks of ours and {len(theirs)} of theirs; give the scores of the same tasks")
    pairs = list(zip(ours, theirs, strict=True))

    def above(*each: np.ndarray, axis: int = -1) -> Any:
        halves = zip(each[: len(pairs)], each[len(pairs) :], strict=True)
        wins = [np.sign(x[..., :, None] - y[..., None, :]).mean((-2, -1)) / 2 + 0.5 for x, y in halves]
        return np.mean(wins, axis=0)

    size = sum(len(x) * len(y) for x, y in pairs)
    return _bootstrapped([x for x, _ in pairs] + [y for _, y in pairs], above, 0.95, seed, size)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Whether the means of two sets of scores agree.

    Attributes:
      verdict: "too few" if no difference could have been found; else "agrees", also if the means differ by less than a
        millionth, or "does not agree".
      difference: the mean of the first ones without that of the second ones.
      probability: that a difference as large comes from chance alone, by a permutation test.
    """

    verdict: Literal["agrees", "does not agree", "too few"]
    difference: float
    probability: float


def agreement(ours: np.ndarray, theirs: np.ndarray, *, false_alarm: float = FALSE_ALARM, seed: int = 0) -> Agreement:
    """Whether two sets of scores may come from the same distribution: a permutation test of their means (exact for few).

    Args:
      ours: scores `[S]`.
      theirs: scores `[S]`, not necessarily as many.
      false_alarm: the largest probability of "does not agree" for scores of the same distribution.
      seed: the seed of the permutations, if there are too many to try all.

    Returns:
      The verdict.

    Raises:
      ValueError: if there are no scores, or if one is not finite.
    """
    _check_share("false_alarm", false_alarm)
    x, y = _array(ours, "ours"), _array(theirs, "theirs")
    rng = np.random.default_rng(check_seed(seed))
    difference = float(x.mean() - y.mean())
    if abs(difference) <= _SAME * max(abs(x.mean()), abs(y.mean())):  # of last bits, such as those of another processor
        difference = 0.0
    if _least(len(x), len(y)) > false_alarm:
        return Agreement("too few", difference, math.nan)
    if difference == 0:
        return Agreement("agrees", 0.0, 1.0)

    def apart(x: np.ndarray, y: np.ndarray, axis: int = -1) -> Any:
        return np.mean(x, axis=axis) - np.mean(y, axis=axis)

    found = stats.permutation_test(
        (x, y), apart, vectorized=True, n_resamples=_PERMUTATIONS, alternative="two-sided", rng=rng,
        batch=min(_BATCH, max(1, _AT_ONCE // (len(x) + len(y)))),
    )  # fmt: skip
    return Agreement("agrees" if found.pvalue > false_alarm else "does not agree", difference, float(found.pvalue))


def fewest(others: int) -> int | None:
    """The fewest scores with which `agreement` can find a difference from a number of others; None if there is only one."""
    if others < 2:
        return None
    return next(count for count in itertools.count(2) if _least(count, others) <= FALSE_ALARM)


def _least(ours: int, theirs: int) -> float:
    """The least probability that the permutation test can give; 1 where one side has one score, for which there is no test."""
    return max(2 / math.comb(ours + theirs, ours), 2 / (_PERMUTATIONS + 1)) if min(ours, theirs) > 1 else 1.0


def _check_share(name: str, value: float) -> None:
    if not isinstance(value, float | int) or not 0 < value < 1:
        raise ValueError(f"{name}={shown(value)} is not between 0 and 1; give a probability, such as 0.01 or 0.95")


def _checked(scores: Scores) -> list[np.ndarray]:
    if not isinstance(scores, Sequence | np.ndarray | jax.Array) or isinstance(scores, str):
        raise ValueError(f"scores of type {type(scores).__name__} are no list; give one with an array for each task, [S] each")
    if not len(scores):
        raise ValueError("there are no tasks; give the scores of at least one")
    return [_array(task, f"the scores of task {number}") for number, task in enumerate(scores)]


def _array(values: Any, what: str) -> np.ndarray:
    """Numbers as float64 `[N]`; raises ValueError if they are something else."""
    try:
        found = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{what} are no array ({error}); give numbers, [N]") from None
    if found.ndim != 1 or not len(found):
        remedy = "put those of one task into a list, [scores]" if found.ndim == 0 else "give one for each seed, [S]"
        raise ValueError(f"{what} have shape {list(found.shape)}; {remedy}")
    if not any(jnp.issubdtype(found.dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)):
        raise ValueError(f"{what} are of type {found.dtype}; give real numbers")
    if np.ma.is_masked(values):
        raise ValueError(f"{what} are masked in part; leave such runs out, and say so")
    found = found.astype(np.float64)
    if not np.isfinite(found).all():
        raise ValueError(f"{what} are not all finite; leave such runs out, and say so")
    return found
