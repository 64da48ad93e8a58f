"""What the host spends on an iteration that it drives: processor time per instruction, of this package and of JAX."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from msrl_jax.fragments.passes.instructions import Free, Loop, Schedule, walk
from msrl_jax.fragments.runtime.executables import Executables
from msrl_jax.fragments.runtime.execute import Executor
from msrl_jax.fragments.runtime.memory import Leaves

_ITERATIONS = 5


@dataclass(frozen=True)
class Dispatch:
    """What the host does to dispatch one iteration, in processor time of the thread that does it. Waiting takes none.

    Programs of a few operations for a CPU, which XLA runs in that thread, count.

    Attributes:
      instructions: programs, transfers and allocations of one iteration; those in loops count in every repetition.
      microseconds: time per instruction.
      python_microseconds: the part of it that passes outside of calls of JAX. Loops, and the release of arrays, are in it.
      call_microseconds: time of one call of a compiled program, without the rest of its instruction.
    """

    instructions: int
    microseconds: float
    python_microseconds: float
    call_microseconds: float


@dataclass
class _Clock:
    """Adds up the seconds of this thread in JAX, and those in compiled programs."""

    in_jax: float = 0.0
    in_programs: float = 0.0
    programs: int = 0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""
        is_program = isinstance(call, jax.stages.Compiled | jax.stages.Wrapped)

        def timed(*args: Any) -> Any:
            start = time.thread_time()
            results = call(*args)
            seconds = time.thread_time() - start
            self.in_jax += seconds
            if is_program:
                self.in_programs += seconds
                self.programs += 1
            return results

        return timed


def measure(schedule: Schedule, executables: Executables, leaves: Leaves) -> Dispatch:
    """Measures the dispatch of a few iterations.

    Args:
      schedule: the instructions, compiled.
      executables: the programs.
      leaves: the copies of every leaf of a state. Their memory is consumed.

    Returns:
      The medians.
    """
    clock = _Clock()
    execute = Executor(schedule, executables, clock.around)
    instructions = sum(times for i, times in walk(schedule.body) if not isinstance(i, Free | Loop))
    rows = []
    for _ in range(1 + _ITERATIONS):
        clock.in_jax, clock.in_programs, clock.programs = 0.0, 0.0, 0
        start = time.thread_time()
        leaves, *_ = execute(leaves)
        seconds = time.thread_time() - start
        jax.block_until_ready(leaves)
        call = clock.in_programs / max(clock.programs, 1)
        rows.append((seconds / instructions, (seconds - clock.in_jax) / instructions, call))
    # JAX prepares a program in its first call.
    return Dispatch(instructions, *(statistics.median(column) * 1e6 for column in zip(*rows[1:], strict=True)))
