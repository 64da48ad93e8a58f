"""The compiled training loop: a `Program` places a state, runs iterations and explains its plan."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from msrl_jax._compat import ClosedJaxpr, jaxpr_as_fun
from msrl_jax.fragments.graph.nodes import Graph
from msrl_jax.fragments.graph.trace import StateChecker, Traced, check_not_donated
from msrl_jax.fragments.passes.instructions import HostCall, Instruction, Move, Run, Schedule, Value, walk
from msrl_jax.fragments.passes.packing import unused_codecs
from msrl_jax.fragments.passes.placed_policy import PlacedPolicy
from msrl_jax.fragments.passes.validate import check_jit_is_on, check_no_mesh_is_set
from msrl_jax.fragments.placement import Device
from msrl_jax.fragments.plan.explain import explain
from msrl_jax.fragments.plan.plan import Plan
from msrl_jax.fragments.runtime.executables import Executables
from msrl_jax.fragments.runtime.execute import CallWrapper, Executor, named_in_traces, waiting
from msrl_jax.fragments.runtime.fused_loop import FusedLoop
from msrl_jax.fragments.runtime.lower import lower
from msrl_jax.fragments.runtime.memory import array_bytes, check_program_fits, is_planned, lacking_memory, largest_array
from msrl_jax.fragments.runtime.send_changed import DeltaStats, label_of
from msrl_jax.fragments.runtime.timing import (
    Dispatch,
    Prediction,
    check_delay,
    measure_costs,
    measure_dispatch,
    predict,
    time_chunks,
)
from msrl_jax.fragments.runtime.transfer import Leaves, initialize, put, read
from msrl_jax.fragments.support.checks import shown
from msrl_jax.fragments.support.random_keys import is_key
from msrl_jax.fragments.support.tracebacks import entry

State = TypeVar("State")

# How many iterations beyond the staleness the host may run ahead of the devices: hides dispatch and bounds memory.
_AHEAD = 2
# Iterations of a fused program that are measured together.
_TIMED = 8


class Delayed(NamedTuple):
    """The state of a run with stale actors: the algorithm's state, and the delayed parameters.

    Attributes:
      state: the algorithm's state.
      registers: the last values of every delayed leaf, oldest first.
    """

    state: Any
    registers: tuple[jax.Array, ...]


class Program(Generic[State]):
    """A training iteration, compiled for a distribution policy.

    Attributes:
      layout: the placements.
      graph: the fragmented dataflow graph: nodes with their placements, and opened loops.
      schedule: the instructions, with the values of the state and the metrics.
      traced: the traced iteration, before it was split into programs.
    """

    def __init__(
        self,
        placed: PlacedPolicy,
        graph: Graph,
        schedule: Schedule,
        fused: ClosedJaxpr | None,
        tree: Any,
        traced: Traced,
        seconds: float,
    ):
        self.layout, self.graph, self.schedule = placed.layout, graph, schedule
        self._placed_policy = placed
        self._x64: bool = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        self._tree, self.traced = tree, traced
        self._executables = Executables(seconds=seconds)
        self._expected = StateChecker(tree, [copies[0].label for copies in schedule.inputs[: tree.num_leaves]], traced)
        self._executor: Executor | None = None
        self._around: CallWrapper = lambda call, what: call
        self._sent: dict[Move, DeltaStats] = {}
        self._is_lowered = False
        self._fitting: set[jax.stages.Compiled] = set()
        self._once: Callable[..., Sequence[jax.Array]] | None = None
        self._shardings = [
            tuple(v.placement.sharding(spec, v.aval.shape) for v in copies)
            for copies, spec in zip(schedule.inputs, graph.axes, strict=True)
        ]
        leaves, at = [copies[0] for copies in schedule.inputs], [copies[0] for copies in self._shardings]
        rewritten = fused is not traced.jaxpr
        self._fused = FusedLoop(jaxpr_as_fun(fused), leaves, at, schedule.metrics, rewritten) if fused else None

    def _check_setting(self) -> None:
        check_jit_is_on()
        now: bool = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        if self._x64 and not now:
            raise RuntimeError(
                "the program was compiled under jax.enable_x64, but runs without it; run it with the setting that it was "
                "compiled with, or compile it again"
            )
        self._check_present()

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """The instructions of one iteration, in order; a single Run if the policy fuses the loop into one program."""
        body = self.schedule.body
        return tuple(i for i in body if isinstance(i, Run)) if self.is_fused else body

    @property
    def is_fused(self) -> bool:
        """Whether a whole run of iterations is one XLA program."""
        return self._fused is not None

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices in use."""
        return self.layout.devices

    @property
    def compile_seconds(self) -> float:
        """Seconds spent tracing and partitioning, and waiting for XLA, so far."""
        return self._executables.seconds

    @property
    def registers(self) -> dict[str, int]:
        """The number of values in `Delayed.registers` for each delayed leaf, by its pytree path, in order."""
        labels = (self.graph.labels[self.graph.region.carry[i]] for i in self.graph.delayed)
        return {label.removeprefix("state"): self.layout.staleness for label in labels}

    @property
    def shardings(self) -> tuple[Any, tuple[NamedSharding, ...]]:
        """Where the program keeps the state and the registers: a pytree like the state, and one sharding per register."""
        first, count = [copies[0] for copies in self._shardings], self._tree.num_leaves
        return jax.tree.unflatten(self._tree, first[:count]), tuple(first[count:])

    @property
    def nondeterminism_reason(self) -> str:
        """Why repeating iterations from the same state may give different results; empty if it cannot."""
        return "The loop calls the host" if self.traced.jaxpr.effects else ""

    @property
    def metrics_bytes(self) -> int:
        """Bytes of the metrics of one iteration."""
        return sum(v.nbytes for v in self.schedule.metrics)

    @property
    def state_bytes(self) -> dict[Device, int]:
        """Bytes of the state on every device of this process."""
        held: dict[Device, int] = {}
        for (leaf, *_), copies in zip(self.schedule.inputs, self._shardings, strict=True):
            for sharding in copies:
                part = jax.ShapeDtypeStruct(sharding.shard_shape(leaf.aval.shape), leaf.aval.dtype)
                for device in sharding.addressable_devices:
                    held[device] = held.get(device, 0) + array_bytes(part)
        return held

    def check_memory(self) -> None:
        """Raises ValueError if the state exceeds the memory of the devices; reports the bytes and the largest leaf."""
        if found := lacking_memory(self.state_bytes):
            devices, taken, limit = found
            largest = max((copies[0] for copies in self.schedule.inputs), key=lambda v: v.nbytes)
            raise ValueError(
                f"the state takes {taken:,} bytes of {', '.join(map(str, devices))}, which has {limit:,}; its largest leaf is "
                f"{largest.label}, {largest.aval.dtype}{list(largest.aval.shape)}. Use a smaller capacity, fewer environments "
                "or seeds, shorter chunks of a recorded run, or a policy that splits that leaf over more devices"
            )

    def _check_present(self) -> None:
        check_no_mesh_is_set()
        if missing := [d for d in self.devices if is_planned(d)]:
            raise RuntimeError(
                f"the program was compiled for {len(missing)} devices that this machine does not have ({missing[0]}, ...), "
                "such as those of plan_devices, so it can be explained, but no state can be placed and nothing runs. Compile "
                "it for devices of this machine (jax.devices()) to run it"
            )

    @entry
    def place(self, state: State | Delayed) -> Any:
        """Copies a state to where the program keeps it.

        Args:
          state: the state, on any devices or as NumPy arrays; or the state of a run with the same staleness.

        Returns:
          The state, on the program's devices; a `Delayed` (state and registers) if the policy has staleness.
        """
        self._check_present()
        return self._unflatten_state(self._place_leaves(state, copy=True))

    @entry
    def initialize(self, init: Callable[..., State], *args: Any) -> Any:
        """Computes a state and places it; large leaves are computed where the program keeps them.

        Args:
          init: pure function that makes a state like that passed to `compile`; NumPy arrays in it are placed unchanged.
          *args: its arguments, pytrees of arrays.

        Returns:
          The placed state, as `place` returns it.
        """
        self._check_present()
        with self._executables.timed():
            closed, shapes = jax.make_jaxpr(init, return_shape=True)(*args)
        self._expected.check_tree(jax.tree.structure(shapes))
        registers = [i for i in self.graph.delayed for _ in range(self.layout.staleness)]
        leaves = initialize(closed, jax.tree.leaves(args), self._shardings, registers, self._executables.evaluate)
        return self._unflatten_state(leaves)

    def unwrap(self, state: State | Delayed) -> State:
        """The algorithm's state, without the registers of stale parameters.

        Args:
          state: a state that `place` or `run` returned.

        Returns:
          A pytree like the one that the program was compiled for.
        """
        return cast(State, state.state) if isinstance(state, Delayed) else state

    @entry
    def __call__(self, state: State | Delayed) -> tuple[Any, Any]:
        """Runs one iteration.

        Args:
          state: the state, which stays valid.

        Returns:
          The next state and the metrics, as arrays that may still be being computed.
        """
        self._check_setting()
        if self._fused is None:
            leaves, row, measured = self._ready()(self._place_leaves(state, copy=True))
            scalars, tree = jax.tree.flatten([measured])
            self._check_measured(jax.tree.unflatten(tree, read(scalars)))
        else:
            if self._once is None:
                once = self._fused.compile(self._executables, None, donate=False)
                self._check_fits(once, "of one iteration")
                self._once = self._executables.call(once)
            flat = self._once(*[copies[0] for copies in self._place_leaves(state, copy=False)])
            count = len(self.schedule.inputs)
            leaves, row = [(x,) for x in flat[:count]], flat[count:]
        if len(self.devices) > 1 and self.devices[0].platform == "cpu":
            jax.block_until_ready(row)  # many calls could fill the queues of CPU devices, see runtime/execute.py
        return self._unflatten_state(leaves), jax.tree.unflatten(self.traced.metrics, row)

    @entry
    def run(
        self, state: State | Delayed, iterations: int, *, chunk: int | None = None, donate: bool = False
    ) -> tuple[Any, Any]:
        """Runs iterations.

        Args:
          state: the state, placed or not.
          iterations: number of iterations.
          chunk: maximum number of iterations between two readings of the metrics; one program if the policy fuses the loop. By
            default at most 100.
          donate: whether to reuse the state's memory; the state is invalid afterwards.

        Returns:
          The state after the last iteration and the metrics as NumPy arrays, with a leading axis of length `iterations`.

        Raises:
          ValueError: if `iterations` or `chunk` is not a positive integer, or the state does not match the one that the
            program was compiled for.
          RuntimeError: if an array of the state was donated to an earlier run, or under `jax.disable_jit`.
        """
        self._check_setting()
        for name, number in (("iterations", iterations), ("chunk", 1 if chunk is None else chunk)):
            if not isinstance(number, int | np.integer) or isinstance(number, bool) or number < 1:
                raise ValueError(f"{name}={shown(number)} must be an integer of at least 1")
        chunk = min(iterations, 100) if chunk is None else chunk
        leaves = self._place_leaves(state, copy=not donate)
        parts = []
        for start in range(0, iterations, chunk):
            leaves, metrics = self._chunk(leaves, min(chunk, iterations - start), chunk)
            parts.append(metrics)
        return self._unflatten_state(leaves), jax.tree.unflatten(self.traced.metrics, _joined(parts))

    @property
    def sent(self) -> dict[str, DeltaStats]:
        """Statistics of codecs that send changes: for every such transfer, its number, ends and first value, and the counts."""
        found = {}
        for number, (i, sent) in enumerate(self._sent.items()):
            ends = f"{i.sources[0].placement.name} -> {i.results[0].placement.name}"
            found[f"{number}: {ends}: {label_of(i.results[0])}"] = sent
        return found

    def warm_up(self, chunk: int = 1) -> None:
        """Compiles everything that a run with this chunk size needs, without running it.

        Args:
          chunk: number of iterations between two readings of the metrics.
        """
        if self._fused:
            self._fused.compile(self._executables, chunk)
        else:
            self._lower()

    def begin(self, chunk: int = 1) -> None:
        """Starts compiling in another thread what a run with this chunk size needs, if it is one program; see `warm_up`."""
        if self._fused and jax.process_count() == 1:
            self._fused.begin(self._executables, chunk)

    def compiled(self, chunk: int = 1) -> list[jax.stages.Compiled]:
        """The XLA programs of one iteration, for cost analysis and inspection.

        If the policy fuses the loop, this is the program of up to `chunk` iterations, whose first argument is their number.
        """
        return list(dict.fromkeys(compiled for i, compiled in self.programs(chunk) if isinstance(i, Run)))

    def programs(self, chunk: int = 1) -> Iterator[tuple[Instruction, jax.stages.Compiled]]:
        """The instructions that run XLA programs, each with its program: those of `compiled`, and those of transfers."""
        self.warm_up(chunk)
        if self._fused:
            yield from ((run, self._fused.compile(self._executables, chunk)) for run in self.instructions)
            return
        for i, _ in walk(self.instructions):
            if i in self._executables.compiled:
                yield i, self._executables.compiled[i]
            if coalesced := self._executables.coalesced.get(i):
                yield from ((i, coalesced.join), (i, coalesced.split))
            if sends := self._executables.patching.get(i):
                yield from ((i, program) for program in (sends.join, sends.compare, sends.split, sends.patch))

    def explain(self) -> Plan:
        """The plan: fragments, transfers, collectives, dispatches and warnings. Compiles, but does not run anything."""
        in_loop = self._fused is not None and self._fused.packs  # otherwise iterations of a run launch the same as a single one
        if self._fused:
            compiled = {r: self._fused.compile(self._executables, 1 if in_loop else None) for r in self.instructions}
        else:
            self.warm_up()
            compiled = self._executables.compiled
        return explain(
            self._placed_policy, self.traced.jaxpr.jaxpr, self.instructions, compiled, self._executables.shardings,
            self.is_fused, unused_codecs(self.graph, self.layout), in_loop=in_loop, registers=self._delayed_values(),
        )  # fmt: skip

    def _delayed_values(self) -> dict[str, list[Value]]:
        """The registers of every delayed leaf, by its label, at all placements that keep them."""
        rows, depth = iter(self.schedule.inputs[self._tree.num_leaves :]), self.layout.staleness
        labels = [self.graph.labels[self.graph.region.carry[i]] for i in self.graph.delayed]
        return {label: [v for _ in range(depth) for v in next(rows)] for label in labels}

    def measure_dispatch(self, state: State | Delayed) -> Dispatch | None:
        """Measures the host's time to dispatch an iteration, averaged over a few; None if the policy fuses the loop."""
        if self.is_fused:
            return None
        self._check_setting()
        self._ready()
        return measure_dispatch(self.schedule, self._executables, self._place_leaves(state, copy=True))

    def predict(self, state: State | Delayed, *, delay: float = 0.0) -> Prediction:
        """Predicts the time of an iteration, by measuring the instructions of a few iterations one by one.

        Args:
          state: the state, which stays valid; the results of these iterations are discarded.
          delay: seconds to add to every transfer between placements.

        Returns:
          The prediction. If the policy fuses the loop, it is the time of an iteration of that program, without transfers.

        Raises:
          ValueError: if a host function works in parallel with other instructions, which cannot be measured one by one.
        """
        check_delay(delay)
        self._check_setting()
        if started := [i.name for i, _ in walk(self.schedule.body) if isinstance(i, HostCall) and i.function.can_start]:
            raise ValueError(f"{started[0]} works while other instructions run, so it cannot be timed alone; measure a run")
        leaves = self._place_leaves(state, copy=True)
        if self._fused is None:
            self._ready()
            costs = measure_costs(self.schedule, self._executables, leaves)
            return predict(self.schedule, costs, ahead=_AHEAD + self.layout.staleness, delay=delay)
        seconds = time_chunks(lambda leaves: self._chunk(leaves, _TIMED, _TIMED)[0], leaves) / _TIMED
        return Prediction(seconds, {self.layout.placements[0].name: seconds}, 0.0, 0.0, 0)

    def named_in_traces(self) -> contextlib.AbstractContextManager[None]:
        """Names the host's dispatches, transfers and waits in `jax.profiler` traces, which takes a little time."""
        return self._with_calls(named_in_traces)

    def delayed(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        """Makes the host sleep before each transfer between placements and each transfer of host results.

        The host dispatches nothing while it sleeps, so delays add up, even where those of a network would overlap.
        """
        check_delay(seconds)

        def later(call: Callable[..., Any], what: str) -> Callable[..., Any]:
            def slow(*args: Any) -> Any:
                time.sleep(seconds)
                return call(*args)

            return slow if what == "transfer" and seconds else call

        return self._with_calls(later)

    @contextlib.contextmanager
    def _with_calls(self, around: CallWrapper) -> Iterator[None]:
        """Replaces the functions that dispatch; see `Executor`."""
        outer, before = self._around, None if self.is_fused else self._ready()
        if before is not None:
            self._around = lambda call, what: around(outer(call, what), what)
            self._executor = Executor(self.schedule, self._executables, self._around, sent=self._sent)
        try:
            yield
        finally:
            self._executor, self._around = before, outer

    def _chunk(self, leaves: Leaves, length: int, most: int) -> tuple[Leaves, list[np.ndarray]]:
        if self._fused:
            loop = self._fused.compile(self._executables, most)
            self._check_fits(loop, f"of up to {most} iterations")
            flat = self._executables.call(loop)(np.int32(length), *[copies[0] for copies in leaves])
            with waiting():
                rows = read(list(flat[len(leaves) :]))
            return [(x,) for x in flat[: len(leaves)]], [x[:length] for x in rows]
        execute, ahead = self._ready(), _AHEAD + self.layout.staleness
        made: list[tuple[list[jax.Array], list[tuple[jax.Array, ...]]]] = []
        for _ in range(length):
            leaves, row, measured = execute(leaves)
            made.append((row, measured))
            with waiting():
                if not row and not measured:
                    jax.block_until_ready(leaves)
                elif len(made) > ahead:
                    jax.block_until_ready(made[-1 - ahead])
        flat, tree = jax.tree.flatten(made)
        with waiting():
            made = jax.tree.unflatten(tree, read(flat))  # one transfer, and only here
        rows, measured = zip(*made, strict=True)
        self._check_measured(measured)
        return leaves, _together(np.stack, jnp.stack, rows)

    def _check_measured(self, measured: Sequence[Sequence[Sequence[Any]]]) -> None:
        """Raises if a codec lost values, given the scalars of its check in each iteration, on the host."""
        for (check, _), scalars in zip(self.schedule.checks, zip(*measured, strict=True), strict=True):
            check.raise_if_lost(*(np.stack(column) for column in zip(*scalars, strict=True)))

    def _lower(self) -> None:
        if not self._is_lowered:
            self.schedule = lower(self.schedule, self.graph.axes, self._executables)
            self._is_lowered = True

    def _ready(self) -> Executor:
        if self._executor is None:
            self._lower()
            for i, _ in walk(self.schedule.body):
                if isinstance(i, Run):
                    self._check_fits(self._executables.compiled[i], f"{i.name!r} @ {i.placement.name}")
            self._executor = Executor(self.schedule, self._executables, sent=self._sent)
        return self._executor

    def _check_fits(self, compiled: jax.stages.Compiled, name: str) -> None:
        if compiled not in self._fitting:
            array = largest_array(self.traced.jaxpr.jaxpr)
            check_program_fits(
                compiled, f"program {name}",
                f"The largest array of an iteration, before it is split, is {array}. Use fewer environments or seeds, shorter "
                "unrolls or chunks, smaller networks or minibatches, or a policy that splits the program over more devices",
            )  # fmt: skip
            self._fitting.add(compiled)

    def _place_leaves(self, state: State | Delayed, *, copy: bool) -> Leaves:
        """The copies of every leaf where the program keeps them; in new memory if `copy`."""
        delayed = isinstance(state, Delayed)
        flat, tree = jax.tree.flatten(state.state if delayed else state)
        self._expected.check_tree(tree)
        depth, extra = self.layout.staleness, len(self.schedule.inputs) - len(flat)
        if delayed and len(state.registers) != extra:
            raise ValueError(
                f"the state has {len(state.registers)} registers of stale parameters, but the program has {extra} "
                f"(staleness={depth}); pass program.unwrap(state) to start from its newest parameters"
            )
        self._expected.check_leaves(flat)
        for x in state.registers if delayed else ():
            check_not_donated(x, "a register of stale parameters")
        if extra:
            flat += state.registers if delayed else [flat[i] for i in self.graph.delayed for _ in range(depth)]
        return put(flat, self._shardings, copy)

    def _unflatten_state(self, leaves: Leaves) -> Any:
        flat = [copies[0] for copies in leaves]
        count = self._tree.num_leaves
        state = jax.tree.unflatten(self._tree, flat[:count])
        return Delayed(state, tuple(flat[count:])) if self.layout.staleness else state


def _joined(chunks: Sequence[list[Any]]) -> list[Any]:
    """Joins the metrics of chunks to those of a run, as writable NumPy arrays."""
    if len(chunks) == 1:  # JAX returns read-only arrays
        return [x.copy() if isinstance(x, np.ndarray) and not x.flags.writeable else x for x in chunks[0]]
    return _together(np.concatenate, jnp.concatenate, chunks)


def _together(on_host: Any, on_device: Any, rows: Sequence[Sequence[Any]]) -> list[Any]:
    """Combines rows of leaves leaf by leaf; typed keys stay JAX arrays, because NumPy does not support them."""
    keys = [is_key(x) for x in rows[0]]
    return [(on_device if key else on_host)(column) for key, column in zip(keys, zip(*rows, strict=True), strict=True)]
