"""Hooks that stop, evaluate, record and save a run. Disk errors never end a run."""

import contextlib
import dataclasses
import functools
import math
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic as now
from types import FrameType
from typing import Any

import jax
import numpy as np

from msrl_jax.agents.agent import innermost
from msrl_jax.data.check_spaces import bytes_per_step
from msrl_jax.data.experience import ExperienceWriter, without_rows
from msrl_jax.data.formats import check_new
from msrl_jax.fragments.support.checks import shown, whole
from msrl_jax.fragments.support.random_keys import key_for
from msrl_jax.run import processes
from msrl_jax.run.disk import folder
from msrl_jax.run.disk.checkpoint import CheckpointWriter, complete_checkpoints
from msrl_jax.run.disk.run_toml import repeating
from msrl_jax.run.disk.store import Saved, progress_of
from msrl_jax.run.evaluation.evaluate import make_evaluator
from msrl_jax.run.evaluation.history import Row
from msrl_jax.run.experiment.experiment import Experiment
from msrl_jax.run.loop.loop import Run, StopReason, chunk_length

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
TIME_LIMIT = "time limit"

WARN_LOST = 0.01  # share of lost steps from which a run warns

_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
AUTOMATIC = 60.0  # seconds between checkpoints if the user gives no interval
_SHARE = 0.02  # maximum fraction of the time that training waits for checkpoints at automatic intervals
_RING_BYTES = 2**26  # maximum size of the recorded steps of a chunk on the devices, if `chunk` is not given


def parse_duration(name: str, value: object) -> float:
    """Parses a duration."""
    duration: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        duration = float(value)
    elif isinstance(value, str) and value and (match := _DURATION.fullmatch(value.strip().lower())) and any(match.groups()):
        duration = sum(float(n) * unit for n, unit in zip(match.groups(), (86400, 3600, 60, 1), strict=True) if n)
    if duration is None or not 0 < duration < float("inf"):
        raise ValueError(f"{name}={shown(value)}: use text such as '90s', '10m' or '5h50m', or in Python a number of seconds")
    return duration


