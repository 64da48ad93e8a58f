"""Computes how many runs of one program fit in the memory of the devices at the same time."""

from collections.abc import Sequence

from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.fragments.runtime.memory import device_memory, sharing_memory, temporary_bytes
from msrl_jax.run.experiment.spec import Experiment

HEADROOM = 0.8  # fraction of the memory to plan with; the programs for initial states and evaluations need some, too


def memory_of(
    experiment: Experiment, policy: DistributionPolicy, devices: Sequence[Device] | None
) -> tuple[int, int, int | None]:
    """Returns how many such experiments fit at the same time, the bytes of one with all its seeds, and of the memory if known.

    All three are for the memory that fits the fewest, estimated from shapes alone: two states, and the arrays of an iteration
    as if XLA fused none of them.
    """
    program = experiment.compile(policy, devices)
    held = program.state.nbytes
    parts = min((len(placement.devices) for placement in program.layout.roles.values()), default=1)
    within = temporary_bytes(program.traced.jaxpr.jaxpr) // parts
    found = []
    for memory in sharing_memory(held):
        limit, needed = device_memory(memory), sum(2 * held[device] + within for device in memory)
        found.append((max(1, int(HEADROOM * limit / needed)) if limit and needed else 2**20, needed, limit))
    return min(found, key=lambda each: each[0])
