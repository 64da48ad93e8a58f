"""Simulators on the host, in worker processes or threads, as vector environments."""

import contextlib
import enum
import logging
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
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import simulate, spaces
from msrl_jax.envs.base import PyTree, TimeStep, WithoutStatistics, Wrapper
from msrl_jax.envs.check_types import as_actions, check_key
from msrl_jax.envs.simulate import NO_METRIC, Layout, Order
from msrl_jax.fragments.graph.host_calls import host_fragment, received
from msrl_jax.fragments.metrics import Mean
from msrl_jax.fragments.support.naming import paths

_log = logging.getLogger("msrl_jax")
_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
_TRIES, _TRIES_AT_FIRST = 10, 3
"""An environment that fails this often in a row is not restarted; the second number applies before its first step."""
_START = 60.0  # seconds that a new worker gets in addition to `timeout`, to import its modules


def processors() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Outcome(NamedTuple):
    """The outcome of a step, as in `TimeStep`; NumPy arrays `[E, ...]` that nothing else writes to."""

    obs: Any
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final_obs: Any
    present: np.ndarray
    metrics: np.ndarray | None = None  # nan where the environment did not answer. `[E, K]` float32


class Simulators(Protocol):
    """`E` environments outside JAX, with automatic reset."""

    def reset(self, envs: np.ndarray, seeds: np.ndarray) -> Any:
        """Starts episodes of the environments with numbers `envs` `[N]` and seeds `[N]`; returns observations `[N, ...]`."""
        ...

    def start(self, action: np.ndarray) -> Callable[[], Outcome]:
        """Starts a step with the actions `[E, ...]`; returns a function that waits for the outcome."""
        ...

    def close(self) -> None:
        """Stops the environments."""
        ...


class HostState(NamedTuple):
    """The part of the run's state that describes host simulators, which keep the rest themselves. `[E]`"""

    seed: jax.Array  # uint32
    steps: jax.Array  # uint32, modulo 2**32
    asked: jax.Array  # float32: number of steps since `pop_episodes`
    absent: jax.Array  # float32: number of these that the environment did not answer


@dataclass(frozen=True)
class HostVectorized(WithoutStatistics, Wrapper):
    """`E` copies of an environment on the host as a `VectorEnvironment`, whose step is a host call between programs.

    The state records the step that each simulator must have reached. A simulator at a different step, because a run was resumed
    or an old state was used again, starts a new episode, and the step is not valid: `present` is False.
    """

    env: Any
    num_envs: int
    simulators: "Stepping"

    def reset(self, key: jax.Array) -> tuple[HostState, PyTree]:
        """Starts all environments, each with its own seed; returns the state and the first observations `[E, ...]`."""
        check_key(key)
        seed = jax.vmap(lambda key: jax.random.bits(key, dtype=jnp.uint32))(jax.random.split(key, self.num_envs))
        results = self._row(jnp.uint32), self._observations()
        steps, obs = host_fragment(self.simulators.reset, results, name="reset")(seed)
        zero = jnp.zeros(self.num_envs, jnp.float32)
        return HostState(seed, steps, zero, jnp.copy(zero)), received(obs, "env")

    def step(self, state: HostState, action: PyTree) -> tuple[HostState, TimeStep]:
        """Advances every environment by one action; environments reset at the end of an episode."""
        action = as_actions(self, action, (self.num_envs,), "environment")
        obs, flag = self._observations(), self._row(jnp.bool_)
        metrics = (self._row(jnp.float32, len(self.metrics)),) if self.metrics else ()
        results = self._row(jnp.uint32), (obs, self._row(jnp.float32), flag, flag, obs, flag, *metrics)
        steps, outcome = host_fragment(self.simulators, results, name="simulate")(state.seed, state.steps, action)
        t = TimeStep(*received(outcome, "env"))
        return state._replace(steps=steps, asked=state.asked + 1, absent=state.absent + ~t.present), t  # type: ignore[operator]

    def pop_episodes(self, state: HostState) -> tuple[HostState, dict[str, Mean]]:
        """Removes the step counts from the state; returns `absent`, the share of steps without an answer."""
        zero = jnp.zeros_like(state.asked)
        share = Mean(state.absent.sum(), state.asked.sum())
        return state._replace(asked=zero, absent=zero), {"absent": share}

    def _row(self, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.num_envs, *shape), dtype)

    def _observations(self) -> PyTree:
        return jax.tree.map(lambda x: self._row(x.dtype, *x.shape), spaces.struct(self.observation_space))


