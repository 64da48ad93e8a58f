"""Timelines: records a trace of XLA operations and the host as spans, and attributes the time to them.

XLA names each operation that it runs, with its program, its run and its device; on CPUs it does so in the threads that run it.
Several things may happen at the same time. The time is attributed to

1. the active operations and host functions, in equal parts;
2. if there are none, the exchanges between devices;
3. else, in the middle of a program, the next operation, as its launch time;
4. else, the work of the host: transfers, or Python;
5. else, while the host waits too, idle time.

Each moment therefore counts once, and work that is hidden behind computation costs nothing.
"""

import collections
import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax

from msrl_jax.fragments.graph.host_calls import IN_TRACES

WINDOW = f"{IN_TRACES}window"
Key: TypeAlias = tuple[str, str]
"""A phase, and the fragment in it."""

WORKING, EXCHANGING, LAUNCHING, MOVING, DRIVING, IDLE = range(6)


class Span(NamedTuple):
    """An event from `start` to `end`, in seconds since the trace began."""

    start: float
    end: float
    name: str  # name of the operation; for host time, the text after the prefix
    program: str = ""  # the name of the operation's program; empty for host time
    run: tuple[object, ...] = ()  # the run of that program, on one device
    thread: str = ""


class Activity(NamedTuple):
    """A time span in which something was active, or ready to be."""

    start: float
    end: float
    level: int
    key: Key


def record_spans(run: Callable[[], object]) -> tuple[list[Span], int]:
    """Traces a function; returns the spans during its run, and the number of traced events.

    Raises:
      RuntimeError: if another trace is active, or no trace is written.
      OSError: if the trace cannot be written, for example because the disk is full.
    """
    options: Any = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1
    with tempfile.TemporaryDirectory(prefix="msrl-jax-trace-") as folder:
        with _trace_to(folder, options), jax.profiler.TraceAnnotation(WINDOW):
            run()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        if not files:
            raise RuntimeError("jax.profiler wrote no trace; is another profiler at work?")
        return _read_spans(jax.profiler.ProfileData.from_file(str(files[-1])))


@contextlib.contextmanager
def _trace_to(folder: str, options: Any) -> Iterator[None]:
    try:
        jax.profiler.start_trace(folder, profiler_options=options)
    except RuntimeError as error:
        raise RuntimeError(f"another profiler is active: {str(error).rstrip('.')}. Stop it first") from error
    try:
        yield
    finally:
        try:
            jax.profiler.stop_trace()
        except jax.errors.JaxRuntimeError as error:
            raise OSError(
                f"the trace cannot be written to {folder}: {error}. JAX cannot trace again in this process; start a new "
                "one with more disk space, TMPDIR=..."
            ) from error


def _read_spans(data: Any) -> tuple[list[Span], int]:
    spans: list[Span] = []
    number, window = 0, (0.0, 0.0)
    for plane in data.planes:
        lines = list(plane.lines)
        ours = [line for line in lines if line.name == "XLA Ops"] or lines  # else accelerators report operations repeatedly
        for line in ours:
            for event in line.events:
                number += 1
                start = event.start_ns * 1e-9
                end, name = start + event.duration_ns * 1e-9, event.name
                if name.startswith(IN_TRACES):
                    if name == WINDOW:
                        window = start, end
                    spans.append(Span(start, end, name.removeprefix(IN_TRACES), thread=line.name))
                    continue
                stats = dict(event.stats)
                if (program := stats.get("hlo_module")) and (op := stats.get("hlo_op")):
                    run = (program, stats.get("run_id"), stats.get("device_ordinal", plane.name))
                    spans.append(Span(start, end, str(op), str(program), run, line.name))
    spans_in_window = [
        span._replace(start=max(span.start, window[0]) - window[0], end=min(span.end, window[1]) - window[0])
        for span in spans
        if span.end > window[0] and span.start < window[1]
    ]
    return spans_in_window, number