class StopRequests:
    """The known reasons to stop a run; a hook that ends the run if any process knows a reason."""

    def __init__(self, deadline: float | None = None):
        self.deadline = deadline  # value of `now` at which the run must be over
        self.signal = ""  # the name of the received signal, if any

    def reason(self, next_seconds: float) -> str:
        """Returns the reason to stop the run now, if any process knows one; all processes must call it."""
        is_late = self.deadline is not None and now() + next_seconds >= self.deadline
        return next(filter(None, processes.gathered(self.signal or TIME_LIMIT * is_late)), "")

    def before(self, run: Run) -> StopReason | None:
        """Ends the run if there is a reason to stop before the next chunk would be done and saved."""
        reason = self.reason(run.last_seconds + run.saving_seconds)
        return StopReason("interrupted", reason) if reason else None

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Notes the first signal. A second one ends the process immediately; a second Ctrl-C raises KeyboardInterrupt."""
        if self.signal and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or signal.Signals(signum).name
        for other in SIGNALS:  # the default action takes effect even while compiled code runs
            if other != signal.SIGINT:
                signal.signal(other, signal.SIG_DFL)


@contextlib.contextmanager
def stop_requests(limit: float | None = None) -> Iterator[StopRequests]:
    """Handles signals that ask the process to end, and the time limit; outside the main thread, only the time limit."""
    requests = StopRequests(None if limit is None else now() + limit)
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return
    handlers: dict[int, Callable[..., Any] | int | None] = {}
    for signum in SIGNALS:
        # A shell's nohup, for example, makes the process ignore SIGHUP.
        if signal.getsignal(signum) is not signal.SIG_IGN:
            handlers[signum] = signal.signal(signum, requests.on_signal)
    try:
        yield requests
    finally:
        for signum, handler in handlers.items():  # None is a handler of compiled code, such as that of jax.distributed
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)


def evaluation_key(experiment: Experiment) -> jax.Array:
    """Returns the key for the evaluations of a run, or keys `[M]`."""
    fold = functools.partial(key_for, "evaluation")
    return (jax.vmap(fold) if experiment.has_members else fold)(experiment.key)


class Evaluating:
    """Plays greedy episodes when they are due and at the end of the run, with the same keys every time and for every member."""

    def __init__(self, experiment: Experiment, episodes: int, every: int | None):
        self._play = make_evaluator(experiment.behavior, episodes, members=experiment.has_members)
        self._key = evaluation_key(experiment)
        nan = np.full(experiment.members, np.nan) if experiment.has_members else np.nan
        names = ("eval_return", "eval_length", *(f"eval_return/{team}" for team in self._play.teams))
        self._unknown = dict.fromkeys(names, nan)
        self._has_begun, self._from, self.every, self.env = False, 0, every, self._play.env

    def before(self, run: Run) -> None:
        """Compiles the evaluation in another thread while the chunks after the first one run."""
        self._from = run.step
        if not self._has_begun and run.iteration > run.resumed_iteration and jax.process_count() == 1:
            start, self._has_begun = time.perf_counter(), True
            self._play.begin(run.acting_state(), self._key)
            run.seconds["evaluation_seconds"] += time.perf_counter() - start

    def after(self, run: Run) -> None:
        """Evaluates if it is due, unless a value is non-finite."""
        run.rows[-1] |= self._unknown
        is_due = self.every is not None and run.step // self.every > self._from // self.every
        if run.finding is None and (is_due or run.iteration == run.iterations):
            start, self._has_begun = time.perf_counter(), True
            run.evaluation = self._play(run.acting_state(), self._key)
            run.seconds["evaluation_seconds"] += time.perf_counter() - start
            run.rows[-1] |= run.evaluation.means


@dataclasses.dataclass
class Recording:
    """Writes the steps of every chunk to a data set."""

    writer: ExperienceWriter

    def after(self, run: Run) -> None:
        """Writes the steps since the last chunk."""
        steps = run.iteration * (run.experiment.steps_per_iteration // run.experiment.behavior.agent.env.num_envs)
        self.writer.add(run.program.unwrap(run.run_state), steps - self.writer.progress["steps"])

    def end(self, run: Run) -> None:
        """Joins the steps into one file; keeps their parts if the run may resume later."""
        self.writer.finish(goes_on=run.path is not None and run.stop_reason.status not in ("finished", "diverged"))


def with_recording(
    experiment: Experiment, record: Path | None, chunk: int | None, policy: str, saved: Saved | None
) -> tuple[Experiment, Recording | None, int]:
    """Returns the run, with recording environments if it is recorded; its hook; and the maximum iterations per chunk."""
    max_iterations = min(chunk or chunk_length(experiment.iterations), experiment.iterations)
    progress: dict[str, int] | None = None
    if saved is not None:
        progress = {"steps": 0, "parts": 0} if saved.checkpoint is None else saved.checkpoint.progress["recorded"]
        if progress is None and record is not None:
            raise ValueError(f"record={str(record)!r}: the run in {saved.path} was not recorded from its start; omit it")
        previous = saved.description["record"]
        if record is None:
            record = None if previous is None else Path(previous)
        elif previous is None or os.path.abspath(record) != previous:
            check_new(record)  # write the new steps to a separate file
            progress = None if progress is None else progress | {"parts": 0}
    if record is None:
        return experiment, None, max_iterations
    agent = experiment.behavior.agent
    if agent.unit != "environment steps":
        raise ValueError(f"record={str(record)!r}: {experiment.name} takes no environment steps; omit it")
    if getattr(innermost(jax.eval_shape(agent.init, jax.random.key(0))), "env_state", None) == ():
        raise ValueError(f"record={str(record)!r}: {experiment.name} keeps no environments between iterations; omit it")
    steps = agent.steps_per_iteration // agent.env.num_envs
    if chunk is None:
        size = bytes_per_step(experiment.environment) * agent.steps_per_iteration * experiment.members
        max_iterations = max(1, min(max_iterations, _RING_BYTES // size))
    writer = ExperienceWriter(record, experiment.about() | {"policy": policy}, progress)
    return experiment.record(max_iterations * steps), Recording(writer), max_iterations


class LostSteps:
    """Warns once if a replay buffer loses steps because its codec cannot keep their observations; ends a run that loses all."""

    def __init__(self):
        self._has_warned = False

    def after(self, run: Run) -> None:
        """Compares the buffer's count of lost steps with the number of all steps."""
        counts = (x for name, x in run.metrics.items() if name.partition("/")[0] == "replay_lost")
        share = max((float(np.asarray(count)[-1].max()) for count in counts), default=0.0) / max(run.step, 1)
        if self._has_warned or share < WARN_LOST:
            return
        self._has_warned = True
        fact = f"the replay buffer has lost {share:.0%} of the steps: replay.storage cannot keep their observations"
        remedy = "use another codec, or leave replay.storage out; replay_lost counts lost steps, which no update uses"
        if share >= 1:
            raise ValueError(f"{fact}, so nothing would be learned; {remedy}")
        warnings.warn(f"{fact}; {remedy}", UserWarning, stacklevel=2)


class RunFileWriter:
    """Writes `config.json`, `run.toml`, and rows of `metrics.jsonl`; keeps rows that cannot be written for a later attempt."""

    def __init__(self):
        self._has_config = False
        self._waiting: list[Row] = []
        self.error: OSError | None = None  # why rows could not be written and are waiting

    def begin(self, run: Run) -> None:
        """Turns the folder into that of a run, and writes the waiting rows."""
        assert run.path is not None
        try:
            if not self._has_config:
                folder.write_json(run.path / folder.CONFIG, run.description)
                folder.write_text(run.path / folder.REPEAT, repeating(run.experiment, run.description))
                self._has_config = True
            if self._waiting:
                folder.append_rows(run.path, self._waiting)
            self._waiting.clear()
            self.error = None
        except OSError as error:
            if self.error is None:
                warnings.warn(f"the run continues with its metrics in memory: {error}", folder.SaveWarning, stacklevel=2)
            self.error = error

    def after(self, run: Run) -> None:
        """Writes the newest row, and rows that could not be written before."""
        self._waiting.append(dict(run.rows[-1]))
        self.begin(run)

    def end(self, run: Run) -> None:
        """Writes the rows that are still waiting."""
        if self.error is not None:
            self.begin(run)


