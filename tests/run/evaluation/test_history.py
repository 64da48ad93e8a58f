import math

import numpy as np
import pytest

from msrl_jax.fragments.metrics import Mean
from msrl_jax.run.evaluation.history import (
    NO_EPISODES,
    decimals,
    first_non_finite,
    in_words,
    last_mean,
    reduce_chunk,
    stack_rows,
)
from msrl_jax.run.loop.loop import chunk_length


def test_a_mean_weighs_every_sample_equally():
    # Three episodes of return 10 in the first iteration, one of 50 in the second: 80 / 4, not (10 + 50) / 2.
    row = reduce_chunk({"episode_return": Mean(np.float32([30, 50]), np.float32([3, 1])), "loss": np.float32([1, 2])})
    assert row == {"episode_return": 20.0, "loss": 1.5}


def test_a_mean_of_nothing_is_nan_per_member():
    row = reduce_chunk({"episode_return": Mean(np.float32([[0, 6], [0, 0]]), np.float32([[0, 2], [0, 0]]))})
    np.testing.assert_array_equal(row["episode_return"], [np.nan, 3.0])


def test_many_iterations_lose_no_precision():
    # In float32 the sum of these would be off by far more than one part in 1e7.
    values = np.full(1_000_000, 0.1, np.float32)
    assert reduce_chunk({"loss": values})["loss"] == pytest.approx(float(np.float32(0.1)), rel=1e-12)


def test_a_row_counts_dropped_updates_and_averages_the_others():
    metrics = {"loss": np.array([1.0, np.nan, 3.0]), "skipped_updates": np.array([0, 2, 1])}
    assert reduce_chunk(metrics, finite=True) == {"loss": 2.0, "skipped_updates": 3.0}


def test_the_earliest_bad_iteration_is_found():
    metrics = {
        "late": np.float32([0, 0, np.inf]),
        "early": np.float32([0, np.nan, 0]),
        "episodes": Mean(np.zeros(3, np.float32), np.zeros(3, np.float32)),
    }
    assert first_non_finite(metrics) == ("early", 1, None)


def test_the_bad_member_is_found():
    assert first_non_finite({"loss": np.float32([[0, 0], [0, np.nan]])}) == ("loss", 1, 1)


def test_no_episode_is_no_divergence():
    assert first_non_finite({"episode_return": Mean(np.float32([0]), np.float32([0])), "loss": np.float32([1])}) is None


@pytest.mark.parametrize("chunk", [1, 4, 12])
def test_the_last_hundred_episodes_count_however_chunks_were_cut(chunk):
    """Whole iterations, from the newest back to the one that holds the hundredth: 40 + 30 + 30 of member 0, 150 of member 1."""
    count = np.zeros((12, 2))
    count[[2, 5, 6, 9, 11], 0], count[[1, 4], 1] = [50, 7, 30, 30, 40], [20, 150]
    value = np.arange(24.0).reshape(12, 2)
    kept = NO_EPISODES
    for first in range(0, 12, chunk):
        rows = slice(first, first + chunk)
        kept = kept.add(first, Mean(np.float32(value * count)[rows], np.float32(count)[rows]))
    assert kept.iterations.T.tolist() == [[7, 10, 12], [0, 0, 5]] and kept.count.sum(0).tolist() == [100, 150]
    np.testing.assert_allclose(kept.mean(), [(30 * 12 + 30 * 18 + 40 * 22) / 100, 9])
    assert kept.until(9).iterations.T.tolist() == [[7], [5]]


def test_the_last_episodes_of_many_members_take_no_more_memory_than_those_of_the_busiest():
    """Members end an episode in iterations of their own: 300 of them have 3 entries each, and not one for each iteration."""
    count = np.zeros((900, 300))
    count[np.arange(900), np.arange(900) % 300] = 40
    kept = NO_EPISODES
    for first in range(0, 900, 90):
        kept = kept.add(first, Mean(count[first : first + 90], count[first : first + 90]))
    assert kept.count.shape == (3, 300) and (kept.count == 40).all()
    np.testing.assert_array_equal(kept.iterations, 1 + np.arange(900).reshape(3, 300))


