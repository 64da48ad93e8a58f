"""Computes how many runs of one program fit in the memory of the devices at the same time."""

from collections.abc import Sequence

from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.fragments.runtime.memory import device_memory, sharing_memory, temporary_bytes
from msrl_jax.run.experiment.experiment import Experiment

HEADROOM = 0.8  # fraction of the memory to plan with; the programs for initial states and evaluations need some, too


def memory_of(
    experiment: Experiment, policy: DistributionPolicy, devices: Sequence[Device] | None
) -> tuple[int, int, int | None]:
    """Returns how many such experiments fit at the same time, the bytes of one with all its seeds, and of the memory if known.

    All three are for the memory that fits the fewest, estimated from shapes alone: two states, and the arrays of an iteration
    as if XLA fused none of them.
    """
    program = experiment.compile(policy, devices)
    state_bytes = program.state.nbytes
    num_devices = min((len(placement.devices) for placement in program.layout.roles.values()), default=1)
    temporary = temporary_bytes(program.traced.jaxpr.jaxpr) // num_devices
    capacities = []
    for memory in sharing_memory(state_bytes):
        limit, required = device_memory(memory), sum(2 * state_bytes[device] + temporary for device in memory)
        capacities.append((max(1, int(HEADROOM * limit / required)) if limit and required else 2**20, required, limit))
    return min(capacities, key=lambda capacity: capacity[0])