def activities(spans: Sequence[Span], key_of: Callable[[Span], tuple[int, Key] | None]) -> Iterator[Activity]:
    """Yields the activities in a trace.

    Args:
      spans: the spans of the trace.
      key_of: returns the level and the key of an operation; None for operations that only contain others, such as loops.
    """
    runs: dict[tuple[object, ...], list[tuple[float, float, Key]]] = collections.defaultdict(list)
    for span in spans:
        if span.program:
            if (level_and_key := key_of(span)) is not None:
                yield Activity(span.start, span.end, *level_and_key)
                runs[span.run].append((span.start, span.end, level_and_key[1]))
        elif span.name == "transfer":
            yield Activity(span.start, span.end, MOVING, ("transfer", ""))
        elif span.name.startswith("host "):
            yield Activity(span.start, span.end, WORKING, ("simulation", span.name.removeprefix("host ")))
    for (_, number, _), operations in runs.items():
        if number is None:
            continue  # the boundary between runs is unknown
        operations.sort()
        latest_end = operations[0][0] if operations else 0.0
        for start, end, key in operations:
            if start > latest_end:
                yield Activity(latest_end, start, LAUNCHING, key)
            latest_end = max(latest_end, end)
    window = next(span for span in spans if span.name == "window")
    waits = sorted((span.start, span.end) for span in spans if span.name == "wait")
    latest_end = window.start
    for start, end in [*waits, (window.end, window.end)]:
        if start > latest_end:
            yield Activity(latest_end, start, DRIVING, ("Python", ""))
        latest_end = max(latest_end, end)


def divided(activity_list: Sequence[Activity], seconds: float) -> dict[tuple[int, Key], float]:
    """Returns the time of each key at each level; together with that of `("idle", "")`, they sum to the total time.

    Args:
      activity_list: activities, from 0 to `seconds`.
      seconds: the total time.
    """
    changes = sorted(
        [(x.start, 1, x.level, x.key) for x in activity_list] + [(x.end, -1, x.level, x.key) for x in activity_list]
    )
    active: list[dict[Key, int]] = [{} for _ in range(IDLE)] + [{("idle", ""): 1}]
    totals: dict[tuple[int, Key], float] = collections.defaultdict(float)
    time = 0.0
    for change_time, change, level, key in [*changes, (seconds, 0, IDLE, ("idle", ""))]:
        if change_time > time:
            top_level = next(level for level, counts in enumerate(active) if counts)
            share = (change_time - time) / sum(active[top_level].values())
            for active_key, count in active[top_level].items():
                totals[top_level, active_key] += share * count
            time = change_time
        count = active[level].get(key, 0) + change
        if count:
            active[level][key] = count
        else:
            active[level].pop(key, None)
    return dict(totals)


def without_overhead(
    times: Mapping[tuple[int, Key], float], operations: Mapping[Key, int], overhead: float
) -> dict[Key, float]:
    """Subtracts the overhead of tracing from the time of each key.

    A trace records an operation before the operation starts. The overhead is therefore subtracted from the launch time of
    operations, equally for each; the remainder is subtracted proportionally from all other time that is not idle.

    Args:
      times: the time of each key at each level.
      operations: the number of operations of each key.
      overhead: the total overhead of tracing.
    """
    launching = {key: seconds for (level, key), seconds in times.items() if level == LAUNCHING}
    while overhead > 1e-12 and (total := sum(operations[key] for key, seconds in launching.items() if seconds > 0)):
        subtracted = {
            key: min(seconds, overhead * operations[key] / total) for key, seconds in launching.items() if seconds > 0
        }
        launching = {key: seconds - subtracted.get(key, 0.0) for key, seconds in launching.items()}
        overhead -= sum(subtracted.values())
    traced = sum(seconds for (level, _), seconds in times.items() if level not in (LAUNCHING, IDLE))
    part = 1 - min(overhead / traced, 1.0) if traced else 1.0
    remaining: dict[Key, float] = collections.defaultdict(float)
    for (level, key), seconds in times.items():
        remaining[key] += launching[key] if level == LAUNCHING else seconds if level == IDLE else seconds * part
    return dict(remaining)


def in_perfetto(events: Sequence[tuple[Span, Key | None]]) -> dict[str, Any]:
    """Converts a trace to the JSON format of Perfetto and Chrome: a track per thread, operations by fragment and phase."""
    threads = list(dict.fromkeys(span.thread for span, _ in events))
    rows: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": i, "args": {"name": name}} for i, name in enumerate(threads)
    ]
    for span, key in events:
        phase, fragment = key or ("", "")
        about = {"phase": phase, "fragment": fragment, "program": span.program}
        rows.append(
            {
                "ph": "X",
                "name": f"{fragment}: {span.name}" if fragment else span.name,
                "cat": phase or "host",
                "pid": 1,
                "tid": threads.index(span.thread),
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": {name: value for name, value in about.items() if value},
            }
        )
    return {"displayTimeUnit": "ms", "traceEvents": rows}
