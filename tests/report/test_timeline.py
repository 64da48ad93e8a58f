"""Whose the time of a trace is, worked out by hand; and real traces of small programs."""

import jax
import jax.numpy as jnp
import pytest

from msrl_jax.report.timeline import (
    DRIVING,
    EXCHANGING,
    IDLE,
    LAUNCHING,
    MOVING,
    WORKING,
    Activity,
    Span,
    activities,
    divided,
    in_perfetto,
    record_spans,
    without_overhead,
)

ACT, LEARN, SUM, SIMULATE = ("inference", "act"), ("learning", "learn"), ("transfer", "learn"), ("simulation", "simulate")
TRANSFER, PYTHON, NOBODY = ("transfer", ""), ("Python", ""), ("idle", "")
WHOSE = {"act": (WORKING, ACT), "learn": (WORKING, LEARN), "all-reduce": (EXCHANGING, SUM)}


def keyed(span):
    return WHOSE.get(span.name)


def of(start, end, name, device=0, run=7):
    return Span(start, end, name, "jit_f", ("jit_f", run, device), f"device {device}")


def test_what_works_together_shares_its_time():
    found = [Activity(0, 4, WORKING, ACT), Activity(2, 6, WORKING, LEARN), Activity(2, 4, WORKING, LEARN)]
    assert divided(found, 6.0) == {(WORKING, ACT): pytest.approx(2 + 2 / 3), (WORKING, LEARN): pytest.approx(4 / 3 + 2)}


def test_what_is_hidden_costs_nothing():
    found = [
        Activity(0, 3, WORKING, ACT),
        Activity(1, 5, EXCHANGING, SUM),
        Activity(2, 7, LAUNCHING, LEARN),
        Activity(4, 9, MOVING, TRANSFER),
        Activity(0, 11, DRIVING, PYTHON),
    ]
    assert divided(found, 12.0) == {
        (WORKING, ACT): 3,
        (EXCHANGING, SUM): 2,
        (LAUNCHING, LEARN): 2,
        (MOVING, TRANSFER): 2,
        (DRIVING, PYTHON): 2,
        (IDLE, NOBODY): 1,
    }


def test_the_time_between_operations_launches_the_next_one():
    spans = [
        Span(0, 20, "window"),
        of(2, 4, "act"),
        of(5, 8, "learn"),
        of(2, 8, "while"),
        Span(1, 12, "wait"),
        of(12, 13, "act", run=8),
        Span(13, 15, "transfer"),
        Span(14, 17, "host simulate"),
    ]
    found = divided(list(activities(spans, keyed)), 20.0)
    assert found == {
        (WORKING, ACT): 3,
        (WORKING, LEARN): 3,
        (LAUNCHING, LEARN): 1,
        (IDLE, NOBODY): 1 + 4,
        (DRIVING, PYTHON): 1 + 3,
        (MOVING, TRANSFER): 1,
        (WORKING, SIMULATE): 3,
    }
    assert sum(found.values()) == 20


def test_a_device_that_computes_hides_those_that_wait_for_it():
    first, second = [of(0, 8, "learn", 0), of(8, 10, "all-reduce", 0)], [of(0, 2, "learn", 1), of(2, 10, "all-reduce", 1)]
    spans = [Span(0, 10, "window"), *first, *second]
    assert divided(list(activities(spans, keyed)), 10.0) == {(WORKING, LEARN): 8, (EXCHANGING, SUM): 2}


def test_overhead_is_taken_off_the_launches_first():
    times = {
        (LAUNCHING, ACT): 3.0,
        (LAUNCHING, LEARN): 1.0,
        (WORKING, ACT): 4.0,
        (WORKING, LEARN): 12.0,
        (DRIVING, PYTHON): 4.0,
        (IDLE, NOBODY): 2.0,
    }
    by_hand = [(0, 7, 13, 4), (1, 6.5, 12.5, 4), (3, 5, 12, 4), (4, 4, 12, 4), (9, 3, 9, 3), (99, 0, 0, 0)]
    for overhead, act, learn, python in by_hand:
        left = without_overhead(times, {ACT: 10, LEARN: 10}, overhead)
        assert left == pytest.approx({ACT: act, LEARN: learn, PYTHON: python, NOBODY: 2})


@pytest.fixture(scope="module")
def traced():
    """Spans of a loop of ten products, and the names in its text."""

    @jax.jit
    def looped(x):
        return jax.lax.fori_loop(0, 10, lambda i, x: jnp.sin(x @ x), x)

    x = jnp.ones((64, 64)) / 64
    compiled = looped.lower(x).compile()
    jax.block_until_ready(compiled(x))
    spans, number = record_spans(lambda: jax.block_until_ready(compiled(x)))
    return spans, number, compiled.as_text()


def test_operations_have_the_names_of_the_text(traced):
    spans, number, text = traced
    operations = [span for span in spans if span.program]
    assert {span.program for span in operations} == {"jit_looped"} and number > len(operations) >= 20
    assert all(f"%{span.name} =" in text for span in operations)
    sines = [span for span in operations if span.name.startswith(("sine", "wrapped_sine", "sin"))]
    assert len(sines) % 10 == 0 and sines


def test_all_spans_are_in_the_window(traced):
    spans, _, _ = traced
    (window,) = [span for span in spans if span.name == "window"]
    assert window.start == 0 and all(0 <= span.start <= span.end <= window.end for span in spans)


def test_the_trace_of_perfetto_has_all_spans(traced):
    spans, _, _ = traced
    rows = in_perfetto([(span, ACT if span.program else None) for span in spans])["traceEvents"]
    shown = [row for row in rows if row["ph"] == "X"]
    assert len(shown) == len(spans) and {row["cat"] for row in shown} == {"inference", "host"}
    assert sum(row["dur"] for row in shown) == pytest.approx(1e6 * sum(span.end - span.start for span in spans))
    assert {row["tid"] for row in shown} == {row["tid"] for row in rows if row["ph"] == "M"}


def test_there_is_one_trace_at_a_time(tmp_path):
    with jax.profiler.trace(tmp_path), pytest.raises(RuntimeError, match=r"another profiler is active: .* Stop it first"):
        record_spans(lambda: None)