def test_rows_become_columns():
    rows = [{"step": 1, "loss": np.array([1.0, 2.0])}, {"step": 2, "loss": np.array([3.0, 4.0])}]
    columns = stack_rows(rows, {})
    np.testing.assert_array_equal(columns["step"], [1, 2])
    np.testing.assert_array_equal(columns["loss"], [[1, 2], [3, 4]])
    assert columns["step"].dtype == np.int64


@pytest.mark.parametrize(
    ("about", "shapes"),
    [
        ({}, {"episode_return": (0,), "episode_length": (0,), "eval_return": (0,), "eval_length": (0,)}),
        ({"seeds": 3, "eval_episodes": 0}, {"episode_return": (0, 3), "episode_length": (0, 3)}),
        ({"seeds": 3, "settings": {"discount": [0, 1]}, "unit": "updates"}, {"eval_return": (0, 6), "eval_length": (0, 6)}),
    ],
)
def test_a_run_that_ended_before_its_first_row_has_the_usual_columns(about, shapes):
    columns = stack_rows([], {"seeds": 1, "settings": None, "eval_episodes": 2} | about)
    of_run = dict.fromkeys(("step", "iteration", "seconds", "steps_per_second"), (0,))
    assert {name: column.shape for name, column in columns.items()} == of_run | shapes
    for name, column in columns.items():
        np.testing.assert_array_equal(last_mean(column), np.full(column.shape[1:], np.nan), err_msg=name)


def test_the_last_mean_leaves_gaps_out():
    column = np.array([0.0] * 18 + [np.nan, 7.0])
    assert last_mean(column) == 7.0
    assert math.isnan(last_mean(np.array([np.nan])))
    assert last_mean(np.array([3.0, 4.0] + [np.nan] * 18)) == 4.0
    np.testing.assert_array_equal(last_mean(np.array([[np.nan, 1.0]] + [[np.nan, np.nan]] * 19 + [[2.0, np.nan]])), [2.0, 1.0])
    np.testing.assert_array_equal(last_mean(np.array([[1.0, np.nan], [3.0, 5.0]]), fraction=1.0), [2.0, 5.0])


def test_chunks_give_a_readable_number_of_ticks_and_two_lengths_at_most():
    for iterations in (*range(1, 1200), 1999, 4999, 7919, 30_517, 1_000_003):
        chunk = chunk_length(iterations)
        ticks = math.ceil(iterations / chunk)
        assert min(iterations, 20) <= ticks <= 101, iterations
        if any(iterations % ticks == 0 for ticks in range(20, 101)):
            assert iterations % chunk == 0, f"{iterations} iterations divide evenly, so one program is enough"


@pytest.mark.parametrize(
    ("mean", "spread", "shown"),
    [
        (142.516, 23.456, "143 ± 23"),
        (9.5312, 0.7219, "9.53 ± 0.72"),
        (500, 0, "500.0 ± 0.0"),
        (0.0235, 0.1235, "0.02 ± 0.12"),
        (-1234.6, 200.3, "-1235 ± 200"),
        (0.95, 1e-7, "0.9500 ± 0.0000"),
        (0, 0, "0.0 ± 0.0"),
        (math.nan, math.nan, "nan ± nan"),
        (math.inf, math.nan, "inf ± nan"),
    ],
)
def test_numbers_show_useful_digits(mean, spread, shown):
    digits = decimals(mean, spread)
    assert f"{mean:.{digits}f} ± {spread:.{digits}f}" == shown


def test_a_setting_in_words_names_its_seed_as_people_do():
    setting = {"seed": 3, "learning_rate": 0.0005, "activation": "tanh"}
    assert in_words(setting) == "seed 3, learning_rate=0.0005, activation=tanh"
