"""Gymnasium environments in worker processes, over shared memory; `simulate.py` is the program of a worker."""

import contextlib
import enum
import logging
import math
import mmap
import os
import pickle
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from msrl_jax.envs import simulate
from msrl_jax.envs.host_simulators import HostStep
from msrl_jax.envs.simulate import NO_METRIC, Order, SharedMemoryLayout
from msrl_jax.fragments.support.naming import paths

_log = logging.getLogger("msrl_jax")
_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
_TRIES, _TRIES_AT_FIRST = 10, 3
"""An environment that fails this often in a row is not restarted; the second number applies before its first step."""
_MESSAGES = 3e-4  # seconds that a step spends on the messages with one worker
_START = 60.0  # seconds that a new worker gets in addition to `timeout`, to import its modules


def processors() -> int:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def best_number(num_envs: int, step_seconds: float) -> int:
    """Returns the number of workers, at most one per processor, with the least time for a step of all environments.

    With `W` workers, a step takes the time of `num_envs / W` environments, and that of messages with each worker.
    """
    best = math.sqrt(min(num_envs * step_seconds / _MESSAGES, num_envs**2))
    return max(1, min(round(best), num_envs, processors()))


class _Status(enum.IntEnum):
    """The status of an environment."""

    DOWN = 0  # has no episode
    STARTING = 1  # is starting an episode
    FRESH = 2  # has started an episode that the caller does not know of
    READY = 3  # waits for an action
    STEPPING = 4  # is taking a step that the caller waits for
    DONE = 5  # has taken that step
    LATE = 6  # is taking a step that the caller did not wait for
    CAUGHT_UP = 7  # has taken that step


_ANSWERED = {_Status.STARTING: _Status.FRESH, _Status.STEPPING: _Status.DONE, _Status.LATE: _Status.CAUGHT_UP}


@dataclass(eq=False)
class _Process:
    """A worker process and the numbers of its environments."""

    envs: np.ndarray
    process: subprocess.Popen[bytes] | None = None
    commands: Any = None
    lifeline: int = -1
    pending: set[int] = field(default_factory=set[int])
    patience: float = 0.0
    last_heard: float = 0.0
    again_at: float = 0.0

    @property
    def due(self) -> float:
        """The time from which a worker with a request counts as hanging, or one without may be restarted."""
        return self.last_heard + self.patience if self.pending else self.again_at

    def stop(self) -> None:
        """Kills the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.commands.close()
            os.close(self.lifeline)
            self.process = None
        self.pending.clear()


def _shared_memory(size: int) -> tuple[mmap.mmap, int]:
    """Returns memory that worker processes share, and the number of its file; raises OSError if there is too little space."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(size))  # a file that only seems to have this size would end the process when it is used
            file.flush()
            return mmap.mmap(file.fileno(), 0), os.dup(file.fileno())
    except OSError as error:
        fact = f"{error.strerror} for {size:,} bytes of the simulators; use fewer environments, or give it more space"
        raise OSError(error.errno, fact, folder) from error