class Stepping:
    """Simulators that `make` starts at the first reset, with the step that each of the `E` environments has reached."""

    makes_new_arrays = True

    def __init__(self, make: Callable[[], Simulators], num_envs: int):
        self._make, self._simulators = make, None
        self._steps = np.zeros(num_envs, np.uint32)
        self._started = False

    @property
    def simulators(self) -> Simulators:
        """The simulators, started on first use."""
        if self._simulators is None:
            self._simulators = self._make()
        return self._simulators

    def close(self) -> None:
        """Stops the simulators until they are needed again."""
        if self._simulators is not None:
            self._simulators.close()
        self._simulators, self._started = None, False

    def reset(self, seed: np.ndarray) -> tuple[np.ndarray, Any]:
        """Starts episodes; returns the step numbers and the first observations `[E, ...]`."""
        obs = self.simulators.reset(np.arange(len(seed)), seed)
        self._steps, self._started = np.zeros_like(self._steps), True
        return self._steps.copy(), obs

    def __call__(self, *args: Any) -> tuple[np.ndarray, Any]:
        """Steps environments."""
        return self.start(*args)()

    def start(self, seed: np.ndarray, steps: np.ndarray, action: np.ndarray) -> Callable[[], Any]:
        """Starts a step; environments that are not at step `steps` start a new episode."""
        other = (self._steps != steps) | (not self._started)
        if other.any():
            self.simulators.reset(np.flatnonzero(other), seed[other] ^ steps[other])
        finish = self.simulators.start(action)
        after = steps + np.uint32(1)
        self._steps, self._started = after.copy(), True

        def outcome() -> tuple[np.ndarray, Any]:
            made = finish()
            if other.any():
                made.present[other], made.truncated[other], made.terminated[other], made.reward[other] = False, True, False, 0
                if made.metrics is not None:
                    made.metrics[other] = np.nan
            return after, tuple(made) if made.metrics is not None else tuple(made)[:-1]

        return outcome


class _Is(enum.IntEnum):
    """The status of an environment."""

    DOWN = 0  # has no episode
    STARTING = 1  # is starting an episode
    FRESH = 2  # has started an episode that the caller does not know of
    READY = 3  # waits for an action
    STEPPING = 4  # is taking a step that the caller waits for
    DONE = 5  # has taken that step
    LATE = 6  # is taking a step that the caller did not wait for
    CAUGHT_UP = 7  # has taken that step


_ANSWERED = {_Is.STARTING: _Is.FRESH, _Is.STEPPING: _Is.DONE, _Is.LATE: _Is.CAUGHT_UP}


