"""The queue of what waits for calls of the host.

While a function that the host calls works, what does not need its results runs. The order is a function of the instructions
alone, not of time: a call is started when its turn comes, and instructions that read its results wait. If a call needs a
pending result, the oldest pending call is completed first, then its dependents. So with two groups of environments one group
is simulated while the other is acted for.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import jax
import numpy as np

from msrl_jax.fragments.graph.host_calls import HostFunction


@dataclass(eq=False)
class _Task:
    """A waiting task: a host call that was started, or a function whose arguments are not available yet."""

    fn: Callable[..., Sequence[jax.Array]]
    args: Sequence["Slot"] = ()
    donated: Sequence[int] = ()
    is_host_call: bool = False
    results: Sequence[jax.Array] | None = None

    def run(self) -> None:
        self.results = self.fn(*map(resolve, self.args))
        self.args = ()


@dataclass(frozen=True, slots=True)
class HostFuture:
    """A result that is not available yet."""

    task: _Task
    index: int


Slot: TypeAlias = jax.Array | HostFuture  # an array, now or later


def resolve(x: Slot) -> Slot:
    """Returns an array, or the result of a `HostFuture` if it is available."""
    return x.task.results[x.index] if type(x) is HostFuture and x.task.results is not None else x


@dataclass(eq=False)
class HostQueue:
    """Tasks that wait for host calls, in program order."""

    _waiting: deque[_Task] = field(default_factory=deque)

    def call(
        self, fn: Callable[..., Sequence[jax.Array]], args: Sequence[Slot], donated: Sequence[int], count: int
    ) -> Sequence[Slot]:
        """Calls a function now if its arguments are available; otherwise returns `HostFuture`s for its `count` results."""
        task = _Task(fn, [resolve(x) for x in args], donated)
        if self._is_ready(task, self._waiting):
            return fn(*task.args)
        return self._enqueue(task, count)

    def start(
        self,
        function: HostFunction,
        place: Callable[[Sequence[np.ndarray]], Sequence[jax.Array]],
        args: Sequence[Slot],
        count: int,
    ) -> Sequence[Slot]:
        """Starts a host call after its dependencies; `place` puts its results on their device.

        Returns `HostFuture`s for its `count` results; the results themselves if it cannot be started without waiting for them.
        """
        while any(type(resolve(x)) is HostFuture for x in args):
            self._finish_oldest()
        finish = function.start(*map(resolve, args))
        if not function.can_start:
            return place(finish())
        return self._enqueue(_Task(lambda: place(finish()), is_host_call=True), count)

    def drain(self) -> None:
        """Finishes all waiting tasks."""
        while self._waiting:
            self._finish_oldest()

    def clear(self) -> None:
        """Drops all waiting tasks, after an error."""
        self._waiting.clear()

    def _enqueue(self, task: _Task, count: int) -> list[HostFuture]:
        self._waiting.append(task)
        return [HostFuture(task, k) for k in range(count)]

    def _finish_oldest(self) -> None:
        """Finishes the oldest host call, and runs the tasks that no longer have to wait."""
        oldest = next(task for task in self._waiting if task.is_host_call)
        oldest.run()
        before, self._waiting = self._waiting, deque()
        for task in before:
            if task is oldest:
                continue
            if not task.is_host_call and self._is_ready(task, self._waiting):
                task.run()
            else:
                self._waiting.append(task)

    def _is_ready(self, task: _Task, before: Iterable[_Task]) -> bool:
        """Whether a task's arguments are available, and earlier tasks have read all those that it consumes."""
        args = [resolve(x) for x in task.args]
        if any(type(x) is HostFuture for x in args):
            return False
        consumed = {id(args[k]) for k in task.donated}
        return not consumed or all(id(resolve(x)) not in consumed for earlier_task in before for x in earlier_task.args)