class Workers:
    """`E` Gymnasium environments in worker processes, over shared memory; see `Simulators`.

    An environment that raises an exception is made again, and a worker that dies or hangs is restarted, after a pause that
    doubles with every consecutive failure. Until then, steps of these environments are not `valid`.
    """

    def __init__(
        self,
        name: str,
        factory: bytes,
        layout: SharedMemoryLayout,
        unflatten: Callable[[Sequence[np.ndarray]], Any],
        *,
        num_workers: int,
        timeout: float,
        drop_slowest: float,
    ):
        """Starts the workers, at most one for each environment.

        `factory` is a pickled function that makes an environment; `unflatten` builds an observation from its arrays.
        """
        self._name, self._factory, self._layout, self._unflatten = name, factory, layout, unflatten
        self._timeout, self._drop_slowest = timeout, drop_slowest
        self._memory, self._file = _shared_memory(layout.num_envs * layout.row.itemsize)
        self._view = layout.view(self._memory)
        count = layout.num_envs
        self._status = np.full(count, _Status.DOWN, np.uint8)
        self._in_a_row, self._has_stepped = np.zeros(count, np.int64), np.zeros(count, bool)
        parts = np.array_split(np.arange(count), min(num_workers, count))
        self._processes = [_Process(part) for part in parts]
        self._owner = np.concatenate([np.full(len(part), k) for k, part in enumerate(parts)])
        self._finalizer = weakref.finalize(self, _stop, self._processes, self._file)
        for process in self._processes:
            self._launch(process)

    def close(self) -> None:
        """Stops the workers."""
        self._finalizer()

    def reset(self, envs: np.ndarray, seeds: np.ndarray) -> Any:
        """See `Simulators`. Raises RuntimeError if an environment cannot be started."""
        while self._any(envs, _Status.STARTING, _Status.STEPPING, _Status.LATE):  # of an earlier run
            self._listen(envs)
        self._status[envs] = _Status.DOWN
        self._view["seed"][envs], self._view["episode"][envs] = seeds, 0
        while self._any(envs, _Status.DOWN, _Status.STARTING):
            self._begin(envs)
            self._listen(envs)
        self._status[envs] = _Status.READY
        return self._read("obs", envs)

    def start(self, action: np.ndarray) -> Callable[[], HostStep]:
        """See `Simulators`."""
        envs = np.arange(len(self._status))
        if (self._status != _Status.READY).any():
            self._listen(envs, wait_for=0.0)
        self._begin(envs)
        while not self._any(envs, _Status.READY, _Status.FRESH, _Status.CAUGHT_UP):
            self._listen(envs)
            self._begin(envs)
        able = self._status == _Status.READY
        self._view["action"][able] = action[able]
        self._order("step", envs[able], _Status.STEPPING)
        return lambda: self._finish(envs, int(able.sum()))

    def _finish(self, envs: np.ndarray, num_ordered: int) -> HostStep:
        enough = min(num_ordered, len(envs) - int(self._drop_slowest * len(envs)))
        while self._any(envs, _Status.STEPPING) and (self._status == _Status.DONE).sum() < enough:
            self._listen(envs[self._status == _Status.STEPPING])
        status = self._status.copy()
        valid, caught_up = status == _Status.DONE, status == _Status.CAUGHT_UP
        lost = np.isin(status, (_Status.DOWN, _Status.STARTING, _Status.FRESH))
        self._status[status == _Status.STEPPING] = _Status.LATE
        self._status[np.isin(status, (_Status.DONE, _Status.CAUGHT_UP, _Status.FRESH))] = _Status.READY
        self._in_a_row[valid], self._has_stepped[valid] = 0, True
        terminated, truncated = self._view["terminated"], self._view["truncated"]
        answered, metrics = valid | caught_up, None
        if self._layout.metrics:
            metrics = np.where(answered[:, None], self._view["metrics"], np.float32(np.nan))
        return HostStep(
            self._read("obs", envs),
            np.where(answered, self._view["reward"], np.float32(0)),
            (valid & terminated) | (caught_up & (terminated | truncated)),
            (valid & truncated) | lost,
            self._read("final", envs),
            valid,
            metrics,
        )

    def _any(self, envs: np.ndarray, *states: _Status) -> bool:
        return bool(np.isin(self._status[envs], states).any())

    def _read(self, name: str, envs: np.ndarray) -> Any:
        return self._unflatten([self._view[f"{name}{k}"][envs] for k in range(len(self._layout.paths))])

    def _processes_of(self, envs: np.ndarray) -> list[_Process]:
        return [self._processes[k] for k in dict.fromkeys(self._owner[envs].tolist())]

    def _begin(self, envs: np.ndarray) -> None:
        """Requests new episodes for environments that have none, where they are due."""
        down = envs[self._status[envs] == _Status.DOWN]
        for process in self._processes_of(down):
            if process.again_at <= time.monotonic():
                if process.process is None:
                    self._launch(process)
                self._order("reset", down[np.isin(down, process.envs)], _Status.STARTING)

    def _order(self, command: str, envs: np.ndarray, state: _Status) -> None:
        self._status[envs] = state
        for process in self._processes_of(envs):
            numbers = envs[self._owner[envs] == self._owner[process.envs[0]]].tolist()
            process.pending.update(numbers)
            process.last_heard = time.monotonic()
            with contextlib.suppress(OSError):  # `_listen` notices if it has died
                process.commands.send_bytes(pickle.dumps(tuple(Order(command, tuple(numbers), self._drop_slowest > 0))))

    def _listen(self, envs: np.ndarray, wait_for: float | None = None) -> None:
        """Handles messages of workers; waits for the first one, but at most until a worker is due."""
        processes = self._processes_of(envs)
        if wait_for is None:
            due = [p.due for p in processes if p.pending or (self._status[p.envs] == _Status.DOWN).any()]
            wait_for = max(min(due, default=0.0) - time.monotonic(), 0.0)
        running = {p.commands: p for p in processes if p.process is not None}
        if not running:
            time.sleep(wait_for)
        for commands in wait(list(running), wait_for) if running else ():
            self._hear(running[commands])  # type: ignore[index]
        for process in processes:
            if process.pending and process.due < time.monotonic():
                self._lose(process, f"no answer within {process.patience:g} s")

    def _hear(self, process: _Process) -> None:
        try:
            while process.commands.poll():
                envs, error = pickle.loads(process.commands.recv_bytes())
                process.pending.difference_update(envs)
                process.last_heard, process.patience = time.monotonic(), self._timeout
                if error is not None and NO_METRIC in error:  # a restart would not help
                    raise RuntimeError(f"{self._name}: {NO_METRIC} {error.partition(NO_METRIC)[2].strip()}")
                if error is not None:
                    self._handle_failure(process, np.array(envs), error)
                for e in envs if error is None else ():
                    self._status[e] = _ANSWERED.get(_Status(self._status[e]), self._status[e])
        except (EOFError, OSError):
            assert process.process is not None
            self._lose(process, f"the worker ended with code {process.process.wait()}")

    def _lose(self, process: _Process, cause: str) -> None:
        process.stop()
        self._handle_failure(process, process.envs, cause)

    def _handle_failure(self, process: _Process, envs: np.ndarray, cause: str) -> None:
        self._status[envs] = _Status.DOWN
        self._in_a_row[envs] += 1
        process.again_at = time.monotonic() + min(_PAUSE * 2.0 ** (self._in_a_row[envs].max() - 1), _LONGEST_PAUSE)
        names = f"environment {envs[0]}" if len(envs) == 1 else f"environments {envs[0]} to {envs[-1]}"
        tries = np.where(self._has_stepped[envs], _TRIES, _TRIES_AT_FIRST)
        if (self._in_a_row[envs] >= tries).any():
            raise RuntimeError(f"{names} of {self._name} failed {tries.min()} times in a row, last with: {cause.strip()}")
        _log.warning("%s of %s failed and will be restarted: %s", names, self._name, cause.strip().splitlines()[-1])

    def _launch(self, process: _Process) -> None:
        commands, child = Pipe()
        lifeline_end, process.lifeline = os.pipe()
        files = [child.fileno(), self._file, lifeline_end]
        # In its own session, so that Ctrl-C reaches only the parent.
        process.process = subprocess.Popen(
            [sys.executable, "-P", "-m", simulate.__name__, *map(str, files)],
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": paths()},
        )
        child.close()
        os.close(lifeline_end)
        process.commands, process.patience, process.last_heard = commands, self._timeout + _START, time.monotonic()
        commands.send_bytes(pickle.dumps(tuple(Order("make", (), payload=(self._layout, self._factory)))))


def _stop(processes: Iterable[_Process], file: int) -> None:
    for process in processes:
        process.stop()
    os.close(file)
