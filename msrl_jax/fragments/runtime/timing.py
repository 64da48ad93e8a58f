"""The cost of the instructions of an iteration, measured one by one; and the time of an iteration if they overlap."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from msrl_jax.fragments.passes.instructions import Free, HostCall, Instruction, Loop, Move, RunProgram, Schedule, Value, walk
from msrl_jax.fragments.placement import Device
from msrl_jax.fragments.runtime.executables import Executables
from msrl_jax.fragments.runtime.execute import CallKind, ExecutableCall, Executor, Slots, Step
from msrl_jax.fragments.runtime.send_changed import changes_of
from msrl_jax.fragments.runtime.transfer import Leaves


class Cost(NamedTuple):
    """The cost of an instruction, in seconds."""

    dispatch: float  # until its call returns
    total: float  # until its results are available


@dataclass(frozen=True)
class Prediction:
    """The predicted time of an iteration, in seconds. The parts overlap, so they add up to more than the whole.

    Attributes:
      seconds: time of one iteration, if many follow each other.
      programs: placement -> seconds that its devices work.
      transfers: seconds of transfers.
      dispatch: seconds of the host.
      exchanges: number of transfers.
    """

    seconds: float
    programs: Mapping[str, float]
    transfers: float
    dispatch: float
    exchanges: int


def check_delay(seconds: object) -> None:
    """Raises ValueError unless a delay is a number of seconds of at least 0."""
    number = float(seconds) if isinstance(seconds, int | float | np.number) and not isinstance(seconds, bool) else -1.0
    if not 0 <= number < float("inf"):
        raise ValueError(f"a delay of {seconds!r} must be a number of seconds of at least 0")


def measure_costs(schedule: Schedule, executables: Executables, leaves: Leaves, iterations: int = 4) -> dict[Instruction, Cost]:
    """Measures every instruction alone, over a few iterations that consume the memory of `leaves`; returns the medians."""
    samples: dict[Instruction, list[Cost]] = defaultdict(list)

    def timed(i: Instruction, step: Step) -> Step:
        if isinstance(i, Loop | Free):
            return step
        result_slots = [v.index for v in i.makes()]

        def measured(slots: Slots) -> None:
            start = time.perf_counter()
            step(slots)
            returned = time.perf_counter()
            jax.block_until_ready([slots[k] for k in result_slots])
            samples[i].append(Cost(returned - start, time.perf_counter() - start))

        return measured

    execute = Executor(schedule, executables, wrap_step=timed)
    for iteration in range(1 + iterations):
        if iteration == 1:
            samples.clear()  # JAX prepares a program in its first call
        leaves, *_ = execute(leaves)
        jax.block_until_ready(leaves)
    return {i: Cost(*map(statistics.median, zip(*costs, strict=True))) for i, costs in samples.items()}


def time_chunks(run: Callable[[Leaves], Leaves], leaves: Leaves) -> float:
    """Returns the median time of a function of the state in seconds, over three calls after a warm-up call."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        leaves = run(leaves)
        jax.block_until_ready(leaves)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


@dataclass
class _Clock:
    """The times at which values are available, devices are free and the host continues."""

    costs: Mapping[Instruction, Cost]
    delay: float  # seconds added to each transfer
    host: float = 0.0
    ready: dict[Value, float] = field(default_factory=dict)
    busy: dict[Device, float] = field(default_factory=dict)

    def run(self, instructions: Iterable[Instruction]) -> None:
        for i in instructions:
            if isinstance(i, Loop):
                self.run_loop(i)
            elif not isinstance(i, Free):
                self.run_one(i, self.costs[i])

    def run_one(self, i: Instruction, cost: Cost) -> None:
        is_exchange = isinstance(i, Move) and not i.is_copy
        devices = i.placement.devices if isinstance(i, RunProgram) else ()
        begin = max(self.host, *(self.ready.get(v, 0.0) for v in i.reads()), *(self.busy.get(d, 0.0) for d in devices), 0.0)
        self.host += cost.dispatch
        end = max(self.host, begin + cost.total + (self.delay if is_exchange else 0.0))
        if isinstance(i, HostCall) or (isinstance(i, Move) and not i.is_copy and changes_of(i)):
            self.host = end  # the host waits for it
        self.ready.update(dict.fromkeys(i.makes(), end))
        self.busy.update(dict.fromkeys(devices, end))

    def run_loop(self, i: Loop) -> None:
        for c in i.carry:
            self.ready[c.body_in] = self.ready.get(c.init, 0.0)
        for _ in range(i.length):
            self.run(i.body)
            carried = [self.ready.get(c.body_out, 0.0) for c in i.carry]
            self.ready.update(zip((c.body_in for c in i.carry), carried, strict=True))
        for c in i.carry:
            self.ready[c.result] = self.ready[c.body_in]


