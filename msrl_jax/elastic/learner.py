"""The learner of a run: how it executes the run with remote actors, and the program that learns from their data."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.elastic.actor_pool import ActorPool, WaitForActors, check_policy
from msrl_jax.elastic.split_program import split_program
from msrl_jax.envs.base import PyTree
from msrl_jax.fragments.passes.placed_policy import check_devices
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.run.auto_policy import is_auto
from msrl_jax.run.experiment.experiment import Experiment
from msrl_jax.run.loop.hooks import StopRequests
from msrl_jax.run.loop.loop import Hook


class RemoteActors:
    """An `Execution` of a run as a learner that listens at `HOST:PORT` for actors in other processes."""

    def __init__(self, address: str):
        self._address = address

    def check(self, experiment: Experiment, policy: str | DistributionPolicy | None, record: Path | None) -> None:
        """Raises ValueError for options that need another policy or local environments."""
        if is_auto(policy):
            raise ValueError('policy="auto" compares policies without actors in other processes; remove one of the two')
        if record is not None or experiment.guard == "rollback":
            option = f"record={str(record)!r}" if record is not None else 'guard="rollback"'
            raise ValueError(f"{option} needs the environments, which run in the actors; remove it, or actors_at")

    def default_policy(self, experiment: Experiment) -> str:
        """Returns the default policy of a run: unrolls are used up to an age of 8 iterations."""
        return "SingleLearnerCoarse:staleness=8"

    @contextlib.contextmanager
    def program(
        self,
        experiment: Experiment,
        policy: DistributionPolicy,
        devices: Sequence[Device] | None,
        folder: Path | None,
        requests: StopRequests,
        say: Callable[[str], object],
    ) -> Iterator["LearnerProgram"]:
        """Listens for actors; raises ValueError, before compilation, if the run or the address does not support them."""
        policy, device = check_policy(policy), None if devices is None else check_devices(devices)[0]
        with contextlib.closing(ActorPool(self._address, split_program(experiment, device), policy, folder, say)) as pool:
            self._pool, self._wait = pool, WaitForActors(pool, requests)
            yield LearnerProgram(pool)

    def hooks(self, hooks: list[Hook]) -> list[Hook]:
        """Adds the hook of the actors, whose `end` runs last, and the wait for actors, the last hook before a chunk."""
        return [self._pool, *hooks, self._wait]


class LearnerProgram:
    """The learner's half of an iteration, used instead of a `Program`: it runs on the data that actors send.

    A run may be shorter than requested if no unroll arrives for a second.
    """

    is_fused, registers, nondeterminism_reason = False, {}, "Its data came from actors"

    def __init__(self, pool: ActorPool):
        self._pool, self._program = pool, pool.program
        self.compile_seconds = 0.0

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of the learner."""
        return (self._program.device,)

    @property
    def shardings(self) -> tuple[PyTree, tuple[()]]:
        """The sharding of the state."""
        return jax.tree.map(lambda _: self._program.sharding, self._program.state), ()

    @property
    def metrics_bytes(self) -> int:
        """The number of bytes of the metrics of one iteration."""
        return sum(v.nbytes for v in self._program.halves.schedule.metrics)

    def begin(self, chunk: int = 1) -> None:
        """Does nothing: the program is small."""

    def warm_up(self, chunk: int = 1) -> None:
        """Compiles the program."""
        start = time.perf_counter()
        _ = self._program.learn
        self.compile_seconds += time.perf_counter() - start

    def initialize(self, init: Callable[..., PyTree], *args: Any) -> PyTree:
        """Computes a state."""
        start = time.perf_counter()
        compiled = jax.jit(init, out_shardings=self._program.sharding).lower(*args).compile()
        self.compile_seconds += time.perf_counter() - start
        return compiled(*args)

    def place(self, state: PyTree) -> PyTree:
        """Copies a state."""
        return jax.tree.map(lambda x: jax.device_put(jnp.copy(x), self._program.sharding), state)

    def unwrap(self, state: PyTree) -> PyTree:
        """Returns the state."""
        return state

    def run(self, state: PyTree, iterations: int, *, chunk: int | None = None, donate: bool = False) -> tuple[PyTree, PyTree]:
        """Learns from at most `iterations` unrolls; the metrics have one row per unroll."""
        leaves, tree = jax.tree.flatten(state if donate else self.place(state))
        rows: list[list[np.ndarray]] = []
        while len(rows) < iterations and (unroll := self._pool.take()) is not None:
            leaves, metrics = self._program.learn(leaves, jax.device_put(unroll.arrays, self._program.sharding))
            self._pool.iteration += 1
            self._pool.publish(leaves)
            self._pool.answer(unroll.actor)
            rows.append(jax.device_get(metrics))
        kinds = [v.aval for v in self._program.halves.schedule.metrics]
        columns = [np.stack(column) for column in zip(*rows, strict=True)] or [
            np.zeros((0, *kind.shape), kind.dtype) for kind in kinds
        ]
        return jax.tree.unflatten(tree, leaves), jax.tree.unflatten(self._program.metrics, columns)