@dataclass(eq=False)
class _Process:
    """A worker process and the numbers of its environments."""

    envs: np.ndarray
    process: subprocess.Popen[bytes] | None = None
    commands: Any = None
    lifeline: int = -1
    asked: set[int] = field(default_factory=set[int])
    patience: float = 0.0
    last_heard: float = 0.0
    again_at: float = 0.0

    @property
    def due(self) -> float:
        """The time from which a worker with a request counts as hanging, or one without may be restarted."""
        return self.last_heard + self.patience if self.asked else self.again_at

    def stop(self) -> None:
        """Kills the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.commands.close()
            os.close(self.lifeline)
            self.process = None
        self.asked.clear()


class Workers:
    """`E` Gymnasium environments in worker processes, over shared memory; see `Simulators`.

    An environment that raises an exception is made again, and a worker that dies or hangs is restarted, after a pause that
    doubles with every consecutive failure. Until then, steps of these environments are not `present`.
    """

    def __init__(
        self,
        name: str,
        factory: bytes,
        layout: Layout,
        unflatten: Callable[[Sequence[np.ndarray]], Any],
        *,
        num_workers: int | None,
        timeout: float,
        drop_slowest: float,
    ):
        """Starts the workers, at most one for each environment, by default one for each processor of this process.

        `factory` is a pickled function that makes an environment; `unflatten` builds an observation from its arrays.
        """
        self._name, self._factory, self._layout, self._unflatten = name, factory, layout, unflatten
        self._timeout, self._drop_slowest = timeout, drop_slowest
        if num_workers is None:
            num_workers = processors()
        with tempfile.TemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as file:
            os.ftruncate(file.fileno(), layout.num_envs * layout.row.itemsize)
            self._memory, self._file = mmap.mmap(file.fileno(), 0), os.dup(file.fileno())
        self._view = layout.view(self._memory)
        count = layout.num_envs
        self._is = np.full(count, _Is.DOWN, np.uint8)
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
        while self._any(envs, _Is.STARTING, _Is.STEPPING, _Is.LATE):  # of an earlier run
            self._listen(envs)
        self._is[envs] = _Is.DOWN
        self._view["seed"][envs], self._view["episode"][envs] = seeds, 0
        while self._any(envs, _Is.DOWN, _Is.STARTING):
            self._begin(envs)
            self._listen(envs)
        self._is[envs] = _Is.READY
        return self._read("obs", envs)

    def start(self, action: np.ndarray) -> Callable[[], Outcome]:
        """See `Simulators`."""
        envs = np.arange(len(self._is))
        if (self._is != _Is.READY).any():
            self._listen(envs, wait_for=0.0)
        self._begin(envs)
        while not self._any(envs, _Is.READY, _Is.FRESH, _Is.CAUGHT_UP):
            self._listen(envs)
            self._begin(envs)
        able = self._is == _Is.READY
        self._view["action"][able] = action[able]
        self._order("step", envs[able], _Is.STEPPING)
        return lambda: self._finish(envs, int(able.sum()))

    def _finish(self, envs: np.ndarray, asked: int) -> Outcome:
        enough = min(asked, len(envs) - int(self._drop_slowest * len(envs)))
        while self._any(envs, _Is.STEPPING) and (self._is == _Is.DONE).sum() < enough:
            self._listen(envs[self._is == _Is.STEPPING])
        now = self._is.copy()
        present, caught_up = now == _Is.DONE, now == _Is.CAUGHT_UP
        lost = np.isin(now, (_Is.DOWN, _Is.STARTING, _Is.FRESH))
        self._is[now == _Is.STEPPING] = _Is.LATE
        self._is[np.isin(now, (_Is.DONE, _Is.CAUGHT_UP, _Is.FRESH))] = _Is.READY
        self._in_a_row[present], self._has_stepped[present] = 0, True
        terminated, truncated = self._view["terminated"], self._view["truncated"]
        answered, metrics = present | caught_up, None
        if self._layout.metrics:
            metrics = np.where(answered[:, None], self._view["metrics"], np.float32(np.nan))
        return Outcome(
            self._read("obs", envs),
            np.where(answered, self._view["reward"], np.float32(0)),
            (present & terminated) | (caught_up & (terminated | truncated)),
            (present & truncated) | lost,
            self._read("final", envs),
            present,
            metrics,
        )

    def _any(self, envs: np.ndarray, *states: _Is) -> bool:
        return bool(np.isin(self._is[envs], states).any())

    def _read(self, name: str, envs: np.ndarray) -> Any:
        return self._unflatten([self._view[f"{name}{k}"][envs] for k in range(len(self._layout.paths))])

    def _of(self, envs: np.ndarray) -> list[_Process]:
        return [self._processes[k] for k in dict.fromkeys(self._owner[envs].tolist())]

    def _begin(self, envs: np.ndarray) -> None:
        """Requests new episodes for environments that have none, where they are due."""
        down = envs[self._is[envs] == _Is.DOWN]
        for process in self._of(down):
            if process.again_at <= time.monotonic():
                if process.process is None:
                    self._launch(process)
                self._order("reset", down[np.isin(down, process.envs)], _Is.STARTING)

    def _order(self, what: str, envs: np.ndarray, state: _Is) -> None:
        self._is[envs] = state
        for process in self._of(envs):
            mine = envs[self._owner[envs] == self._owner[process.envs[0]]].tolist()
            process.asked.update(mine)
            process.last_heard = time.monotonic()
            with contextlib.suppress(OSError):  # `_listen` notices if it has died
                process.commands.send_bytes(pickle.dumps(tuple(Order(what, tuple(mine), self._drop_slowest > 0))))

    def _listen(self, envs: np.ndarray, wait_for: float | None = None) -> None:
        """Handles messages of workers; waits for the first one, but at most until a worker is due."""
        processes = self._of(envs)
        if wait_for is None:
            due = [p.due for p in processes if p.asked or (self._is[p.envs] == _Is.DOWN).any()]
            wait_for = max(min(due, default=0.0) - time.monotonic(), 0.0)
        running = {p.commands: p for p in processes if p.process is not None}
        if not running:
            time.sleep(wait_for)
        for commands in wait(list(running), wait_for) if running else ():
            self._hear(running[commands])  # type: ignore[index]
        for process in processes:
            if process.asked and process.due < time.monotonic():
                self._lose(process, f"no answer within {process.patience:g} s")

    def _hear(self, process: _Process) -> None:
        try:
            while process.commands.poll():
                envs, error = pickle.loads(process.commands.recv_bytes())
                process.asked.difference_update(envs)
                process.last_heard, process.patience = time.monotonic(), self._timeout
                if error is not None and NO_METRIC in error:  # a restart would not help
                    raise RuntimeError(f"{self._name}: {NO_METRIC} {error.partition(NO_METRIC)[2].strip()}")
                if error is not None:
                    self._failed(process, np.array(envs), error)
                for e in envs if error is None else ():
                    self._is[e] = _ANSWERED.get(_Is(self._is[e]), self._is[e])
        except (EOFError, OSError):
            assert process.process is not None
            self._lose(process, f"the worker ended with code {process.process.wait()}")

    def _lose(self, process: _Process, why: str) -> None:
        process.stop()
        self._failed(process, process.envs, why)

    def _failed(self, process: _Process, envs: np.ndarray, why: str) -> None:
        self._is[envs] = _Is.DOWN
        self._in_a_row[envs] += 1
        process.again_at = time.monotonic() + min(_PAUSE * 2.0 ** (self._in_a_row[envs].max() - 1), _LONGEST_PAUSE)
        which = f"environment {envs[0]}" if len(envs) == 1 else f"environments {envs[0]} to {envs[-1]}"
        tries = np.where(self._has_stepped[envs], _TRIES, _TRIES_AT_FIRST)
        if (self._in_a_row[envs] >= tries).any():
            raise RuntimeError(f"{which} of {self._name} failed {tries.min()} times in a row, last with: {why.strip()}")
        _log.warning("%s of %s failed and will be restarted: %s", which, self._name, why.strip().splitlines()[-1])

    def _launch(self, process: _Process) -> None:
        commands, child = Pipe()
        read, process.lifeline = os.pipe()
        files = [child.fileno(), self._file, read]
        # In its own session, so that Ctrl-C reaches only the parent.
        process.process = subprocess.Popen(
            [sys.executable, "-P", "-m", simulate.__name__, *map(str, files)],
            pass_fds=files, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True,
            env=os.environ | {"PYTHONPATH": paths()},
        )  # fmt: skip
        child.close()
        os.close(read)
        process.commands, process.patience, process.last_heard = commands, self._timeout + _START, time.monotonic()
        commands.send_bytes(pickle.dumps(tuple(Order("make", (), payload=(self._layout, self._factory)))))


def _stop(processes: Iterable[_Process], file: int) -> None:
    for process in processes:
        process.stop()
    os.close(file)
