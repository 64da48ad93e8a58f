"""Statistics of scores against references of their own, and how often sets of scores are said to agree."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from msrl_jax.report import statistics
from msrl_jax.report.statistics import (
    agreement,
    estimate,
    interquartile_mean,
    mean,
    performance_profile,
    probability_of_improvement,
)

RNG = np.random.default_rng(7)
TASKS = [RNG.normal(1.0, 0.3, 10), RNG.normal(2.0, 1.0, 10), RNG.exponential(1.0, 10)]
OTHERS = [task + 0.4 for task in TASKS]


def by_hand(statistic, count=2_000):
    """The 95% interval of a statistic of all scores: in each of many loops, the seeds of every task are drawn anew."""
    rng, drawn = np.random.default_rng(3), []
    for _ in range(count):
        drawn.append(statistic(np.concatenate([rng.choice(task, len(task)) for task in TASKS])))
    return np.percentile(drawn, [2.5, 97.5])


def test_the_interquartile_mean_is_that_of_the_middle_half():
    assert interquartile_mean(np.array([100.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -50.0])) == np.mean([2.0, 3.0, 4.0, 5.0])


@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
def test_intervals_are_those_of_a_stratified_bootstrap(statistic):
    found, (low, high) = estimate(TASKS, statistic), by_hand(statistic)
    assert found.value == pytest.approx(statistic(np.concatenate(TASKS)))
    # Of 2,000 draws, an end of the interval has a deviation of about 2% of its width.
    assert abs(found.low - low) < 0.1 * (high - low) > abs(found.high - high)
    assert estimate(TASKS, statistic) == found


@pytest.mark.parametrize(("seeds", "least", "most"), [(5, 0.70, 0.90), (10, 0.84, 0.96)])
def test_intervals_of_few_scores_hold_the_mean_as_often_as_their_page_says(seeds, least, most):
    """About 80% and 90%, not 95%. Where the true part is 0.81 and 0.90, the bounds are missed with a probability below 0.1%."""
    rng = np.random.default_rng(13)
    intervals = [estimate([rng.normal(0.0, 1.0, seeds)], mean) for _ in range(300)]
    assert least < np.mean([each.low < 0 < each.high for each in intervals]) < most


def test_rliable_finds_the_same():
    rliable = pytest.importorskip("rliable.library", reason="rliable is not installed")
    metrics = pytest.importorskip("rliable.metrics")
    scores = {"ours": np.stack(TASKS, axis=1)}
    points, intervals = rliable.get_interval_estimates(scores, lambda x: np.array([metrics.aggregate_iqm(x)]), reps=5_000)
    found, (low, high) = estimate(TASKS), intervals["ours"][:, 0]
    assert found.value == pytest.approx(points["ours"][0])
    assert abs(found.low - low) < 0.1 * (high - low) > abs(found.high - high)
    theirs = metrics.probability_of_improvement(np.stack(OTHERS, axis=1), np.stack(TASKS, axis=1))
    assert probability_of_improvement(OTHERS, TASKS).value == pytest.approx(theirs)
    taus = np.linspace(0, 3, 7)
    profile, _ = rliable.create_performance_profile(scores, taus, reps=100)
    np.testing.assert_allclose(performance_profile(TASKS, taus), profile["ours"])


def test_improvement_is_the_u_statistic_of_mann_and_whitney():
    ours = [np.array([1.0, 2.0, 2.0]), np.array([5.0, 0.0])]
    theirs = [np.array([2.0, 0.0, 1.0, 1.0]), np.array([1.0, 1.0])]
    pairs = zip(ours, theirs, strict=True)
    expected = np.mean([stats.mannwhitneyu(x, y).statistic / (len(x) * len(y)) for x, y in pairs])
    found = probability_of_improvement(ours, theirs)
    assert found.value == pytest.approx(expected) and found.low <= found.value <= found.high
    assert probability_of_improvement([np.zeros(3)], [np.zeros(4)]).value == 0.5


def test_a_profile_counts_the_runs_above_each_threshold():
    found = performance_profile([np.array([1.0, 2.0, 3.0]), np.array([0.0, 4.0])], np.array([0.0, 2.0, 4.0]))
    np.testing.assert_allclose(found, [(3 / 3 + 1 / 2) / 2, (1 / 3 + 1 / 2) / 2, 0.0])


def test_scores_of_one_distribution_seldom_disagree():
    """At 1%, 12 or more false alarms in 400 pairs have a probability of 0.1%; ties, as of solved tasks, make none."""
    rng = np.random.default_rng(11)
    alarms = 0
    for _ in range(400):
        x, y = rng.exponential(1.0, (2, 5))
        alarms += agreement(x, y).verdict == "does not agree"
    assert stats.binom.sf(11, 400, statistics.FALSE_ALARM) < 1.2e-3 and alarms < 12
    assert agreement(np.full(10, 500.0), np.full(10, 500.0)).verdict == "agrees"
    assert agreement(np.full(10, 500.0), np.array([*[500.0] * 9, 499.0])).verdict == "agrees"


def test_a_difference_is_found_where_there_are_enough_seeds():
    rng = np.random.default_rng(5)
    x, y = rng.normal(0.0, 1.0, 10), rng.normal(3.0, 1.0, 10)
    found = agreement(x, y)
    assert found.verdict == "does not agree" and found.probability < 0.001
    assert found.difference == pytest.approx(x.mean() - y.mean())
    few = agreement(x[:3], y[:3])
    assert few.verdict == "too few" and math.isnan(few.probability)
    assert agreement(x[:1], rng.normal(0.0, 1.0, 300)).verdict == "too few" and statistics.fewest(1) is None
    assert agreement(x, y, false_alarm=1e-6).verdict == "too few"  # no test of so many permutations could tell


def test_the_fewest_scores_are_those_with_which_a_difference_is_found():
    for others, least in ((2, 19), (3, 9), (4, 6), (5, 5), (10, 3)):
        verdicts = [agreement(np.ones(count), np.zeros(others)).verdict for count in (least - 1, least)]
        assert statistics.fewest(others) == least and verdicts == ["too few", "does not agree"]


def test_means_that_differ_by_rounding_agree():
    assert agreement(np.full(5, 0.1), np.full(5, 0.1 + 1e-16)) == statistics.Agreement("agrees", 0.0, 1.0)
    assert agreement(np.full(5, 500.0), np.full(5, 500.0 - 1e-4)).verdict == "agrees"
    assert agreement(np.full(5, 500.0), np.full(5, 499.0)).verdict == "does not agree"


def test_other_tasks_are_refused():
    with pytest.raises(ValueError, match="there are 1 tasks of ours and 2 of theirs"):
        statistics.probability_of_improvement([np.ones(3)], [np.ones(3), np.ones(3)])


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([], "the list of tasks is empty"),
        ([[1.0, 2.0], []], r"task 1 have shape \[0\]"),
        ([[[1.0]]], r"task 0 have shape \[1, 1\]"),
        ([[1.0, math.nan]], "task 0 are not all finite"),
        ([["1", "2"]], "task 0 are of type <U1; give real numbers"),
        ([[[1.0], [1.0, 2.0]]], "task 0 are not an array"),
        ([np.ma.array([1.0, 1e6], mask=[0, 1])], "task 0 are partly masked"),
        (3.0, "scores of type float are not a list"),
    ],
)
def test_scores_that_are_none_are_refused(scores, message):
    with pytest.raises(ValueError, match=message):
        estimate(scores)


def test_scores_of_any_type_and_many_scores_have_estimates(monkeypatch):
    for kind in (np.float16, jnp.bfloat16, np.int8, bool):
        assert estimate([jnp.array([0, 1, 1, 0], kind)], mean) == estimate([[0, 1, 1, 0]], mean)
    wins = probability_of_improvement(TASKS, OTHERS)
    monkeypatch.setattr(statistics, "_AT_ONCE", 2_000)  # numbers, of 2,000 resamples of 300 pairs
    some = probability_of_improvement(TASKS, OTHERS)
    assert some.value == wins.value
    # Of 2,000 draws, an end of the interval has a deviation of about 2% of its width.
    assert abs(some.low - wins.low) < 0.1 * (wins.high - wins.low) > abs(some.high - wins.high)


def test_estimates_are_written_with_the_decimals_that_tell_something():
    assert str(statistics.Estimate(497.9312, 495.1234, 499.9)) == "497.9 [495.1, 499.9]"
    assert str(statistics.Estimate(500.0, 500.0, 500.0)) == "500.0 [500.0, 500.0]"
    assert str(estimate([np.array([3.25])])) == "3.250"
