"""When a run is saved, and what happens if that fails: a run never ends because of its disk.

If several processes run it, process 0 writes the whole state.
"""

import dataclasses
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from msrl_jax._checks import whole
from msrl_jax.data.experience import at_rest
from msrl_jax.training import processes, stopping, stored
from msrl_jax.training.checkpoint import CheckpointWriter
from msrl_jax.training.folder import CONFIG, SaveWarning
from msrl_jax.training.result import Result
from msrl_jax.training.run import Run

AUTOMATIC = 60.0
"""Seconds between checkpoints if the user gives no interval."""

_SHARE = 0.02
"""Largest share of the time that training waits for checkpoints at automatic intervals."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """The time between checkpoints.

    Attributes:
      steps: steps of the run between checkpoints; None counts seconds.
      seconds: seconds between checkpoints; None for automatic intervals.
    """

    steps: int | None = None
    seconds: float | None = None


def interval(every: Any) -> Interval:
    """Reads the time between checkpoints.

    Args:
      every: steps as a whole number, a duration as text such as `"10m"`, or None for automatic intervals.

    Returns:
      The interval.

    Raises:
      ValueError: if the value is neither.
    """
    if every is None:
        return Interval()
    if isinstance(every, str):
        try:
            number = float(every)
        except ValueError:
            return Interval(seconds=stopping.seconds("checkpoint_every", every))
        every = number
    return Interval(steps=whole("checkpoint_every", every))


class Saver:
    """Writes checkpoints of a run when they are due; if one fails, it warns, and the run goes on."""

    def __init__(self, path: Path, every: Interval, keep: int):
        """Starts to count from now.

        Args:
          path: the folder of the run.
          every: the time between checkpoints.
          keep: number of checkpoints to keep besides the best one.
        """
        self._writer = CheckpointWriter(path, keep) if processes.is_first() else None
        self._every = every
        self._saved_at, self._saved_step = time.monotonic(), 0
        self.seconds = 0.0
        self.error: OSError | None = None

    def goes_on_from(self, run: Run) -> None:
        """Notes where the run starts or goes on; newer checkpoints are damaged or were left behind, and set aside."""
        self._saved_step = run.step
        if self._writer is not None:
            self._writer.set_aside(run.iteration)

    def is_due(self, run: Run) -> bool:
        """Whether the run has to be saved now."""
        if self._every.steps is not None:
            return run.step // self._every.steps > self._saved_step // self._every.steps
        wait = max(AUTOMATIC, self.seconds / _SHARE) if self._every.seconds is None else self._every.seconds
        busy = self._writer is not None and self._writer.busy
        return time.monotonic() - self._saved_at >= wait and not busy

    def save(self, run: Run) -> None:
        """Starts to write a checkpoint; warns if this one or the one before fails."""
        start = time.monotonic()
        self._saved_at, self._saved_step = start, run.step
        agent = run.setup.behavior.agent
        state = agent.without_data(at_rest(run.program.unwrap(run.run_state)))
        state, registers = processes.to_hosts((state, run.registers))
        if self._writer is None:
            return
        try:
            self._writer.save(run.iteration, state, registers, progress_of(run), run.score())
            self.error = None
        except OSError as error:
            self.error = error
            warnings.warn(f"the run goes on without a new checkpoint: {error}", SaveWarning, stacklevel=2)
        self.seconds = time.monotonic() - start

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk; notes an error."""
        try:
            if self._writer is not None:
                self._writer.wait()
        except OSError as error:
            self.error = error

    def finish(self, run: Run) -> OSError | None:
        """Saves the run, waits until it is on disk, and ends.

        Args:
          run: the run; it is not saved if a number in it is not finite, so that the last good state stays the newest.

        Returns:
          The error, if the run could not be saved.
        """
        if not run.non_finite:
            self.save(run)
        if self._writer is None:
            return None
        try:
            self._writer.wait()
        except OSError as error:
            self.error = error
        self._writer.close()
        return self.error


def progress_of(run: Run) -> dict[str, Any]:
    """The host's part of a run's state, as plain data."""
    return {
        "settings": run.fingerprint,
        "rows": len(run.rows),
        "last_episodes": dataclasses.asdict(run.last_episodes),
        "rollbacks": run.rollbacks,
        "evaluation": run.evaluation,
        "registers": run.program.registers,
        "recorded": None if run.experience is None else run.experience.progress,
        "wall_seconds": time.perf_counter() - run.started,
        "compile_seconds": run.compile_seconds,
        **run.seconds,
    }


def keep_what_there_is(run: Run, saver: Saver | None) -> None:
    """Saves a run that ends with an error, as far as it can be saved."""
    try:
        if saver is not None:
            saver.finish(run)
        if run.experience is not None:
            run.experience.finish(goes_on=saver is not None)
    except Exception as problem:  # the error that ended the run is more important
        warnings.warn(f"the run ends with an error, and could not be saved: {problem}", SaveWarning, stacklevel=3)


def complete_folder(result: Result, path: Path, error: OSError | None) -> Result:
    """Completes the folder of a run; if that fails, saves the run to another folder, and says so."""
    if error is None and not (path / CONFIG).exists():
        error = FileNotFoundError(f"its {CONFIG} is gone")
    if error is None:
        try:
            stored.finish(result, path)
            return result
        except OSError as problem:
            error = problem
    other = Path(tempfile.mkdtemp(prefix=f"msrl-jax-{path.name}-")) / path.name
    try:
        result.save(other)
    except OSError as problem:
        warnings.warn(
            f"the run could be saved neither in {path} ({error}) nor in {other} ({problem}); only the result in memory has it",
            SaveWarning, stacklevel=3,
        )  # fmt: skip
        return dataclasses.replace(result, folder=None)
    warnings.warn(f"the run could not be saved in {path} ({error}); it is saved in {other}", SaveWarning, stacklevel=3)
    return dataclasses.replace(result, folder=other)
