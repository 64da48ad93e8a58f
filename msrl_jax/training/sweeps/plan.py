"""How many trials of a sweep are trained at once: as many as memory holds."""

import dataclasses
from collections.abc import Sequence

from msrl_jax._checks import whole
from msrl_jax._device_memory import device_memory
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.fragments.plan.plan import size
from msrl_jax.fragments.runtime.memory import sharing_memory, temporary_bytes
from msrl_jax.training.setup import Setup
from msrl_jax.training.sweeps.trials import Trial

HEADROOM = 0.8
"""The part of the memory that a sweep plans with; programs of the initial state and of evaluations need some, too."""


@dataclasses.dataclass(frozen=True)
class Share:
    """The memory that one trial takes.

    Attributes:
      at_once: trials that fit side by side, at least 1.
      nbytes: estimated bytes of a trial with all its seeds, where memory is scarcest.
      limit: bytes that are there; None if the devices do not tell.
      steps_per_iteration: steps of each member in an iteration.
    """

    at_once: int
    nbytes: int
    limit: int | None
    steps_per_iteration: int

    def __str__(self) -> str:
        there = "" if self.limit is None else f" of {size(self.limit)}"
        return f"about {size(self.nbytes)}{there} for each trial"


def share(setup: Setup, distribution: DistributionPolicy, devices: Sequence[Device] | None) -> Share:
    """Estimates the memory of a trial, from shapes alone.

    Args:
      setup: the run of one trial.
      distribution: the distribution policy.
      devices: the devices; all if None.

    Returns:
      The estimate: the state before and after an iteration, and the arrays within it, as if XLA fused none of them.

    Raises:
      ValueError: if the state of one trial alone does not fit, or the devices do not fit the policy.
    """
    per_iteration = setup.behavior.agent.steps_per_iteration
    program = setup.compile(distribution, devices)
    held, placements = program.state_bytes, program.layout.roles.values()
    parts = min((len(placement.devices) for placement in placements), default=1)
    within = temporary_bytes(program.traced.jaxpr.jaxpr) // parts
    found = []
    for memory in sharing_memory(held):
        limit, needed = device_memory(memory), sum(2 * held[device] + within for device in memory)
        found.append(Share(max(1, int(HEADROOM * limit / needed)) if limit and needed else 2**20, needed, limit, per_iteration))
    return min(found, key=lambda each: each.at_once)


def trials_at_once(members_at_once: int | None, seeds: int) -> int | None:
    """The trials that the user wants at once; raises ValueError if there is no room for the seeds of one."""
    if members_at_once is None:
        return None
    count = whole("members_at_once", members_at_once)
    if count < seeds:
        raise ValueError(f"members_at_once={count}: the seeds of a trial are trained together; use at least seeds={seeds}")
    return count // seeds


def batches(trials: Sequence[Trial], at_once: int) -> list[list[Trial]]:
    """Splits trials into batches of about equal size, at most `at_once` each."""
    count = -(-len(trials) // at_once)
    length = -(-len(trials) // count)
    return [list(trials[i : i + length]) for i in range(0, len(trials), length)]