def parse_checkpoint_interval(every: float | str | None) -> tuple[int | None, float | None]:
    """Parses the time between checkpoints: steps, or seconds of a duration such as `"10m"`; neither if it is automatic."""
    if every is None:
        return None, None
    if isinstance(every, str):
        try:
            every = float(every)
        except ValueError:
            return None, parse_duration("checkpoint_every", every)
    return whole("checkpoint_every", every), None


class Checkpoints:
    """Writes checkpoints when they are due, after evaluations that are the best so far, and at the end; warns if one fails."""

    def __init__(self, path: Path, every: tuple[int | None, float | None], keep: int, recording: Recording | None = None):
        self._writer = CheckpointWriter(path, keep) if processes.is_first() else None
        self.every, self._seconds = every
        self._recording, self._saved_at, self._saved_step, self._best = recording, now(), 0, -math.inf
        self.error: OSError | None = None  # why the last checkpoint could not be written

    def begin(self, run: Run) -> None:
        """Notes where the run resumes; sets newer checkpoints aside, which are damaged or were left behind."""
        self._saved_step = run.step
        if self._writer is not None:
            assert run.path is not None
            self._writer.set_aside(run.iteration)
            self._best = self._best_score(run)

    def _best_score(self, run: Run) -> float:
        assert run.path is not None
        return max((c.score for c in complete_checkpoints(run.path) if c.score is not None), default=-math.inf)

    def before(self, run: Run) -> None:
        """Saves the run if a checkpoint is due."""
        if processes.agreed(self._writer is not None and self._is_due(run, self._writer.busy)):
            self.save(run)

    def _is_due(self, run: Run, busy: bool) -> bool:
        if self._is_best(run):
            return True
        if self.every is not None:
            return run.step // self.every > self._saved_step // self.every
        wait = max(AUTOMATIC, run.saving_seconds / _SHARE) if self._seconds is None else self._seconds
        return now() - self._saved_at >= wait and not busy

    def _is_best(self, run: Run) -> bool:
        """Returns whether an evaluation is the best so far; it needs a checkpoint, because few coincide with one."""
        evaluated = run.step > self._saved_step and not np.isnan(run.rows[-1].get("eval_return", np.nan)).any()
        new_score = score(run) if evaluated and run.deployment["eval_every"] is not None else None
        return new_score is not None and new_score > self._best

    def save(self, run: Run) -> None:
        """Starts to write a checkpoint; warns if this one or the previous one fails."""
        start = now()
        self._saved_at, self._saved_step = start, run.step
        state = run.experiment.agent.without_data(without_rows(run.program.unwrap(run.run_state)))
        state, registers = processes.to_hosts((state, run.registers))
        if self._writer is None:
            return
        recorded = None if self._recording is None else self._recording.writer.progress
        progress = progress_of(run.description, len(run.rows), run.evaluation, run.times, run.last_episodes, recorded)
        new_score = score(run)
        try:
            self._writer.wait()
        except OSError as error:  # an error of the previous one: this one may succeed
            self._note_failure(run, error)
        try:
            self._writer.save(run.iteration, state, registers, progress, new_score)
            self.error, self._best = None, max(self._best, -math.inf if new_score is None else new_score)
        except OSError as error:
            self._note_failure(run, error)
        run.saving_seconds = now() - start

    def _note_failure(self, run: Run, error: OSError) -> None:
        self.error, self._best = error, self._best_score(run)
        warnings.warn(f"the run continues without a new checkpoint: {error}", folder.SaveWarning, stacklevel=3)

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk; notes an error."""
        try:
            if self._writer is not None:
                self._writer.wait()
        except OSError as error:
            self.error = error

    def end(self, run: Run) -> None:
        """Saves the run, unless it diverged, so that the last good state stays the newest; waits until it is on disk."""
        if run.finding is None:
            self.save(run)
        self.wait()
        if self._writer is not None:
            self._writer.close()


def score(run: Run) -> float | None:
    """Returns the score by which the best checkpoint is kept; higher is better. None if no score is known."""
    rank_by, is_offline = run.experiment.rank_by, run.experiment.behavior.agent.unit == "updates"
    if not run.experiment.is_ranked or not run.rows:
        return None
    if is_offline and rank_by == "return":
        value = -np.mean(run.rows[-1].get("validation_loss", np.nan))
    elif is_offline or run.deployment["eval_every"] is not None:
        value = np.mean(run.rows[-1].get(f"eval_{rank_by}", np.nan))
    else:
        value = np.mean(run.last_episodes.mean())
    return float(value) if np.isfinite(value) else None
