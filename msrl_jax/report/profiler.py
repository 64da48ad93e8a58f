"""Makes profiles: runs iterations with and without a trace, and attributes the time to phases and fragments.

Tracing adds time to each operation. This overhead is calibrated on every other pair of runs and subtracted from the remaining
pairs, whose sum is compared with the time without a trace.
"""

import collections
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from msrl_jax import policies
from msrl_jax.envs.base import PyTree
from msrl_jax.fragments.measure import named_in_traces
from msrl_jax.fragments.passes.instructions import RunProgram
from msrl_jax.fragments.placement import HOST, Device, DistributionPolicy
from msrl_jax.fragments.plan.cost import fragment_plans
from msrl_jax.fragments.plan.hlo import COLLECTIVES, Operation, module_of, operations
from msrl_jax.fragments.program import Program
from msrl_jax.fragments.support.checks import whole
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.policies.helpers import policy_text
from msrl_jax.report.profile_results import PHASES, FragmentTime, Profile
from msrl_jax.report.provenance import place_of
from msrl_jax.report.timeline import EXCHANGING, WORKING, Key, Span, activities, divided, record_spans, without_overhead
from msrl_jax.run import Result
from msrl_jax.run.disk.folder import describe_devices
from msrl_jax.run.prepare import make_experiment

_OF_ROLE = {"env": "simulation", HOST: "simulation", "actor": "inference", "learner": "learning", "server": "learning"}
_OF_ROLE |= {"buffer": "replay"}
# Limits of one measurement: operations (a trace of that size is read in a second), seconds, and iterations.
_EVENTS, _SECONDS, _ITERATIONS = 100_000, 2.0, 64
_MOST_EACH = 1e-6  # maximum tracing seconds per event; a third of that was measured. More is not due to tracing


@entry
def profile(
    algo: Any = None,
    env: Any = None,
    *,
    policy: str | DistributionPolicy | None = None,
    devices: Sequence[Device] | None = None,
    iterations: int | None = None,
    repeats: int = 3,
    trust: bool = False,
    note: Callable[[str], object] = lambda line: None,
    **overrides: Any,
) -> Profile:
    """Profiles the training time by phase and by fragment (RL-Scope, arXiv 2102.04285).

    Args:
      algo: an algorithm, as in `train`, or an `Experiment`; or a run, a `Result`, trained for some iterations as before.
      env: an environment, as in `train`.
      policy: distribution policy, or its name; as in `train` if None.
      devices: the devices for the policy; all if None.
      iterations: iterations of each measurement; about two seconds, or 100,000 events, if None.
      repeats: number of calibration measurements, and of measurements; each is a run with a trace and one without.
      trust: whether the policy of a profiled run may come from a module that its folder names, as in `Result.load`.
      note: called with a line of text before programs are compiled, and before they are measured.
      **overrides: arguments of `train` that determine what is computed, such as `seeds`; and fields of the algorithm's config.

    Returns:
      The profile.

    Raises:
      ValueError: if an argument is invalid, before anything is compiled; or if a run had more devices than available here.
      RuntimeError: if another trace of `jax.profiler` is active.
    """
    iterations, repeats = _whole_numbers(iterations, repeats)
    if isinstance(algo, Result):
        if overrides or policy is not None:
            raise ValueError("a run says what is profiled; leave out the policy and all that it was trained with")
        experiment = algo.experiment
        resolved_policy, devices = place_of(algo, devices, trust=trust)
    else:
        experiment = make_experiment(algo, env, **overrides)
        resolved_policy = policies.get(policy or experiment.usual_policy)
    program = experiment.compile(resolved_policy, devices)
    used_devices = describe_devices(program.devices)
    title = f"{experiment.name} on {experiment.env_name}, {experiment.steps_per_iteration:,} {experiment.agent.unit} each"
    note(f"compiling {title}, {policy_text(resolved_policy)} ...")
    state = experiment.start(program)
    name = (
        f"{policy_text(resolved_policy)} on {used_devices['count']} {used_devices['platform']} "
        f"device{'s' * (used_devices['count'] > 1)}"
    )
    return profile_program(program, state, title=title, policy=name, iterations=iterations, repeats=repeats, note=note)


