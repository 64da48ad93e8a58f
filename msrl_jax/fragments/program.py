"""The compiled training loop: a `Program` places a state, runs iterations and explains its plan."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from msrl_jax._compat import ClosedJaxpr, PyTreeDef, jaxpr_as_fun
from msrl_jax.fragments.graph.nodes import Graph
from msrl_jax.fragments.graph.trace import Traced
from msrl_jax.fragments.passes.instructions import Instruction, RunProgram, Schedule
from msrl_jax.fragments.passes.packing import unused_codecs
from msrl_jax.fragments.passes.placed_policy import PlacedPolicy
from msrl_jax.fragments.passes.validate import check_jit_is_on, check_no_mesh_is_set
from msrl_jax.fragments.placement import Device
from msrl_jax.fragments.plan.explain import explain
from msrl_jax.fragments.plan.plan import Plan
from msrl_jax.fragments.runtime.executables import Executables
from msrl_jax.fragments.runtime.fused_loop import FusedLoop
from msrl_jax.fragments.runtime.host_loop import HostLoop
from msrl_jax.fragments.runtime.memory import MemoryCheck, is_planned, largest_array
from msrl_jax.fragments.runtime.send_changed import DeltaStats, label_of
from msrl_jax.fragments.runtime.state_layout import Delayed, StateLayout
from msrl_jax.fragments.runtime.transfer import Leaves
from msrl_jax.fragments.support.checks import shown
from msrl_jax.fragments.support.random_keys import is_key
from msrl_jax.fragments.support.tracebacks import entry

State = TypeVar("State")

# How many iterations beyond the staleness the host may run ahead of the devices: hides dispatch and bounds memory.
_AHEAD = 2


class Program(Generic[State]):
    """A training iteration, compiled for a distribution policy.

    Attributes:
      layout: the placements.
      graph: the fragmented dataflow graph: nodes with their placements, and opened loops.
      state: where the program keeps the leaves of a state.
      traced: the traced iteration, before it was split into programs.
    """

    def __init__(
        self,
        placed: PlacedPolicy,
        graph: Graph,
        schedule: Schedule,
        fused: ClosedJaxpr | None,
        tree: PyTreeDef,
        traced: Traced,
        seconds: float,
    ):
        self.layout, self.graph, self.traced = placed.layout, graph, traced
        self._placed_policy = placed
        self._x64: bool = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        self.executables = Executables(seconds=seconds)
        self.ahead = _AHEAD + self.layout.staleness
        self.state = StateLayout(tree, schedule.inputs, graph.axes, graph.delayed, self.layout.staleness, traced)
        check_fits = MemoryCheck(functools.partial(_memory_remedy, traced))
        self.host_loop = HostLoop(schedule, graph.axes, self.executables, self.ahead, check_fits)
        leaves, shardings = [copies[0] for copies in schedule.inputs], [copies[0] for copies in self.state.copies]
        rewritten = fused is not traced.jaxpr
        self._fused = (
            FusedLoop(jaxpr_as_fun(fused), leaves, shardings, schedule.metrics, rewritten, self.executables, check_fits)
            if fused
            else None
        )

    def check_setting(self) -> None:
        """Raises RuntimeError if the program cannot run with JAX's current settings, or on these devices."""
        check_jit_is_on()
        now: bool = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        if self._x64 and not now:
            raise RuntimeError(
                "the program was compiled under jax.enable_x64, but runs without it; run it with the setting that it was "
                "compiled with, or compile it again"
            )
        self._check_devices_exist()

    @property
    def schedule(self) -> Schedule:
        """The instructions, with the values of the state and the metrics."""
        return self.host_loop.schedule

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """The instructions of one iteration, in order; a single RunProgram if the policy fuses the loop into one program."""
        body = self.schedule.body
        return tuple(i for i in body if isinstance(i, RunProgram)) if self.is_fused else body

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
        return self.executables.seconds

    @property
    def registers(self) -> dict[str, int]:
        """The number of values in `Delayed.registers` for each delayed leaf, by its pytree path, in order."""
        return dict.fromkeys((label.removeprefix("state") for label in self.state.registers), self.layout.staleness)

    @property
    def shardings(self) -> tuple[Any, tuple[NamedSharding, ...]]:
        """Where the program keeps the state and the registers: a pytree like the state, and one sharding per register."""
        return self.state.shardings

    @property
    def nondeterminism_reason(self) -> str:
        """Why repeating iterations from the same state may give different results; empty if it cannot."""
        return "The loop calls the host" if self.traced.jaxpr.effects else ""

    @property
    def metrics_bytes(self) -> int:
        """Bytes of the metrics of one iteration."""
        return sum(v.nbytes for v in self.schedule.metrics)

    def _check_devices_exist(self) -> None:
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
        self._check_devices_exist()
        return self.state.unflatten(self.state.place(state, copy=True))

    @entry
    def initialize(self, init: Callable[..., State], *args: Any) -> Any:
        """Computes a state and places it; large leaves are computed where the program keeps them.

        Args:
          init: pure function that makes a state like that passed to `compile`; NumPy arrays in it are placed unchanged.
          *args: its arguments, pytrees of arrays.

        Returns:
          The placed state, as `place` returns it.
        """
        self._check_devices_exist()
        return self.state.unflatten(self.state.initialize(init, args, self.executables))

    def unwrap(self, state: State | Delayed) -> State:
        """Returns the algorithm's state, without the registers of stale parameters.

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
        self.check_setting()
        loop = self._fused or self.host_loop
        leaves, row = loop.run_once(self.state.place(state, copy=not self.is_fused))  # which consumes them if not fused
        if len(self.devices) > 1 and self.devices[0].platform == "cpu":
            jax.block_until_ready(row)  # many calls could fill the queues of CPU devices, see runtime/execute.py
        return self.state.unflatten(leaves), jax.tree.unflatten(self.traced.metrics, row)

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
        self.check_setting()
        for name, number in (("iterations", iterations), ("chunk", 1 if chunk is None else chunk)):
            if not isinstance(number, int | np.integer) or isinstance(number, bool) or number < 1:
                raise ValueError(f"{name}={shown(number)} must be an integer of at least 1")
        chunk = min(iterations, 100) if chunk is None else chunk
        leaves = self.state.place(state, copy=not donate)
        parts = []
        for start in range(0, iterations, chunk):
            leaves, metrics = self.run_chunk(leaves, min(chunk, iterations - start), chunk)
            parts.append(metrics)
        return self.state.unflatten(leaves), jax.tree.unflatten(self.traced.metrics, _join_chunks(parts))

    @property
    def sent(self) -> dict[str, DeltaStats]:
        """Statistics of codecs that send changes: for every such transfer, its number, ends and first value, and the counts."""
        stats_by_name = {}
        for number, (i, stats) in enumerate(self.host_loop.delta_stats.items()):
            ends = f"{i.sources[0].placement.name} -> {i.results[0].placement.name}"
            stats_by_name[f"{number}: {ends}: {label_of(i.results[0])}"] = stats
        return stats_by_name

    def warm_up(self, chunk: int = 1) -> None:
        """Compiles everything that a run with this chunk size needs, without running it.

        Args:
          chunk: number of iterations between two readings of the metrics.
        """
        if self._fused:
            self._fused.compile(chunk)
        else:
            self.host_loop.lower()

    def begin(self, chunk: int = 1) -> None:
        """Starts compiling in another thread what a run with this chunk size needs, if it is one program; see `warm_up`."""
        if self._fused and jax.process_count() == 1:
            self._fused.begin(chunk)

    def compiled(self, chunk: int = 1) -> list[jax.stages.Compiled]:
        """Returns the XLA programs of one iteration, for cost analysis and inspection.

        If the policy fuses the loop, this is the program of up to `chunk` iterations, whose first argument is their number.
        """
        return list(dict.fromkeys(compiled for i, compiled in self.programs(chunk) if isinstance(i, RunProgram)))

    def programs(self, chunk: int = 1) -> Iterator[tuple[Instruction, jax.stages.Compiled]]:
        """Returns the instructions that run XLA programs, each with its program: those of `compiled`, and those of
        transfers.
        """
        if self._fused is None:
            return self.host_loop.programs()
        compiled = self._fused.compile(chunk)
        return ((run, compiled) for run in self.instructions)

    def explain(self) -> Plan:
        """Returns the plan: fragments, transfers, collectives, dispatches and warnings. Compiles, but does not run anything."""
        in_loop = self._fused is not None and self._fused.packs  # otherwise iterations of a run launch the same as a single one
        if self._fused:
            compiled = {r: self._fused.compile(1 if in_loop else None) for r in self.instructions}
        else:
            self.warm_up()
            compiled = self.executables.compiled
        return explain(
            self._placed_policy,
            self.traced.jaxpr.jaxpr,
            self.instructions,
            compiled,
            self.executables.shardings,
            self.is_fused,
            unused_codecs(self.graph, self.layout),
            in_loop=in_loop,
            registers=self.state.registers,
        )

    def run_chunk(self, leaves: Leaves, length: int, max_length: int) -> tuple[Leaves, list[Any]]:
        """Runs iterations; returns their metrics, stacked."""
        if self._fused:
            return self._fused.run(leaves, length, max_length)
        leaves, rows = self.host_loop.run(leaves, length)
        return leaves, _combine_rows(np.stack, jnp.stack, rows)


def _memory_remedy(traced: Traced) -> str:
    """What to do if a program exceeds the memory of its devices."""
    return (
        f"The largest array of an iteration, before it is split, is {largest_array(traced.jaxpr.jaxpr)}. Use fewer "
        "environments or seeds, shorter unrolls or chunks, smaller networks or minibatches, or a policy that splits the "
        "program over more devices"
    )


def _join_chunks(chunks: Sequence[list[Any]]) -> list[Any]:
    """Joins the metrics of chunks to those of a run, as writable NumPy arrays."""
    if len(chunks) == 1:  # JAX returns read-only arrays
        return [x.copy() if isinstance(x, np.ndarray) and not x.flags.writeable else x for x in chunks[0]]
    return _combine_rows(np.concatenate, jnp.concatenate, chunks)


def _combine_rows(
    on_host: Callable[[Sequence[Any]], Any], on_device: Callable[[Sequence[Any]], Any], rows: Sequence[Sequence[Any]]
) -> list[Any]:
    """Combines rows of leaves leaf by leaf; typed keys stay JAX arrays, because NumPy does not support them."""
    keys = [is_key(x) for x in rows[0]]
    return [(on_device if key else on_host)(column) for key, column in zip(keys, zip(*rows, strict=True), strict=True)]
