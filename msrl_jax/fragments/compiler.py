"""The compiler: traces a training iteration, and runs the passes that turn it into a `Program`."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from msrl_jax.fragments.graph.build import build_graph
from msrl_jax.fragments.graph.trace import axis_leaves, leaf_axes, state_avals, trace
from msrl_jax.fragments.passes.lifetimes import add_lifetimes
from msrl_jax.fragments.passes.packing import pack
from msrl_jax.fragments.passes.partition import partition
from msrl_jax.fragments.passes.placed_policy import PlacedPolicy, check_devices, round_robin_by_process
from msrl_jax.fragments.passes.prepare import prepare_for_placement
from msrl_jax.fragments.passes.schedule import schedule
from msrl_jax.fragments.passes.staleness import delay
from msrl_jax.fragments.passes.validate import check_graph, check_meshes, check_settings
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.fragments.program import Program
from msrl_jax.fragments.support.tracebacks import entry

State = TypeVar("State")


@entry
def compile(
    iteration: Callable[[State], tuple[State, Any]],
    state: State,
    *,
    policy: DistributionPolicy,
    axes: Any = None,
    groups: Mapping[str, int] | None = None,
    devices: Sequence[Device] | None = None,
) -> Program[State]:
    """Compiles a training iteration for a distribution policy.

    Traces the iteration, partitions it at its fragments and checks the result; XLA compiles on first use.

    Args:
      iteration: pure function `state -> (state, metrics)` that calls functions marked with `fragment`.
      state: pytree of arrays, or of `jax.ShapeDtypeStruct` to plan without data.
      policy: where each role runs.
      axes: prefix of the state's tree with a `PartitionSpec` of logical axis names ("env", "agent", "member", "shard",
        "worker") for each part; None replicates.
      groups: number of adjacent entries of a logical axis that stay on one device, such as `{"env": 4}`; 1 by default.
      devices: devices that the policy may use; by default all devices of the default platform, of all processes. The devices
        of several processes are interleaved.

    Returns:
      The program.

    Raises:
      RuntimeError: under `jax.disable_jit`, or inside `jax.set_mesh`.
      TypeError: if a leaf of the state is not an array, or the next state differs from the state; names the leaf.
      ValueError: if the axes do not match the state, the devices do not suit the policy, a dimension cannot be split over
        the devices of a placement, a `cond` or `while` spans placements, or two learners claim the same parameters.
    """
    check_settings()
    start = time.perf_counter()
    specs = leaf_axes(state, axes)
    usable = round_robin_by_process(check_devices(jax.devices() if devices is None else devices))
    placed = PlacedPolicy(policy, usable, axis_leaves(state, specs), groups or {})
    layout = placed.layout
    traced = trace(iteration, state)
    _, paths = state_avals(state)
    graph = build_graph(traced.jaxpr, layout, paths, specs)
    check_graph(graph, traced.jaxpr.effects, layout)
    if layout.staleness:
        delay(graph, layout.staleness, layout)
    placements = graph.placements
    default = next(iter(placements)) if len(placements) == 1 else layout.placement("learner")
    parts = partition(graph, default)
    while pack(parts, graph, layout):
        parts = partition(graph, default)
    instructions = add_lifetimes(schedule(parts, graph, default))
    check_meshes(instructions.body)
    # If one placement holds every fragment, whole runs of iterations are one program.
    fuses = len(placements) <= 1 and not layout.staleness and not graph.host_calls
    fused = prepare_for_placement(traced.jaxpr, default) if fuses else None
    return Program(placed, graph, instructions, fused, jax.tree.structure(state), traced, time.perf_counter() - start)
