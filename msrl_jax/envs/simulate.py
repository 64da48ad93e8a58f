"""The program of a worker process: it steps Gymnasium environments over shared memory. It does not import JAX.

`python -m msrl_jax.envs.simulate COMMANDS MEMORY LIFELINE` takes three inherited file descriptors. The parent writes actions,
the worker writes their outcomes, and small messages synchronize the two. The worker ends when its parent does, for any reason.
"""

import contextlib
import fcntl
import functools
import mmap
import operator
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np


class SharedMemoryLayout(NamedTuple):
    """The shared memory of environments: an array with one row per environment."""

    num_envs: int
    paths: tuple[tuple[Any, ...], ...]  # of the arrays of an observation
    row: np.dtype[Any]
    metrics: tuple[str, ...] = ()  # the keys of `info` to pass on

    def view(self, memory: Any) -> np.ndarray:
        """Returns the array in a memory with this layout; parts of observations are numbered after `obs` and `final`."""
        return np.ndarray(self.num_envs, self.row, memory)


def layout_of(
    num_envs: int, obs: Mapping[tuple[Any, ...], Any], action: Any, metrics: tuple[str, ...] = ()
) -> SharedMemoryLayout:
    """Returns the layout for actions and parts of observations, by path, with these shapes and dtypes; and for metrics."""
    rows = {"reward": "float32", "terminated": "bool", "truncated": "bool", "seed": "uint32", "episode": "int64"}
    parts = {f"{name}{k}": x for name in ("obs", "final") for k, x in enumerate(obs.values())} | {"action": action}
    fields = [(name, np.dtype(x.dtype), x.shape) for name, x in parts.items()]
    fields += [("metrics", np.dtype(np.float32), (len(metrics),))] if metrics else []
    return SharedMemoryLayout(num_envs, tuple(obs), np.dtype([*rows.items(), *fields], align=True), metrics)


NO_METRIC = "the info of a step has no metric"


def measured(info: Mapping[str, Any], names: tuple[str, ...]) -> list[float]:
    """Returns the metrics in the `info` of a step; raises ValueError unless each is present and is a scalar number."""
    for name in names:
        if name not in info:
            has = f"; it has {', '.join(map(str, info))}" if info else ", as it is empty"
            raise ValueError(f"{NO_METRIC} {name!r}{has}; every step must report it")
        if np.ndim(x := info[name]) or np.asarray(x).dtype.kind not in "biuf":
            raise ValueError(f"the metric {name!r} in the info of a step is {x!r}; only scalar numbers and bools are metrics")
    return [float(info[name]) for name in names]


class Order(NamedTuple):
    """A command of the parent."""

    command: str  # "make", "reset" or "step"
    envs: tuple[int, ...]  # their numbers
    separate: bool = False  # whether to answer for each environment separately
    payload: Any = None  # for "make": the layout, and a pickled function that makes an environment


class _Worker:
    def __init__(self, commands: Connection, memory: Any):
        self.commands, self.memory = commands, memory
        self.envs: dict[int, Any] = {}

    def run(self) -> None:
        while True:
            try:
                order = Order(*pickle.loads(self.commands.recv_bytes()))
            except (EOFError, OSError):
                return
            if order.command == "make":
                self.layout, self.factory = order.payload
                self.view = self.layout.view(self.memory)
                continue
            answered = []
            for number in order.envs:
                error = self.attempt(order.command, number)
                if order.separate or error:
                    self.answer((number,), error)
                else:
                    answered.append(number)
            if answered:
                self.answer(tuple(answered), None)

    def answer(self, envs: tuple[int, ...], error: str | None) -> None:
        with contextlib.suppress(OSError):
            self.commands.send_bytes(pickle.dumps((envs, error)))

    def attempt(self, command: str, number: int) -> str | None:
        """Resets or steps an environment; if that raises, drops it and returns the error as text."""
        try:
            self.begin(number) if command == "reset" else self.step(number)
            return None
        except Exception:
            env = self.envs.pop(number, None)
            with contextlib.suppress(Exception):
                env.close()  # type: ignore[union-attr]
            return traceback.format_exc(limit=-8)

    def begin(self, number: int) -> None:
        """Starts an episode; every episode has its own seed."""
        if number not in self.envs:
            with _silenced():  # simulators print warnings about their own files
                self.envs[number] = pickle.loads(self.factory)()
        view = self.view
        seed = np.random.SeedSequence([int(view["seed"][number]), int(view["episode"][number])]).generate_state(1)[0]
        view["episode"][number] += 1
        obs, _ = self.envs[number].reset(seed=int(seed))
        self.write("obs", number, obs)

    def step(self, number: int) -> None:
        view, action = self.view, self.view["action"][number]
        env = self.envs[number]
        scalar = action.ndim == 0 and action.dtype.kind in "iu"
        obs, reward, terminated, truncated, info = env.step(int(action) if scalar else action.astype(env.action_space.dtype))
        self.write("final", number, obs)
        view["reward"][number], view["terminated"][number], view["truncated"][number] = reward, terminated, truncated
        if self.layout.metrics:
            view["metrics"][number] = measured(info, self.layout.metrics)
        if terminated or truncated:
            self.begin(number)
        else:
            self.write("obs", number, obs)

    def write(self, name: str, number: int, obs: Any) -> None:
        for k, path in enumerate(self.layout.paths):
            array, x = self.view[f"{name}{k}"], np.asarray(functools.reduce(operator.getitem, path, obs))
            if x.shape != array.shape[1:]:
                raise ValueError(f"the observation has shape {x.shape}, but the observation space says {array.shape[1:]}")
            if array.dtype.kind in "iub" and x.dtype != array.dtype and not (x.astype(array.dtype) == x).all():
                raise ValueError(f"the observation {x} does not fit {array.dtype} of the observation space")
            array[number] = x


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Discards writes to the standard streams, also by code that is not Python. Exceptions are reported otherwise."""
    stdout_copy = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stdout_copy, 1)
        os.dup2(stdout_copy, 2)
        os.close(stdout_copy)


def _end_with_parent(lifeline: int) -> None:
    """Ends this process when the other end of a pipe closes, even while a simulator holds the GIL."""
    with contextlib.suppress(AttributeError, OSError):  # only Linux signals pipes
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Runs until the parent ends or closes the connection."""
    commands, memory, lifeline = map(int, sys.argv[1:])
    _end_with_parent(lifeline)
    _Worker(Connection(commands), mmap.mmap(memory, 0)).run()
    os._exit(0)  # simulators with threads or windows may not exit by themselves


if __name__ == "__main__":
    main()
