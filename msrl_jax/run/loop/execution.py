"""How the iterations of a run are executed: by one program in this process, or as an optional room does it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from msrl_jax._rooms import Registry
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.run.experiment.spec import Experiment
from msrl_jax.run.loop.hooks import StopRequests


class Execution(Protocol):
    """What `train` needs to know of the execution of a run. It calls each method once, in this order."""

    def check(self, experiment: Experiment, policy: str | DistributionPolicy | None, record: Path | None) -> None:
        """Raises ValueError if it cannot execute this run.

        Args:
          experiment: what the run computes.
          policy: the policy that the user gave; None if none was given.
          record: the file to which environment steps are recorded.
        """

    def default_policy(self, experiment: Experiment) -> str:
        """The policy of a run for which none is given."""
        ...

    def program(
        self, experiment: Experiment, policy: DistributionPolicy, devices: Sequence[Device] | None, folder: Path | None,
        requests: StopRequests, say: Callable[[str], Any],
    ) -> contextlib.AbstractContextManager[Any]:  # fmt: skip
        """A context whose value is the program of the run: a `Program`, or an object that has what a run uses of one.

        That is `is_fused`, `devices`, `registers`, `shardings`, `metrics_bytes`, `compile_seconds` and
        `nondeterminism_reason`; `begin`, `warm_up`, `initialize`, `place`, `unwrap` and `run`. `run` may return after fewer
        iterations than requested; its metrics have a row for each. The context ends after the last hook.

        Args:
          experiment: what the run computes.
          policy: its policy.
          devices: the devices that it may use; all if None.
          folder: the folder of the run.
          requests: knows when the run has to stop; to be asked wherever the program waits.
          say: called with lines about what happens.
        """
        ...

    def hooks(self, hooks: list[Any]) -> list[Any]:
        """All hooks of the run in their order: these, and those that the execution adds."""
        ...


class InProcess:
    """Executes a run by one program in this process, or in each of several; the default."""

    def check(self, experiment: Experiment, policy: str | DistributionPolicy | None, record: Path | None) -> None:
        """Refuses nothing."""

    def default_policy(self, experiment: Experiment) -> str:
        """The usual policy of the experiment."""
        return experiment.usual_policy

    @contextlib.contextmanager
    def program(
        self, experiment: Experiment, policy: DistributionPolicy, devices: Sequence[Device] | None, folder: Path | None,
        requests: StopRequests, say: Callable[[str], Any],
    ) -> Iterator[Any]:  # fmt: skip
        """The compiled iteration."""
        yield experiment.compile(policy, devices)

    def hooks(self, hooks: list[Any]) -> list[Any]:
        """Adds none."""
        return hooks


EXECUTIONS: Registry[Callable[[Any], Execution]] = Registry("executions")
"""What rooms add: by an argument of `train`, a function from its value to the execution of the run."""
