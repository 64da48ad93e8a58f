"""The hooks that write a run to its folder: its rows and its checkpoints. A run never ends because of its disk.

If several processes run it, process 0 writes the whole state.
"""

import dataclasses
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from msrl_jax._checks import whole
from msrl_jax.data.experience import at_rest
from msrl_jax.experiment import folder, processes, stopping
from msrl_jax.experiment.checkpoint import CheckpointWriter
from msrl_jax.experiment.folder import SaveWarning
from msrl_jax.experiment.history import Row
from msrl_jax.experiment.run import Run

AUTOMATIC = 60.0
"""Seconds between checkpoints if the user gives no interval."""

_SHARE = 0.02
"""Largest share of the time that training waits for checkpoints at automatic intervals."""


class Rows:
    """Writes `config.json`, and every row to `metrics.jsonl`, so that a killed run keeps all logged rows.

    If a file cannot be written, the run goes on: the rows are kept, and written with a later one.
    """

    def __init__(self):
        self._has_config, self._failed = False, False
        self._waiting: list[Row] = []

    def begin(self, run: Run) -> None:
        """Makes the folder that of a run."""
        self._write(run)

    def after(self, run: Run) -> None:
        """Writes the newest row, and those that could not be written before."""
        self._waiting.append(dict(run.rows[-1]))
        self._write(run)

    def _write(self, run: Run) -> None:
        assert run.path is not None
        try:
            if not self._has_config:
                folder.write_json(run.path / folder.CONFIG, run.description)
                self._has_config = True
            if self._waiting:
                folder.append_rows(run.path, self._waiting)
            self._waiting.clear()
            self._failed = False
        except OSError as error:
            if not self._failed:
                warnings.warn(f"metrics are kept in memory, and the run goes on: {error}", SaveWarning, stacklevel=2)
            self._failed = True


@dataclasses.dataclass(frozen=True)
class Interval:
    """The time between checkpoints: steps of the run, or seconds; automatic if both are None."""

    steps: int | None = None
    seconds: float | None = None


def interval(every: Any) -> Interval:
    """Reads the time between checkpoints: a whole number of steps, a duration such as `"10m"`, or None for automatic ones."""
    if every is None:
        return Interval()
    if isinstance(every, str):
        try:
            every = float(every)
        except ValueError:
            return Interval(seconds=stopping.seconds("checkpoint_every", every))
    return Interval(steps=whole("checkpoint_every", every))


class Checkpoints:
    """Writes checkpoints when they are due, and at the end; if one fails, it warns, and the run goes on.

    Attributes:
      error: why the last checkpoint could not be written; None if it is there.
      every: steps between checkpoints, if steps count.
    """

    def __init__(self, path: Path, every: Interval, keep: int, recording: Any = None):
        """Starts to count from now."""
        self._writer = CheckpointWriter(path, keep) if processes.is_first() else None
        self._interval, self.every, self._recording = every, every.steps, recording
        self._saved_at, self._saved_step = time.monotonic(), 0
        self.error: OSError | None = None

    def begin(self, run: Run) -> None:
        """Notes where the run starts."""
        self.goes_on_from(run)

    def goes_on_from(self, run: Run) -> None:
        """Notes where the run goes on; newer checkpoints are damaged or were left behind, and set aside."""
        self._saved_step = run.step
        if self._writer is not None:
            self._writer.set_aside(run.iteration)

    def before(self, run: Run) -> None:
        """Saves the run if it is time."""
        if processes.agreed(self._is_due(run)):
            self.save(run)

    def _is_due(self, run: Run) -> bool:
        if self.every is not None:
            return run.step // self.every > self._saved_step // self.every
        wait = self._interval.seconds
        wait = max(AUTOMATIC, run.saving_seconds / _SHARE) if wait is None else wait
        busy = self._writer is not None and self._writer.busy
        return time.monotonic() - self._saved_at >= wait and not busy

    def save(self, run: Run) -> None:
        """Starts to write a checkpoint; warns if this one or the one before fails."""
        start = time.monotonic()
        self._saved_at, self._saved_step = start, run.step
        state = run.experiment.agent.without_data(at_rest(run.program.unwrap(run.run_state)))
        state, registers = processes.to_hosts((state, run.registers))
        if self._writer is None:
            return
        progress = {
            "settings": run.experiment.fingerprint(run.deployment["rollbacks"]),
            "rows": len(run.rows),
            "last_episodes": dataclasses.asdict(run.last_episodes),
            "rollbacks": len(run.deployment["rollbacks"]),
            "evaluation": run.evaluation,
            "registers": run.program.registers,
            "recorded": None if self._recording is None else self._recording.writer.progress,
            "wall_seconds": time.perf_counter() - run.started,
            "compile_seconds": run.compile_seconds,
            **run.seconds,
        }
        try:
            self._writer.save(run.iteration, state, registers, progress, score(run))
            self.error = None
        except OSError as error:
            self.error = error
            warnings.warn(f"the run goes on without a new checkpoint: {error}", SaveWarning, stacklevel=2)
        run.saving_seconds = time.monotonic() - start

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
    """The measure of success by which the best checkpoint is kept; more is better. None if there is no such measure."""
    agent = run.experiment.behavior.agent
    if not agent.ranked or not run.rows:
        return None
    if agent.unit == "updates":
        value = -np.mean(run.rows[-1].get("validation_loss", np.nan))
    elif run.deployment["eval_every"] is not None:
        value = np.mean(run.rows[-1].get("eval_return", np.nan))
    else:
        value = np.mean(run.last_episodes.mean())
    return float(value) if np.isfinite(value) else None