@entry
def profile_program(
    program: Program,
    state: PyTree,
    *,
    title: str = "a program",
    policy: str | None = None,
    iterations: int | None = None,
    repeats: int = 3,
    note: Callable[[str], object] = lambda line: None,
) -> Profile:
    """Profiles a compiled loop as `profile` does; use it for a custom loop from `msrl_jax.compile`.

    Args:
      program: the compiled loop.
      state: a state, which stays valid.
      title: the title of the profile.
      policy: a description of the policy and the devices; that of the program if None.
      iterations: iterations of each measurement; about two seconds, or 100,000 events, if None.
      repeats: number of calibration measurements, and of measurements.
      note: called with a line of text before the program is measured.

    Returns:
      The profile.

    Raises:
      ValueError: if `iterations` or `repeats` is not a positive integer.
      RuntimeError: if another trace of `jax.profiler` is active.
    """
    iterations, repeats = _whole_numbers(iterations, repeats)
    runner = _Runner(program, state)
    with named_in_traces(program):
        runner.plain(1)
        seconds = runner.plain(1)
        first_trace = runner.traced(1)
        max_count = min(_EVENTS / max(first_trace.number, 1), _SECONDS / max(seconds, 1e-9))
        count = iterations or max(1, min(_ITERATIONS, int(max_count)))
        note(f"measuring {4 * repeats} times {count} iterations ...")
        pairs = [_run_pair(runner, count, reverse=bool(i // 2 % 2)) for i in range(2 * repeats)]
    # Use medians, because other load on the machine makes single runs longer.
    calibration, measured_pairs = pairs[::2], sorted(pairs[1::2], key=lambda pair: pair[1].seconds)
    plain_seconds = statistics.median(plain for plain, _ in calibration)
    traced_seconds = statistics.median(traced.seconds for _, traced in calibration)
    traced = measured_pairs[len(measured_pairs) // 2][1]
    seconds_per_event = (traced_seconds - plain_seconds) / statistics.median(traced.number for _, traced in calibration)
    overhead = min(max(seconds_per_event, 0.0), _MOST_EACH) * traced.number
    key_of = _Whose(program, traced.spans)
    events = tuple((span, key[1] if (key := key_of(span)) else None) for span in traced.spans)
    numbers = collections.Counter(key for _, key in events if key)
    times = without_overhead(divided(list(activities(traced.spans, key_of)), traced.seconds), numbers, overhead)
    order = sorted(times, key=lambda key: (PHASES.index(key[0]), -times[key]))
    plain = statistics.median(plain for plain, _ in measured_pairs)
    return Profile(
        title=title,
        policy=policy or str(program.layout.policy),
        seconds=statistics.median(plain for plain, _ in pairs) / count,
        parts=tuple(
            FragmentTime(*key, times[key] / count, numbers[key] / count) for key in order if times[key] > 0 or numbers[key]
        ),
        iterations=count,
        overhead=overhead / plain,
        error=(traced.seconds - overhead) / plain - 1,
        events=events,
    )


class _Traced(NamedTuple):
    """A run with a trace."""

    seconds: float
    spans: list[Span]
    number: int  # number of events in the trace


class _Runner:
    """Runs iterations; every call resumes where the last one ended."""

    def __init__(self, program: Program, state: PyTree):
        self._program = program
        self._state, _ = program.run(state, 1, chunk=_ITERATIONS)

    def _run(self, count: int) -> None:
        self._state, _ = self._program.run(self._state, count, chunk=_ITERATIONS, donate=True)
        jax.block_until_ready(self._state)

    def plain(self, count: int) -> float:
        """Returns the seconds that the iterations take."""
        start = time.perf_counter()
        self._run(count)
        return time.perf_counter() - start

    def traced(self, count: int) -> _Traced:
        """Runs the iterations with a trace."""
        spans, number = record_spans(lambda: self._run(count))
        return _Traced(next(span.end for span in spans if span.name == "window"), spans, number)


def _run_pair(runner: _Runner, count: int, *, reverse: bool) -> tuple[float, _Traced]:
    """Runs without a trace and with one, in either order, so that a machine that slows down affects both."""
    if reverse:
        traced = runner.traced(count)
        return runner.plain(count), traced
    return runner.plain(count), runner.traced(count)


class _Whose:
    """Finds the phase and the fragment of an operation."""

    def __init__(self, program: Program, spans: Sequence[Span]):
        fragments = fragment_plans(program.traced.jaxpr.jaxpr, program.layout)
        device_fragments = [f for f in fragments if f.role != HOST]  # functions of the host are not part of programs
        self._phases = {f.name: _OF_ROLE.get(f.role.partition(":")[0], "others") for f in device_fragments}
        self._operations: dict[str, dict[str, Operation]] = {}
        self._alone: dict[str, str | None] = {}  # the fragment of programs that consist of one fragment
        for i, compiled in program.programs(_ITERATIONS):
            module = module_of(compiled)
            name, module_operations = module.name, operations(module, self._phases)
            fragments_inside = i.fragments if isinstance(i, RunProgram) and not program.is_fused else ()
            if not isinstance(i, RunProgram):
                module_operations = {op: operation._replace(kind="transfer") for op, operation in module_operations.items()}
            self._operations.setdefault(name, {}).update(module_operations)
            self._alone[name] = fragments_inside[0] if len(fragments_inside) == 1 else None
        # Loops and calls whose parts are in the trace. XLA compiles small loops as a whole; these are single operations.
        self._known: dict[tuple[str, str], tuple[int, Key] | None] = {}
        self._holders = {(span.program, holder) for span in spans for holder in self._enclosing(span)}

    def _enclosing(self, span: Span) -> Iterator[str]:
        program_operations = self._operations.get(span.program, {})
        name = span.name
        while name in program_operations and (name := program_operations[name].holder):
            yield name

    def _fragments_inside(self, span: Span) -> set[str | None]:
        """Returns the fragments of the operations inside an operation."""
        program_operations = self._operations[span.program]
        names = {span.name}
        while inner_names := {name for name, operation in program_operations.items() if operation.holder in names} - names:
            names |= inner_names
        return {program_operations[name].fragment for name in names}

    def __call__(self, span: Span) -> tuple[int, Key] | None:
        """Returns the level and the key of an operation; None for an operation that only contains others, and for host time."""
        if not span.program:
            return None
        name = span.program, span.name
        if name not in self._known:
            self._known[name] = self._find_key(span)
        return self._known[name]

    def _find_key(self, span: Span) -> tuple[int, Key] | None:
        operation = self._operations.get(span.program, {}).get(span.name)
        if operation is None:
            return WORKING, ("not attributed", "")
        if (span.program, span.name) in self._holders:
            return None
        if operation.kind == "transfer":
            return WORKING, ("transfer", "")
        fragment = self._alone[span.program] if operation.fragment is None else operation.fragment
        if not fragment and operation.kind in ("while", "call", "conditional"):  # compiled as a whole: use its contents
            inner_fragments = self._fragments_inside(span) - {"", None}
            fragment = inner_fragments.pop() if len(inner_fragments) == 1 else None if inner_fragments else fragment
        if operation.kind.removesuffix("-start").removesuffix("-done") in COLLECTIVES:
            return EXCHANGING, ("transfer", fragment or "")
        if fragment:
            return WORKING, (self._phases[fragment], fragment)
        return WORKING, ("outside of fragments" if fragment == "" else "not attributed", "")


def _whole_numbers(iterations: int | None, repeats: int) -> tuple[int | None, int]:
    return None if iterations is None else whole("iterations", iterations, most=_ITERATIONS), whole("repeats", repeats)