def predict_time(schedule: Schedule, costs: Mapping[Instruction, Cost], *, ahead: int, delay: float = 0.0) -> Prediction:
    """Predicts the time of an iteration from the costs of its instructions.

    The host dispatches them in order; a program starts once its devices are free and its inputs are available.

    Args:
      schedule: the instructions.
      costs: the cost of each, except loops.
      ahead: how many iterations the host may run ahead of the devices.
      delay: seconds to add to every transfer between placements.

    Returns:
      The prediction.
    """
    clock, ends = _Clock(costs, delay), []
    copies = [pair for values in zip(schedule.inputs, schedule.outputs, strict=True) for pair in zip(*values, strict=True)]
    for iteration in range(2 * ahead + 8):
        clock.run(schedule.body)
        ends.append(max([clock.host, *clock.ready.values()]))
        clock.ready = {body_in: clock.ready.get(body_out, 0.0) for body_in, body_out in copies}
        if iteration >= ahead:
            clock.host = max(clock.host, ends[iteration - ahead])
    steady = ends[-4:]
    programs: dict[str, float] = defaultdict(float)
    transfers = dispatch = 0.0
    exchanges = 0
    for i, times in walk(schedule.body):
        if isinstance(i, Loop | Free):
            continue
        dispatch += times * costs[i].dispatch
        if isinstance(i, RunProgram):
            programs[i.placement.name] += times * costs[i].total
        elif isinstance(i, Move) and not i.is_copy:
            transfers += times * (costs[i].total + delay)
            exchanges += times
    return Prediction((steady[-1] - steady[0]) / (len(steady) - 1), dict(programs), transfers, dispatch, exchanges)


_ITERATIONS = 5


@dataclass(frozen=True)
class Dispatch:
    """The host's work to dispatch one iteration, in processor time of the dispatching thread. Waiting takes none.

    Small programs for a CPU, which XLA runs in that thread, are included.
    """

    instructions: int  # programs, transfers and allocations per iteration; those in loops count in every repetition
    microseconds: float  # time per instruction
    python_microseconds: float  # the part outside JAX calls, including loops and the release of arrays
    call_microseconds: float  # time of one call of a compiled program, without the rest of its instruction


def measure_dispatch(schedule: Schedule, executables: Executables, leaves: Leaves) -> Dispatch:
    """Measures the dispatch of a few iterations, which consume the memory of `leaves`; returns the medians."""
    in_jax: list[float] = []  # seconds of this thread in each JAX call
    in_programs: list[float] = []  # seconds in compiled programs

    def wrap_call(call: ExecutableCall, kind: CallKind) -> ExecutableCall:
        def timed(*args: Any) -> Any:
            start = time.thread_time()
            results = call(*args)
            in_jax.append(time.thread_time() - start)
            if kind == "program":
                in_programs.append(in_jax[-1])
            return results

        return timed

    execute = Executor(schedule, executables, wrap_call)
    instructions = sum(times for i, times in walk(schedule.body) if not isinstance(i, Free | Loop))
    rows = []
    for _ in range(1 + _ITERATIONS):
        in_jax.clear()
        in_programs.clear()
        start = time.thread_time()
        leaves, *_ = execute(leaves)
        seconds = time.thread_time() - start
        jax.block_until_ready(leaves)
        outside = seconds - sum(in_jax)
        rows.append((seconds / instructions, outside / instructions, sum(in_programs) / max(len(in_programs), 1)))
    # JAX prepares a program in its first call, so skip it.
    return Dispatch(instructions, *(statistics.median(column) * 1e6 for column in zip(*rows[1:], strict=True)))
