"""Describes a compiled training loop as a plan, from its instructions and compiled programs."""

import math
from collections.abc import Iterable, Mapping, Sequence

import jax
from jax.sharding import NamedSharding

from msrl_jax._device_memory import device_memory
from msrl_jax.fragments.passes.checks import Fit
from msrl_jax.fragments.passes.instructions import HostCall, Instruction, Loop, Move, Packed, Run, Value, walk
from msrl_jax.fragments.placement import Device, Edge, Layout
from msrl_jax.fragments.plan.advice import advise, warn_of_idle
from msrl_jax.fragments.plan.collectives import Found, collectives
from msrl_jax.fragments.plan.cost import FragmentCost
from msrl_jax.fragments.plan.plan import Crossing, FragmentPlan, HostCallPlan, LoopPlan, Plan, ProgramPlan, size
from msrl_jax.fragments.runtime.memory import sharing_memory


def explain(
    layout: Layout,
    costs: Iterable[FragmentCost],
    instructions: Sequence[Instruction],
    compiled: Mapping[Instruction, jax.stages.Compiled],
    shardings: Mapping[Value, NamedSharding],
    fused: bool,
    fit: Fit,
    unused: Sequence[Edge],
) -> Plan:
    """Describes a compiled training iteration, from its instructions and the executable of each Run."""
    steps = list(walk(instructions))
    fragments = tuple(_fragment(layout, c) for c in costs)
    found = {i: collectives(compiled[i].as_text() or "") for i, _ in steps if isinstance(i, Run)}
    programs = tuple(_program(i, times, compiled[i], found[i]) for i, times in steps if isinstance(i, Run))
    moves = [(i, times) for i, times in steps if isinstance(i, Move) and not i.is_copy]
    crossings = tuple(c for i, times in moves for c in _crossings(i, shardings, times))
    loops = tuple(_loop(i, times) for i, times in steps if isinstance(i, Loop))
    calls = [(i, times) for i, times in steps if isinstance(i, HostCall)]
    host_calls = tuple(HostCallPlan(i.name, times, sum(v.nbytes for v in i.outputs)) for i, times in calls)
    placements = {p.name: _names(p.devices) for p in (*layout.placements, *(i.placement for i, _ in calls))}
    warnings = advise(layout, instructions, programs, shardings, unused)
    warnings += _memory_warnings(steps, programs)
    if idle := warn_of_idle(fit):
        warnings.append(idle)
    if unclear := [f"{i.name!r} @ {i.placement.name}" for i, f in found.items() if not f.understood]:
        warnings.append(
            f"the text that XLA prints for {', '.join(unclear)} was not understood in full: there may be more collectives than "
            "those listed"
        )
    if not all(f.lengths_known for f in found.values()):
        warnings.append("a program holds collectives in a loop of unknown length; their bytes are counted once")
    if not fragments:
        warnings.append("the iteration calls no function marked with `fragment`, so the policy has nothing to place")
    return Plan(
        layout.policy,
        placements, _names(fit.idle), layout.staleness, fused, fragments, programs, crossings, loops, tuple(warnings),
        host_calls,
    )  # fmt: skip


def _memory_warnings(steps: Sequence[tuple[Instruction, int]], programs: Sequence[ProgramPlan]) -> Iterable[str]:
    """Of programs that would be refused: those that take more memory than their devices have."""
    for i, program in zip([i for i, _ in steps if isinstance(i, Run)], programs, strict=True):
        for devices in sharing_memory(i.placement.devices):
            taken, limit = program.memory_bytes * len(devices), device_memory(devices)
            if limit is not None and taken > limit:
                yield (
                    f"program {program.name!r} @ {program.placement} takes {size(taken)} of {_names(devices)[0]}"
                    f"{', ...' * (len(devices) > 1)}, which {'have' if len(devices) > 1 else 'has'} {size(limit)}: a run is "
                    "refused. Fewer environments, shorter unrolls or more devices take less"
                )
                break


def _names(devices: Iterable[Device]) -> tuple[str, ...]:
    return tuple(f"{d.platform}:{d.id}" for d in devices)


def _fragment(layout: Layout, cost: FragmentCost) -> FragmentPlan:
    placement = layout.placement(cost.role, cost.name)
    return FragmentPlan(
        cost.name, cost.role, placement.name, len(placement.devices), cost.depth, cost.flops, cost.calls
    )


def _program(run: Run, times: int, compiled: jax.stages.Compiled, found: Found) -> ProgramPlan:
    memory = compiled.memory_analysis()
    return ProgramPlan(
        run.name, run.placement.name, times,
        getattr(memory, "argument_size_in_bytes", 0), getattr(memory, "output_size_in_bytes", 0),
        getattr(memory, "temp_size_in_bytes", 0), getattr(memory, "alias_size_in_bytes", 0),
        tuple(found.collectives), found.understood,
    )  # fmt: skip


def _crossings(move: Move, shardings: Mapping[Value, NamedSharding], times: int) -> Iterable[Crossing]:
    """The values that a Move carries; the arrays of one packed value are one entry."""
    values: dict[object, list[Value]] = {}
    for result in move.results:
        values.setdefault(result.packed or result, []).append(result)
    source, destination = move.sources[0].placement.name, move.results[0].placement.name
    for whole, parts in values.items():
        arriving = [_bytes_received(v, shardings[v]) for v in parts]
        label, aval = parts[0].label, parts[0].aval
        codec, unpacked = "", sum(arriving)
        if isinstance(whole, Packed):
            label, aval, codec = whole.label, whole.aval, whole.codec
            copies = max(arriving) // max(v.nbytes for v in parts)
            unpacked = copies * aval.size * aval.dtype.itemsize
        yield Crossing(label, str(aval.dtype), aval.shape, source, destination, sum(arriving), times, codec, unpacked)


def _bytes_received(value: Value, at: NamedSharding) -> int:
    """Bytes that all devices of a sharding hold together; a replicated array counts once for each."""
    return math.prod(at.shard_shape(value.aval.shape)) * value.aval.dtype.itemsize * len(at.device_set)


def _loop(loop: Loop, times: int) -> LoopPlan:
    inner = list(walk(loop.body, times * loop.length))
    names = dict.fromkeys(f for i, _ in inner if isinstance(i, Run) for f in i.fragments)
    return LoopPlan(
        tuple(names), loop.length,
        sum(t for i, t in inner if isinstance(i, Run)), sum(t for i, t in inner if isinstance(i, Move)),
    )  # fmt: skip
