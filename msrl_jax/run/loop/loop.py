"""A run in progress: a loop of chunks of iterations on the devices; after each chunk, the hooks do the work of the host.

A hook may have any of these attributes. Phases run in the order of the hooks:

    every            number of steps; chunks end at its multiples, unless the user chose the length of chunks
    begin(run)       runs when the state exists, before the first chunk
    before(run)      runs before each chunk; return a `StopReason` or True to end the run; later hooks are then not called
    after(run)       runs after each chunk; return a `StopReason` or True to end the run
    end(run)         runs at the end, in reverse order of the hooks, even if one raises an error; not if a process is lost
"""

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np

from msrl_jax.agents.agent import innermost
from msrl_jax.data.experience import without_experience
from msrl_jax.envs.base import PyTree
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.fragments.program import Program
from msrl_jax.fragments.runtime.state_layout import Delayed
from msrl_jax.run import processes
from msrl_jax.run.disk.folder import TIMINGS
from msrl_jax.run.evaluation.evaluate import Evaluation
from msrl_jax.run.evaluation.history import NO_EPISODES, HostMetrics, LastEpisodes, Row, reduce_chunk
from msrl_jax.run.experiment.experiment import Experiment
from msrl_jax.run.experiment.pbt import acting_part

Hook: TypeAlias = object  # with some of the attributes above
Status: TypeAlias = Literal["finished", "stopped", "interrupted", "diverged", "unfinished", "earlier checkpoint"]


# Limits of one dispatched part of a chunk: bytes of its metrics, and iterations in host-driven and fused plans.
_METRICS_BYTES, _HOST_DRIVEN, _FUSED = 2**22, 256, 2**16

_PRECEDENCE = ("diverged", "interrupted", "finished", "stopped")  # if a run ends for several reasons, the first one counts
_TICKS = 50  # the approximate number of chunks of a run that takes less than a minute; every chunk ends with a tick
_SECONDS = 1.0  # the approximate length of a chunk of longer runs


class StopReason(NamedTuple):
    """Why a run ends; `reason` says what interrupted it, or which error ended it while it was "unfinished"."""

    status: Status
    reason: str = ""


_NOT_YET = StopReason("unfinished")


