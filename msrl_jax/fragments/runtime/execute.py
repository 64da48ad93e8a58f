"""The runtime: executes an instruction list by asynchronous dispatches.

If several processes run the program, each executes the whole list. Programs on devices of other processes return
arrays that have no local parts.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

from msrl_jax.fragments.graph.host_calls import IN_TRACES
from msrl_jax.fragments.passes.instructions import (
    Alloc,
    Free,
    HostCall,
    Instruction,
    Loop,
    Move,
    RunProgram,
    Schedule,
    Value,
    walk,
)
from msrl_jax.fragments.runtime.executables import Coalesced, DeltaTransfer, Executables
from msrl_jax.fragments.runtime.host_queue import HostQueue, resolve
from msrl_jax.fragments.runtime.send_changed import DeltaSender, DeltaStats
from msrl_jax.fragments.runtime.transfer import crossing, remote_array, transfer

Slots = list[Any]  # arrays, `HostFuture`s, and None where there is no value
Step = Callable[[Slots], None]
ExecutableCall = Callable[..., Sequence[jax.Array]]
CallKind: TypeAlias = Literal["program", "transfer", "wait"]
CallWrapper: TypeAlias = Callable[[ExecutableCall, CallKind], ExecutableCall]

# A CPU device admits 32 programs at a time, and threads launch them in any order. Later programs could fill the queue while an
# earlier one that they depend on waits for a slot: a deadlock.
_CPU_PROGRAMS_AHEAD = 12


class Executor:
    """Runs iterations of a compiled schedule.

    The state is a list with one entry per leaf (and register): the tuple of its copies, the canonical one first.
    """

    def __init__(
        self,
        schedule: Schedule,
        executables: Executables,
        wrap_call: CallWrapper = lambda call, kind: call,
        wrap_step: Callable[[Instruction, Step], Step] = lambda i, step: step,
        delta_stats: dict[Move, DeltaStats] | None = None,
    ):
        """Makes the steps.

        `wrap_call` wraps every JAX function that dispatches, e.g. to measure its time; `wrap_step` wraps the step of each
        instruction. `delta_stats` counts what Moves that send changes have sent.
        """
        self._schedule, self._executables, self._wrap_call, self._wrap_step = schedule, executables, wrap_call, wrap_step
        self._size = 1 + max(
            [v.index for copies in (*schedule.inputs, *schedule.outputs) for v in copies]
            + [v.index for v in executables.shardings],
            default=0,
        )
        self.senders: list[DeltaSender] = []
        self._delta_stats: dict[Move, DeltaStats] = {} if delta_stats is None else delta_stats
        self._rows: dict[jax.sharding.Sharding, list[jax.Array]] = {}
        self._launched: dict[Mesh, list[int]] = {}
        self._queue = HostQueue() if any(isinstance(i, HostCall) for i, _ in walk(schedule.body)) else None
        constants = transfer(list(schedule.constants.values()), [executables.shardings[v] for v in schedule.constants])
        self._constants = [(v.index, array) for v, array in zip(schedule.constants, constants, strict=True)]
        self._steps = [self._wrapped_step(i) for i in schedule.body]

    def __call__(
        self, state: Sequence[tuple[jax.Array, ...]]
    ) -> tuple[list[tuple[jax.Array, ...]], list[jax.Array], list[tuple[jax.Array, ...]]]:
        """Dispatches one iteration on the copies of every leaf, whose memory is consumed.

        Returns the next state, the metrics' leaves and the scalars of each check, without waiting for them.
        """
        slots: Slots = [None] * self._size
        for index, array in self._constants:
            slots[index] = array
        for values, copies in zip(self._schedule.inputs, state, strict=True):
            for v, x in zip(values, copies, strict=True):
                slots[v.index] = x
        try:
            for step in self._steps:
                step(slots)
            if self._queue is not None:
                self._queue.drain()
                slots = [resolve(x) for x in slots]
        finally:
            if self._queue is not None:
                self._queue.clear()  # after an error in a host call, or an interrupt
        after = [tuple(slots[v.index] for v in copies) for copies in self._schedule.outputs]
        measured = [tuple(slots[v.index] for v in scalars) for _, scalars in self._schedule.checks]
        return after, [slots[v.index] for v in self._schedule.metrics], measured

    def _wrapped_step(self, i: Instruction) -> Step:
        return self._wrap_step(i, self._make_step(i))

    def _make_step(self, i: Instruction) -> Step:
        match i:
            case HostCall():
                return self._host_call_step(i)
            case RunProgram():
                return self._run_step(i)
            case Move():
                return self._move_step(i)
            case Alloc():
                return self._call_step(i, [], i.results)
            case Free():
                nothing = [None] * len(i.values)
                return _slot_step(lambda: nothing, [], _slot_indices(i.values))
            case Loop():
                return self._loop_step(i)

    def _run_step(self, i: RunProgram) -> Step:
        first, count = int(i.index is not None), len(i.inputs)
        consumed = [first + k for k in (*i.donated, *range(count, count + len(i.writes)))]
        return self._call_step(i, [*([i.index] if i.index else []), *i.reads()], i.makes(), consumed)

    def _call_step(self, i: Instruction, reads: Sequence[Value], makes: Sequence[Value], consumed: Sequence[int] = ()) -> Step:
        return self._queued_step(
            self._program_call(self._executables.compiled[i], makes), _slot_indices(reads), _slot_indices(makes), consumed
        )

    def _queued_step(self, call: ExecutableCall, ins: Sequence[int], outs: Sequence[int], consumed: Sequence[int] = ()) -> Step:
        """Calls a function with slots, and stores its results in others; waits if arguments wait for the host."""
        queue, count = self._queue, len(outs)
        if queue is None:
            return _slot_step(call, ins, outs)
        return _slot_step(lambda *args: queue.call(call, args, consumed, count), ins, outs)

    def _host_call_step(self, i: HostCall) -> Step:
        queue, count = self._queue, len(i.outputs)
        assert queue is not None
        place = self._wrap_call(self._executables.call(self._executables.compiled[i]), "transfer")
        ins, outs = _slot_indices(i.inputs), _slot_indices(i.outputs)
        return _slot_step(lambda *args: queue.start(i.function, lambda results: place(*results), args, count), ins, outs)

    def _program_call(self, compiled: jax.stages.Compiled, makes: Sequence[Value]) -> ExecutableCall:
        """Returns the function that runs a program, throttled to the pace of its devices."""
        call = self._wrap_call(self._executables.call(compiled), "program")
        mesh = makes[0].placement.mesh if makes else None
        if mesh is None or mesh.size == 1 or makes[0].placement.devices[0].platform != "cpu":
            return call
        launched = self._launched.setdefault(mesh, [0])
        # Two programs with collectives between processes, in a different order on each, could wait for each other.
        ahead = _CPU_PROGRAMS_AHEAD if len({d.process_index for d in mesh.devices.flat}) == 1 else 1
        wait = self._wrap_call(lambda arrays: jax.block_until_ready(arrays), "wait")

        def paced(*arrays: jax.Array) -> Sequence[jax.Array]:
            results = call(*arrays)
            launched[0] += 1
            if launched[0] % ahead == 0:
                wait(results)
            return results

        return paced

    def _move_step(self, i: Move) -> Step:
        if i.is_copy:
            return self._call_step(i, i.sources, i.results)
        ins, outs = _slot_indices(i.sources), _slot_indices(i.results)
        if patching := self._executables.patching.get(i):
            return self._queued_step(self._make_sender(i, patching), ins, outs)
        if len(i.processes) > 1:
            return self._queued_step(self._crossing_call(i), ins, outs)
        shardings = [self._executables.shardings[v] for v in i.results]
        if jax.process_index() not in i.processes:
            remote_arrays = [remote_array(v.aval, sharding) for v, sharding in zip(i.results, shardings, strict=True)]
            return _slot_step(lambda: remote_arrays, [], outs)
        if coalesced := self._executables.coalesced.get(i):
            order = (*coalesced.separate, *coalesced.joined)
            return self._queued_step(self._coalesced_call(i, coalesced), [ins[k] for k in order], [outs[k] for k in order])
        place, copied = self._transfer_call(i), self._executables.compiled.get(i)
        copy = self._program_call(copied, i.results) if copied else None

        def send(*arrays: jax.Array) -> Sequence[jax.Array]:
            arrived = place(arrays, shardings)
            return copy(*arrived) if copy else arrived

        return self._queued_step(send, ins, outs)

    def _transfer_call(self, i: Move) -> Callable[..., Sequence[jax.Array]]:
        to_one = i.sources[0].placement.mesh.size > 1 and i.results[0].placement.mesh.size == 1
        return self._wrap_call(_place_one_copy if to_one else _place, "transfer")

    def _make_sender(self, i: Move, patching: DeltaTransfer) -> DeltaSender:
        source_programs = [self._program_call(p, i.sources) for p in (patching.join, patching.compare)]
        destination_programs = [self._program_call(p, i.results) for p in (patching.split, patching.patch)]
        wait = self._wrap_call(lambda array: jax.block_until_ready(array), "wait")
        stats = self._delta_stats.setdefault(i, DeltaStats(patching.words))
        self.senders.append(
            DeltaSender(patching, [*source_programs, *destination_programs], self._transfer_call(i), wait, stats)
        )
        return self.senders[-1]

    def _coalesced_call(self, i: Move, coalesced: Coalesced) -> ExecutableCall:
        place, num_separate = self._transfer_call(i), len(coalesced.separate)
        join, split = self._program_call(coalesced.join, i.sources), self._program_call(coalesced.split, i.results)

        def send(*arrays: jax.Array) -> Sequence[jax.Array]:
            arrived = place([*arrays[:num_separate], *join(*arrays[num_separate:])], coalesced.shardings)
            return [*arrived[:num_separate], *split(*arrived[num_separate:])]

        return send

    def _crossing_call(self, i: Move) -> ExecutableCall:
        kinds = tuple((v.aval.shape, v.aval.dtype) for v in i.sources)
        ends = [tuple(self._executables.shardings[v] for v in values) for values in (i.sources, i.results)]
        start = time.perf_counter()
        cross = self._wrap_call(crossing(kinds, *ends), "transfer")
        self._executables.seconds += time.perf_counter() - start
        return lambda *arrays: cross(arrays)

    def _loop_step(self, i: Loop) -> Step:
        steps = [self._wrapped_step(b) for b in i.body]
        rows = [(v.index, self._row_numbers(v, i.length)) for v in i.indices]
        enters = [c.body_in.index for c in i.carry]
        leaves = [c.body_out.index for c in i.carry]
        start = [(c.init.index, c.body_in.index) for c in i.carry]
        end = [(c.body_in.index, c.result.index) for c in i.carry]
        order = range(i.length - 1, -1, -1) if i.reverse else range(i.length)

        def step(slots: Slots) -> None:
            for init, body_in in start:
                slots[body_in] = slots[init]
            for init, _ in start:
                slots[init] = None
            for t in order:
                for slot, numbers in rows:
                    slots[slot] = numbers[t]
                for b in steps:
                    b(slots)
                carried = [slots[k] for k in leaves]
                for k in leaves:
                    slots[k] = None
                for k, x in zip(enters, carried, strict=True):
                    slots[k] = x
            for body_in, result in end:
                slots[result] = slots[body_in]
                slots[body_in] = None

        return step

    def _row_numbers(self, index: Value, length: int) -> list[jax.Array]:
        """Row numbers as arrays on the devices, so that a loop does not wait for transfers from the host."""
        sharding = self._executables.shardings[index]
        numbers = self._rows.setdefault(sharding, [])
        if len(numbers) < length:
            more = [np.int32(t) for t in range(len(numbers), length)]
            numbers += transfer(more, [sharding] * len(more))
        return numbers


def _slot_indices(values: Sequence[Value]) -> list[int]:
    return [v.index for v in values]


def _slot_step(call: Callable[..., Sequence[Any]], ins: Sequence[int], outs: Sequence[int]) -> Step:
    """Calls a function with slots, and stores its results in others."""

    def step(slots: Slots) -> None:
        for o, x in zip(outs, call(*[slots[k] for k in ins]), strict=True):
            slots[o] = x

    return step


def _place(arrays: Sequence[jax.Array], shardings: Sequence[jax.sharding.Sharding]) -> list[jax.Array]:
    return jax.device_put(list(arrays), list(shardings))


def _place_one_copy(arrays: Sequence[jax.Array], shardings: Sequence[jax.sharding.Sharding]) -> list[jax.Array]:
    """Puts arrays of several devices on one device; JAX would inspect all copies."""
    return _place([x.addressable_data(0) if x.is_fully_replicated else x for x in arrays], shardings)


def annotated_wait() -> jax.profiler.TraceAnnotation:
    """Returns a context for the host's waiting for devices, which names it in `jax.profiler` traces."""
    return jax.profiler.TraceAnnotation(f"{IN_TRACES}wait")


def named_in_traces(call: ExecutableCall, kind: CallKind) -> ExecutableCall:
    """Wraps a function so that its time has a name in `jax.profiler` traces."""

    def annotated(*args: Any) -> Any:
        with jax.profiler.TraceAnnotation(f"{IN_TRACES}{kind}"):
            return call(*args)

    return annotated
