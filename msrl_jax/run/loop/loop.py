"""A run in progress: a loop of chunks of iterations on the devices, after each of which the hooks do the host's work.

A hook has any of these, which are called in the order of the hooks:

    every            steps at whose multiples chunks end, unless the user chose the length of chunks
    begin(run)       the state is there, and nothing has run
    before(run)      before each chunk; an `StopReason` ends the run, and the hooks after that one are not called
    after(run)       after each chunk; an `StopReason` ends the run, and so does True
    end(run)         the run is over: the last hook first; all are called, also if one of them raises an error
"""

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np

from msrl_jax.algorithms.agent import innermost
from msrl_jax.data.experience import without_experience
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.fragments.program import Delayed, Program
from msrl_jax.run import processes
from msrl_jax.run.disk.folder import TIMINGS
from msrl_jax.run.evaluation.evaluate import Evaluation
from msrl_jax.run.evaluation.history import NO_EPISODES, HostMetrics, LastEpisodes, Row, reduce_chunk
from msrl_jax.run.experiment.pbt import acting_part
from msrl_jax.run.experiment.spec import Experiment

Status: TypeAlias = Literal["finished", "stopped", "interrupted", "diverged", "unfinished"]


# Limits of one dispatched part of a chunk: bytes of its metrics, and its iterations in plans of both kinds.
_METRICS_BYTES, _HOST_DRIVEN, _FUSED = 2**22, 256, 2**16

_FIRST = ("diverged", "interrupted", "finished", "stopped")  # if a run ends for several reasons, the first one counts
_TICKS = 50  # the approximate number of chunks of a run that takes less than a minute; every chunk ends with a tick
_SECONDS = 1.0  # the approximate length of a chunk of longer runs


class StopReason(NamedTuple):
    """Why a run ends; `reason` says what interrupted it, or which error ended it while it was "unfinished"."""

    status: Status
    reason: str = ""


_NOT_YET = StopReason("unfinished")


