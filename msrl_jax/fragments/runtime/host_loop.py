"""A training loop as instructions that the host dispatches, one iteration after another."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from msrl_jax.fragments.passes.instructions import Instruction, Move, RunProgram, Schedule, walk
from msrl_jax.fragments.runtime.executables import Executables
from msrl_jax.fragments.runtime.execute import CallWrapper, Executor, annotated_wait
from msrl_jax.fragments.runtime.lower import lower
from msrl_jax.fragments.runtime.memory import MemoryCheck
from msrl_jax.fragments.runtime.send_changed import DeltaStats
from msrl_jax.fragments.runtime.transfer import Leaves, read


class HostLoop:
    """Iterations that an `Executor` dispatches. The host runs at most `ahead` iterations ahead of the devices."""

    def __init__(
        self, schedule: Schedule, axes: Sequence[PartitionSpec], executables: Executables, ahead: int, check_fits: MemoryCheck
    ):
        """Nothing compiles before the first use."""
        self.schedule, self.delta_stats = schedule, dict[Move, DeltaStats]()
        self._axes, self._executables, self._ahead, self._check_fits = axes, executables, ahead, check_fits
        self._is_lowered = False
        self._executor: Executor | None = None
        self._wrap_call: CallWrapper = lambda call, kind: call

    def lower(self) -> None:
        """Compiles all programs."""
        if not self._is_lowered:
            self.schedule = lower(self.schedule, self._axes, self._executables)
            self._is_lowered = True

    def executor(self) -> Executor:
        """Returns the executor; raises ValueError if a program exceeds the memory of its devices."""
        if self._executor is None:
            self.lower()
            for i, _ in walk(self.schedule.body):
                if isinstance(i, RunProgram):
                    self._check_fits(self._executables.compiled[i], f"program {i.name!r} @ {i.placement.name}")
            self._executor = Executor(self.schedule, self._executables, delta_stats=self.delta_stats)
        return self._executor

    def programs(self) -> Iterator[tuple[Instruction, jax.stages.Compiled]]:
        """Yields the instructions that run XLA programs, each with its program, and transfers with theirs."""
        self.lower()
        for i, _ in walk(self.schedule.body):
            if i in self._executables.compiled:
                yield i, self._executables.compiled[i]
            if coalesced := self._executables.coalesced.get(i):
                yield from ((i, coalesced.join), (i, coalesced.split))
            if sends := self._executables.patching.get(i):
                yield from ((i, program) for program in (sends.join, sends.compare, sends.split, sends.patch))

    def run(self, leaves: Leaves, length: int) -> tuple[Leaves, list[tuple[Any, ...]]]:
        """Runs iterations on leaves, whose memory they consume; returns the rows of metrics, read to the host."""
        execute = self.executor()
        outputs: list[tuple[list[jax.Array], list[tuple[jax.Array, ...]]]] = []
        for _ in range(length):
            leaves, row, measured = execute(leaves)
            outputs.append((row, measured))
            with annotated_wait():
                if not row and not measured:
                    jax.block_until_ready(leaves)
                elif len(outputs) > self._ahead:
                    jax.block_until_ready(outputs[-1 - self._ahead])
        flat, tree = jax.tree.flatten(outputs)
        with annotated_wait():
            outputs = jax.tree.unflatten(tree, read(flat))  # one transfer, and only here
        rows, measured = zip(*outputs, strict=True)
        self._check_measured(measured)
        return leaves, list(rows)

    def run_once(self, leaves: Leaves) -> tuple[Leaves, list[jax.Array]]:
        """Runs one iteration on leaves, whose memory it consumes; returns metrics that may still be being computed."""
        leaves, row, measured = self.executor()(leaves)
        scalars, tree = jax.tree.flatten([measured])
        self._check_measured(jax.tree.unflatten(tree, read(scalars)))
        return leaves, row

    @contextlib.contextmanager
    def with_calls(self, wrap_call: CallWrapper) -> Iterator[None]:
        """Replaces the functions that dispatch; see `Executor`."""
        outer, before = self._wrap_call, self.executor()
        self._wrap_call = lambda call, kind: wrap_call(outer(call, kind), kind)
        self._executor = Executor(self.schedule, self._executables, self._wrap_call, delta_stats=self.delta_stats)
        try:
            yield
        finally:
            self._executor, self._wrap_call = before, outer

    def _check_measured(self, measured: Sequence[Sequence[Sequence[Any]]]) -> None:
        """Raises if a codec lost values, given the scalars of its check in each iteration, on the host."""
        for (check, _), scalars in zip(self.schedule.checks, zip(*measured, strict=True), strict=True):
            check.raise_if_lost(*(np.stack(column) for column in zip(*scalars, strict=True)))