def chunk_length(iterations: int) -> int:
    """Returns the maximum chunk length: a divisor of `iterations` that gives about 50 chunks; else the last one is shorter."""
    if iterations <= _TICKS:
        return 1
    if iterations > 100_000:  # a run with this many iterations is long, so time determines the lengths
        return iterations // _TICKS
    lengths = range(math.ceil(iterations / (2 * _TICKS)), iterations * 5 // (2 * _TICKS) + 1)
    divisors = [length for length in lengths if iterations % length == 0]
    return min(divisors, key=lambda n: abs(iterations / n - _TICKS)) if divisors else round(iterations / _TICKS)


class ChunkScheduler:
    """Chooses the lengths of chunks from the time of iterations: powers of two that change by factors of two, or `max_length`.

    Chunks end at multiples of their length if possible, so that different runs have ticks at the same iterations.
    """

    def __init__(self, max_length: int, *, fixed: bool):
        self.max_length, self._fixed, self._length = max_length, fixed, max_length if fixed else 0

    @property
    def is_known(self) -> bool:
        """Whether a length is known; if not, `measured` needs the time of a first iteration."""
        return self._length > 0

    def measured(self, iterations: int, seconds: float) -> None:
        """Records a measurement."""
        if self._fixed:
            return
        seconds_per_iteration = max(seconds / iterations, 1e-9)
        if self._length and _SECONDS / 2 <= self._length * seconds_per_iteration <= 2 * _SECONDS:
            return
        target = _SECONDS / seconds_per_iteration
        if self._length:  # limits the effect of a single slow chunk
            target = min(max(target, self._length / 2), self._length * 2)
        self._length = self.max_length if target >= self.max_length else 2 ** max(0, math.floor(math.log2(target)))

    def length(self, iterations: int) -> int:
        """Returns the number of iterations of the next chunk."""
        return self._length - iterations % self._length


@dataclasses.dataclass
class Run:
    """A run in progress."""

    experiment: Experiment  # what the run computes
    policy: DistributionPolicy
    devices: Sequence[Device] | None  # the devices to use; None uses all
    path: Path | None  # the folder of the run
    deployment: dict[str, Any]  # where the run executes and what observes it, as plain data: the rest of `config.json`
    program: Program  # the compiled iteration
    chunk_scheduler: ChunkScheduler  # chooses the lengths of chunks
    started: float  # value of `time.perf_counter` at which the run would have started if it had never been interrupted
    run_state: PyTree = None  # in the form that `Program.run` takes and returns
    boundaries: tuple[int, ...] = ()  # chunks must end at multiples of these numbers of steps
    iteration: int = 0  # iterations done
    resumed_iteration: int = 0  # iterations done when the run resumed; 0 for a new run
    metrics: HostMetrics = dataclasses.field(default_factory=dict)  # metrics of the last chunk. `[N]` or `[N, M]`
    rows: list[Row] = dataclasses.field(default_factory=list)  # the history
    last_episodes: LastEpisodes = NO_EPISODES
    evaluation: Evaluation | None = None  # the last evaluation
    finding: Any = None  # the non-finite value that ends the run
    changed_at: int = 0  # the iteration at which the host last changed the state; 0 if it never did
    stop_reason: StopReason = _NOT_YET  # why the run ended; "unfinished" while it runs
    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(TIMINGS, 0.0))  # seconds spent, by part
    compiled_before: float = 0.0  # seconds that earlier processes and programs spent on compiling
    last_seconds: float = 0.0  # seconds that the last chunk took
    saving_seconds: float = 0.0  # seconds that saving takes

    @property
    def step(self) -> int:
        """Steps done."""
        return self.iteration * self.experiment.steps_per_iteration

    @property
    def iterations(self) -> int:
        """The number of iterations of the whole run."""
        return self.experiment.iterations

    @property
    def times(self) -> dict[str, float]:
        """Time since the start, and its parts: compilation (tracing programs and waiting for XLA), and others."""
        compiling = self.compiled_before + self.program.compile_seconds
        return {"wall_seconds": time.perf_counter() - self.started, "compile_seconds": compiling, **self.seconds}

    @property
    def registers(self) -> tuple[jax.Array, ...]:
        """The parameters in transit to the actors, if the policy has staleness."""
        return self.run_state.registers if isinstance(self.run_state, Delayed) else ()

    @property
    def description(self) -> dict[str, Any]:
        """The content of `config.json`."""
        return self.experiment.to_json() | self.deployment

    def whole_state(self) -> PyTree:
        """Returns the state of the run without registers and recorded steps."""
        return without_experience(self.program.unwrap(self.run_state))

    def acting_state(self) -> PyTree:
        """Returns the state in the form that the run's behavior takes."""
        return acting_part(self.whole_state())

    def state(self) -> PyTree:
        """Returns the algorithm's own state."""
        return innermost(self.whole_state())

    def advance(self) -> None:
        """Runs a chunk and adds a row to the history."""
        first_iteration, compiling, start = self.iteration, self.program.compile_seconds, time.perf_counter()
        parts = [] if self.chunk_scheduler.is_known else [self._iterate(1)]
        if remaining := min(self.chunk_scheduler.length(first_iteration), self._to_boundary(first_iteration)) - (
            self.iteration - first_iteration
        ):
            parts.append(self._iterate(remaining))
        self.metrics = parts[0] if len(parts) == 1 else jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
        self.last_seconds = time.perf_counter() - start - (self.program.compile_seconds - compiling)
        self.seconds["train_seconds"] += self.last_seconds
        steps = (self.iteration - first_iteration) * self.experiment.steps_per_iteration * self.experiment.members
        self.rows.append(
            {
                "step": self.step,
                "iteration": self.iteration,
                "seconds": time.perf_counter() - self.started,
                "steps_per_second": steps / self.last_seconds,
                **reduce_chunk(self.metrics, finite=self.experiment.guard == "skip"),
            }
        )
        if (scores := self.metrics.get(f"episode_{self.experiment.rank_by}")) is not None:
            self.last_episodes = self.last_episodes.add(first_iteration, scores, finite=self.experiment.guard == "skip")

    @property
    def max_at_once(self) -> int:
        """The maximum number of iterations between two reads of the metrics."""
        limit = _FUSED if self.program.is_fused else _HOST_DRIVEN
        return min(limit, self.chunk_scheduler.max_length, max(1, _METRICS_BYTES // max(self.program.metrics_bytes, 1)))

    def compile(self) -> None:
        """Compiles the training program, unless it is compiled already."""
        self.program.warm_up(self.max_at_once)

    def _iterate(self, count: int) -> HostMetrics:
        compiling, start = self.program.compile_seconds, time.perf_counter()
        self.run_state, metrics = self.program.run(self.run_state, count, chunk=self.max_at_once, donate=True)
        jax.block_until_ready(self.run_state)
        count = len(rows[0]) if (rows := jax.tree.leaves(metrics)) else count  # may be fewer, see `Execution`
        self.iteration += count
        seconds = time.perf_counter() - start - (self.program.compile_seconds - compiling)
        self.chunk_scheduler.measured(max(count, 1), processes.agreed(seconds))
        return metrics

    def _to_boundary(self, iteration: int) -> int:
        steps_per_iteration = self.experiment.steps_per_iteration
        multiples = ((iteration * steps_per_iteration // interval + 1) * interval for interval in self.boundaries)
        return min([self.iterations, *(-(-multiple // steps_per_iteration) for multiple in multiples)]) - iteration


def _call(hook: Hook, phase: str, run: Run) -> StopReason | None:
    """Calls a phase of a hook, if the hook has it; returns the reason to stop that the hook returned, if any."""
    answer = getattr(hook, phase)(run) if hasattr(hook, phase) else None
    if isinstance(answer, StopReason) and answer.status not in _PRECEDENCE:
        fact = f"{type(hook).__qualname__}.{phase} returned StopReason({answer.status!r})"
        raise ValueError(f"{fact}; the status is one of {', '.join(_PRECEDENCE)}: give what happened as the reason")
    return answer if isinstance(answer, StopReason) else StopReason("stopped") if is_true(answer) else None


def is_true(answer: Any) -> bool:
    """Whether the answer of a hook or a callback is True, or a scalar array that is."""
    return answer is True or (getattr(answer, "shape", None) == () and str(answer.dtype) == "bool" and bool(answer))


def loop(run: Run, hooks: Sequence[Hook]) -> None:
    """Runs chunks until all iterations are done or a hook ends the run; sets the run's `stop_reason`."""
    if run.deployment["chunk"] is None:
        evolution = [] if run.experiment.pbt is None else [run.experiment.pbt.every * run.experiment.steps_per_iteration]
        intervals = [*(getattr(hook, "every", None) for hook in hooks), *evolution]
        run.boundaries = tuple(int(steps) for steps in intervals if steps is not None)
    for hook in hooks:
        _call(hook, "begin", run)
    while True:
        for hook in hooks:
            if ending := _call(hook, "before", run):
                run.stop_reason = ending
                return
        run.advance()
        endings = [ending for hook in hooks if (ending := _call(hook, "after", run))]
        if run.iteration == run.iterations and run.finding is None:
            endings.append(StopReason("finished"))
        if endings:
            run.stop_reason = min(endings, key=lambda ending: _PRECEDENCE.index(ending.status))
            return


def finish(run: Run, hooks: Sequence[Hook]) -> list[Exception]:
    """Ends all hooks, the last one first; returns the errors of those that fail, each with a note that names the hook."""
    errors: list[Exception] = []
    for hook in reversed(hooks):
        try:
            _call(hook, "end", run)
        except Exception as error:
            error.add_note(f"raised by `end` of the hook {type(hook).__qualname__}; the run itself is complete")
            errors.append(error)
            if processes.is_loss(error):
                break  # the other hooks would wait for a process that has died
    return errors
