"""Measures a program: the time of an iteration, and of its dispatch; and makes its transfers slower."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

from msrl_jax.fragments.passes.instructions import HostCall, walk
from msrl_jax.fragments.program import Program
from msrl_jax.fragments.runtime import execute, timing
from msrl_jax.fragments.runtime.timing import Dispatch, Prediction, check_delay

_TIMED = 8  # iterations of a fused program that are measured together


def dispatch_time(program: Program[Any], state: Any) -> Dispatch | None:
    """Measures the host's time to dispatch an iteration, averaged over a few; None if the policy fuses the loop.

    Args:
      program: the program.
      state: a state, which stays valid.

    Returns:
      The time.
    """
    if program.is_fused:
        return None
    program.check_setting()
    program.host_loop.executor()
    return timing.measure_dispatch(program.schedule, program.executables, program.state.place(state, copy=True))


def predict(program: Program[Any], state: Any, *, delay: float = 0.0) -> Prediction:
    """Predicts the time of an iteration, by measuring the instructions of a few iterations one by one.

    Args:
      program: the program.
      state: a state, which stays valid; the results of these iterations are discarded.
      delay: seconds to add to every transfer between placements.

    Returns:
      The prediction. If the policy fuses the loop, it is the time of an iteration of that program, without transfers.

    Raises:
      ValueError: if a host function works in parallel with other instructions, which cannot be measured one by one.
    """
    check_delay(delay)
    program.check_setting()
    if started := [i.name for i, _ in walk(program.schedule.body) if isinstance(i, HostCall) and i.function.can_start]:
        raise ValueError(f"{started[0]} works while other instructions run, so it cannot be timed alone; measure a run")
    leaves = program.state.place(state, copy=True)
    if program.is_fused:
        seconds = timing.time_chunks(lambda leaves: program.run_chunk(leaves, _TIMED, _TIMED)[0], leaves) / _TIMED
        return Prediction(seconds, {program.layout.placements[0].name: seconds}, 0.0, 0.0, 0)
    program.host_loop.executor()
    costs = timing.measure_costs(program.schedule, program.executables, leaves)
    return timing.predict_time(program.schedule, costs, ahead=program.ahead, delay=delay)


def named_in_traces(program: Program[Any]) -> contextlib.AbstractContextManager[None]:
    """Names the host's dispatches, transfers and waits in `jax.profiler` traces, which takes a little time."""
    return contextlib.nullcontext() if program.is_fused else program.host_loop.with_calls(execute.named_in_traces)


def delayed(program: Program[Any], seconds: float) -> contextlib.AbstractContextManager[None]:
    """Makes the host sleep before each transfer between placements and each transfer of host results.

    The host dispatches nothing while it sleeps, so delays add up, even where those of a network would overlap.
    """
    check_delay(seconds)

    def slow_down_transfers(call: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def slow(*args: Any) -> Any:
            time.sleep(seconds)
            return call(*args)

        return slow if kind == "transfer" and seconds else call

    return contextlib.nullcontext() if program.is_fused else program.host_loop.with_calls(slow_down_transfers)
