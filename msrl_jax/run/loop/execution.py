"""How the iterations of a run are executed: by one program in this process, or by an optional room."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from msrl_jax._rooms import Registry
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.fragments.program import Program
from msrl_jax.run.experiment.experiment import Experiment
from msrl_jax.run.loop.hooks import StopRequests
from msrl_jax.run.loop.loop import Hook


class Execution(Protocol):
    """The interface of `train` to the execution of a run. `train` calls each method at most once, in this order."""

    def check(self, experiment: Experiment, policy: str | DistributionPolicy | None, record: Path | None) -> None:
        """Raises ValueError if this execution cannot run the experiment.

        Args:
          experiment: what the run computes.
          policy: the policy that the user chose; None if there is none.
          record: the file to which environment steps are recorded.
        """

    def default_policy(self, experiment: Experiment) -> str:
        """Returns the default policy of a run."""
        ...

    def program(
        self,
        experiment: Experiment,
        policy: DistributionPolicy,
        devices: Sequence[Device] | None,
        folder: Path | None,
        requests: StopRequests,
        say: Callable[[str], object],
    ) -> contextlib.AbstractContextManager[Any]:
        """Returns a context manager whose value is the program of the run: a `Program`, or an object with the same interface.

        The interface consists of `is_fused`, `devices`, `registers`, `shardings`, `metrics_bytes`, `compile_seconds` and
        `nondeterminism_reason`; and of `begin`, `warm_up`, `initialize`, `place`, `unwrap` and `run`. `run` may return after
        fewer iterations than requested; its metrics have one row per iteration. The context ends after the last hook.

        Args:
          experiment: what the run computes.
          policy: the distribution policy of the run.
          devices: the devices to use; None uses all.
          folder: the folder of the run.
          requests: tells when the run must stop; check it wherever the program waits.
          say: called with lines of text about the progress.
        """
        ...

    def hooks(self, hooks: list[Hook]) -> list[Hook]:
        """Returns all hooks of the run in their order: these hooks, and those that the execution adds."""
        ...


class InProcess:
    """Executes a run by one program in this process, or in each of several processes; the default."""

    def check(self, experiment: Experiment, policy: str | DistributionPolicy | None, record: Path | None) -> None:
        """Raises ValueError if the guard would have to undo what is written, or to agree with other processes."""
        if experiment.guard == "rollback" and record is not None:
            raise ValueError('guard="rollback" cannot undo recorded steps; leave record out, or use guard="halt"')
        if experiment.guard == "rollback" and jax.process_count() > 1:
            raise ValueError('guard="rollback" works in one process only; use guard="halt" or "skip"')

    def default_policy(self, experiment: Experiment) -> str:
        """Returns the default policy of the experiment."""
        return experiment.usual_policy

    @contextlib.contextmanager
    def program(
        self,
        experiment: Experiment,
        policy: DistributionPolicy,
        devices: Sequence[Device] | None,
        folder: Path | None,
        requests: StopRequests,
        say: Callable[[str], object],
    ) -> Iterator[Program]:
        """Yields the compiled program of an iteration."""
        yield experiment.compile(policy, devices)

    def hooks(self, hooks: list[Hook]) -> list[Hook]:
        """Adds no hooks."""
        return hooks


EXECUTIONS: Registry[Callable[[Any], Execution]] = Registry("executions")
"""The executions of rooms: for an argument of `train`, a function from its value to the execution of the run."""
