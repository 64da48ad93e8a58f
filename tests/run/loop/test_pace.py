"""Lengths of chunks against a clock that is written by hand."""

import itertools

import pytest

from msrl_jax.run.loop.hooks import AUTOMATIC, TIME_LIMIT, StopRequests, parse_checkpoint_interval, parse_duration
from msrl_jax.run.loop.loop import ChunkScheduler, chunk_length


def ticks(pace, each, count, done=0):
    """The iterations at which a run has its first ticks, if iteration `i` takes `each(i)` seconds."""
    ends = []
    for _ in range(count):
        first = done
        if not pace.is_known:
            pace.measured(1, each(done))
            done += 1
        length = pace.length(first) - (done - first)
        pace.measured(length, sum(each(i) for i in range(done, done + length)) if length else 1e-9) if length else None
        done += length
        ends.append(done)
    return ends


@pytest.mark.parametrize(
    ("iterations", "length"), [(1, 1), (50, 1), (64, 1), (6000, 120), (10**6 + 1, 20000), (10**12, 2 * 10**10)]
)
def test_a_short_run_has_about_fifty_chunks(iterations, length):
    assert chunk_length(iterations) == length


def test_a_fast_run_has_the_same_ticks_whatever_its_speed():
    for each in (1e-5, 1e-3, 8e-3):
        assert ticks(ChunkScheduler(120, fixed=False), lambda i, each=each: each, 3) == [120, 240, 360]


@pytest.mark.parametrize("each", [3e-6, 1e-4, 0.03, 0.4, 7.0])
def test_a_chunk_of_a_long_run_takes_about_a_second(each):
    pace = ChunkScheduler(10**11, fixed=False)
    ends = ticks(pace, lambda i: each, 4)
    for first, last in itertools.pairwise(ends):
        assert each >= 1 or 0.5 <= (last - first) * each <= 1.0
        assert each < 1 or last - first == 1


def test_the_length_follows_the_speed_by_factors_of_two():
    pace = ChunkScheduler(10**9, fixed=False)
    pace.measured(1, 0.01)
    assert pace.length(0) == 64
    pace.measured(64, 1.5)  # a slower chunk within the factor changes nothing
    assert pace.length(64) == 64
    pace.measured(64, 20.0)  # one slow chunk halves it
    assert pace.length(128) == 32
    pace.measured(32, 0.001)
    assert pace.length(160) == 32 and pace.length(192) == 64


def test_a_given_length_stays():
    pace = ChunkScheduler(7, fixed=True)
    pace.measured(7, 100.0)
    assert pace.is_known and pace.length(0) == 7 and pace.length(9) == 5, "a run that goes on keeps its ticks"


@pytest.mark.parametrize(
    ("value", "expected"),
    [("90s", 90), ("10m", 600), ("5h50m", 21000), ("1d", 86400), ("1h30s", 3630), (2.5, 2.5), (7, 7), ("0.5h", 1800)],
)
def test_durations(value, expected):
    assert parse_duration("time_limit", value) == expected


@pytest.mark.parametrize("value", ["", "5", "5x", "-1m", "1m1h", 0, float("nan"), True, None])
def test_what_is_no_duration_is_refused(value):
    with pytest.raises(ValueError, match=r"time_limit=.*: use text such as '90s', '10m' or '5h50m', or in Python a number"):
        parse_duration("time_limit", value)


def test_intervals():
    assert parse_checkpoint_interval(None) == (None, None) and parse_checkpoint_interval("10m") == (None, 600)
    assert {parse_checkpoint_interval(steps) for steps in (5000, "5000", "5e3", 5e3)} == {(5000, None)}
    for wrong in (0, -1, 2.5, "2.5", "ten", True):
        with pytest.raises(ValueError, match=r"checkpoint_every="):
            parse_checkpoint_interval(wrong)
    assert AUTOMATIC == 60.0, "as the documentation says"


def test_the_time_limit_counts_the_next_chunk(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("msrl_jax.run.loop.hooks.now", lambda: clock[0])
    requests = StopRequests(deadline=110.0)
    assert requests.reason(9.0) == "" and requests.reason(10.5) == TIME_LIMIT
    clock[0] = 111.0
    assert requests.reason(0.0) == TIME_LIMIT and StopRequests().reason(1e9) == ""