def chunk_length(iterations: int) -> int:
    """The largest length of a chunk: the divisor of `iterations` that gives about 50 chunks; else the last one is shorter."""
    if iterations <= _TICKS:
        return 1
    if iterations > 100_000:  # a run of this many is long, so that time decides
        return iterations // _TICKS
    lengths = range(math.ceil(iterations / (2 * _TICKS)), iterations * 5 // (2 * _TICKS) + 1)
    divisors = [length for length in lengths if iterations % length == 0]
    return min(divisors, key=lambda n: abs(iterations / n - _TICKS)) if divisors else round(iterations / _TICKS)


class ChunkScheduler:
    """Chooses the lengths of chunks by the time of iterations: powers of two that change by factors of two, or `most`.

    Chunks end at multiples of their length where they can, so that runs have their ticks at the same iterations.
    """

    def __init__(self, most: int, *, fixed: bool):
        self.most, self._fixed, self._length = most, fixed, most if fixed else 0

    @property
    def is_known(self) -> bool:
        """Whether there is a length; if not, `measured` needs the time of a first iteration."""
        return self._length > 0

    def measured(self, iterations: int, seconds: float) -> None:
        """Takes a measurement into account."""
        if self._fixed:
            return
        each = max(seconds / iterations, 1e-9)
        if self._length and _SECONDS / 2 <= self._length * each <= 2 * _SECONDS:
            return
        wanted = _SECONDS / each
        if self._length:  # a single slow chunk changes little
            wanted = min(max(wanted, self._length / 2), self._length * 2)
        self._length = self.most if wanted >= self.most else 2 ** max(0, math.floor(math.log2(wanted)))

    def length(self, done: int) -> int:
        """The number of iterations of the next chunk."""
        return self._length - done % self._length


@dataclasses.dataclass
class Run:
    """A run in progress."""

    experiment: Experiment  # what it computes
    policy: DistributionPolicy
    devices: Sequence[Device] | None  # that it may use; all if None
    path: Path | None  # its folder
    deployment: dict[str, Any]  # where it runs and what watches it, as plain data: the rest of `config.json`
    program: Program  # the compiled iteration
    run_state: Any  # as `Program.run` takes and returns it
    pace: ChunkScheduler  # chooses the lengths of chunks
    boundaries: tuple[int, ...]  # numbers of steps at whose multiples a chunk has to end
    started: float  # time of `time.perf_counter` at which it would have started if it had never been interrupted
    iteration: int = 0  # iterations done
    resumed_from: int = 0  # iterations that were done when it went on; 0 for a new run
    metrics: HostMetrics = dataclasses.field(default_factory=dict)  # of the last chunk. `[N]` or `[N, M]`
    rows: list[Row] = dataclasses.field(default_factory=list)  # the history
    last_episodes: LastEpisodes = NO_EPISODES
    evaluation: Evaluation | None = None  # the last one
    finding: Any = None  # what is not finite and ends the run
    changed_at: int = 0  # the iteration at which the host last changed the state; 0 if it never did
    ending: StopReason = _NOT_YET  # why it ended; "unfinished" while it runs
    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(TIMINGS, 0.0))  # spent, by part
    compiled_before: float = 0.0  # seconds that earlier processes and programs spent on compiling
    last_seconds: float = 0.0  # that the last chunk took
    saving_seconds: float = 0.0  # that saving takes

    @property
    def step(self) -> int:
        """Steps done."""
        return self.iteration * self.experiment.steps_per_iteration

    @property
    def iterations(self) -> int:
        """Iterations of the whole run."""
        return self.experiment.iterations

    @property
    def times(self) -> dict[str, float]:
        """Time since the start, and its parts: on compiling (tracing programs and waiting for XLA), and others."""
        compiling = self.compiled_before + self.program.compile_seconds
        return {"wall_seconds": time.perf_counter() - self.started, "compile_seconds": compiling, **self.seconds}

    @property
    def registers(self) -> tuple[jax.Array, ...]:
        """The parameters on their way to the actors, if the policy has staleness."""
        return self.run_state.registers if isinstance(self.run_state, Delayed) else ()

    @property
    def description(self) -> dict[str, Any]:
        """The content of `config.json`."""
        return self.experiment.to_json() | self.deployment

    def whole_state(self) -> Any:
        """The state of the run without registers and recorded steps."""
        return without_experience(self.program.unwrap(self.run_state))

    def acting_state(self) -> Any:
        """The state as the run's behavior takes it."""
        return acting_part(self.whole_state())

    def state(self) -> Any:
        """The algorithm's own state."""
        return innermost(self.whole_state())

    def advance(self) -> None:
        """Runs a chunk and adds a row to the history."""
        first, compiling, start = self.iteration, self.program.compile_seconds, time.perf_counter()
        parts = [] if self.pace.is_known else [self._iterate(1)]
        if rest := min(self.pace.length(first), self._to_boundary(first)) - (self.iteration - first):
            parts.append(self._iterate(rest))
        self.metrics = parts[0] if len(parts) == 1 else jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
        self.last_seconds = time.perf_counter() - start - (self.program.compile_seconds - compiling)
        self.seconds["train_seconds"] += self.last_seconds
        steps = (self.iteration - first) * self.experiment.steps_per_iteration * self.experiment.members
        self.rows.append({
            "step": self.step,
            "iteration": self.iteration,
            "seconds": time.perf_counter() - self.started,
            "steps_per_second": steps / self.last_seconds,
            **reduce_chunk(self.metrics, finite=self.experiment.guard == "skip"),
        })  # fmt: skip
        if (scores := self.metrics.get(f"episode_{self.experiment.rank_by}")) is not None:
            self.last_episodes = self.last_episodes.add(first, scores, finite=self.experiment.guard == "skip")

    @property
    def most_at_once(self) -> int:
        """The largest number of iterations between two readings of the metrics."""
        limit = _FUSED if self.program.is_fused else _HOST_DRIVEN
        return min(limit, self.pace.most, max(1, _METRICS_BYTES // max(self.program.metrics_bytes, 1)))

    def compile(self) -> None:
        """Compiles the training program, unless it is compiled."""
        self.program.warm_up(self.most_at_once)

    def again(self, state: Any, count: int) -> tuple[Any, Any]:
        """Runs iterations from another state, which stays valid."""
        return self.program.run(state, count, chunk=self.most_at_once)

    def _iterate(self, count: int) -> Any:
        compiling, start = self.program.compile_seconds, time.perf_counter()
        self.run_state, metrics = self.program.run(self.run_state, count, chunk=self.most_at_once, donate=True)
        jax.block_until_ready(self.run_state)
        count = len(rows[0]) if (rows := jax.tree.leaves(metrics)) else count  # it may be fewer, see `Execution`
        self.iteration += count
        seconds = time.perf_counter() - start - (self.program.compile_seconds - compiling)
        self.pace.measured(max(count, 1), processes.agreed(seconds))
        return metrics

    def _to_boundary(self, iteration: int) -> int:
        each = self.experiment.steps_per_iteration
        multiples = ((iteration * each // every + 1) * every for every in self.boundaries)
        return min([self.iterations, *(-(-multiple // each) for multiple in multiples)]) - iteration


def _call(hook: Any, phase: str, run: Run) -> StopReason | None:
    """Calls a phase of a hook, if it has it; gives the ending that it asks for."""
    answer = getattr(hook, phase)(run) if hasattr(hook, phase) else None
    return StopReason("stopped") if answer is True else answer if isinstance(answer, StopReason) else None


def loop(run: Run, hooks: Sequence[Any]) -> None:
    """Runs chunk after chunk, until all iterations are done or a hook ends the run, which then has its `ending`."""
    for hook in hooks:
        _call(hook, "begin", run)
    while True:
        for hook in hooks:
            if ending := _call(hook, "before", run):
                run.ending = ending
                return
        run.advance()
        endings = [ending for hook in hooks if (ending := _call(hook, "after", run))]
        if run.iteration == run.iterations and run.finding is None:
            endings.append(StopReason("finished"))
        if endings:
            run.ending = min(endings, key=lambda ending: _FIRST.index(ending.status))
            return


def finish(run: Run, hooks: Sequence[Any]) -> list[Exception]:
    """Has all hooks finish what they do, the last one first; gives the errors of those that cannot, with a note of the hook."""
    errors: list[Exception] = []
    for hook in reversed(hooks):
        try:
            _call(hook, "end", run)
        except Exception as error:
            error.add_note(f"raised by `end` of the hook {type(hook).__qualname__}; the run itself is complete")
            errors.append(error)
            if processes.is_loss(error):
                break  # the others would wait for a process that is gone
    return errors
