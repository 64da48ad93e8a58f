"""Describes a compiled training loop as a plan, with warnings about expensive or fragile parts, and remedies."""

import dataclasses
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import NamedSharding

from msrl_jax._compat import Jaxpr, equations_in
from msrl_jax.fragments.codecs import get
from msrl_jax.fragments.graph.nodes import Packed
from msrl_jax.fragments.passes.instructions import HostCall, Instruction, Loop, Move, RunProgram, Value, walk
from msrl_jax.fragments.passes.placed_policy import PlacedPolicy
from msrl_jax.fragments.placement import Edge, Layout, device_names
from msrl_jax.fragments.plan.cost import FragmentPlan, flops, fragment_plans
from msrl_jax.fragments.plan.hlo import CollectiveReport, collectives, module_of
from msrl_jax.fragments.plan.kernels import Launches, launches, per_iteration, roofline_seconds
from msrl_jax.fragments.plan.plan import Crossing, HostCallPlan, LoopPlan, Plan, ProgramPlan, RegisterPlan
from msrl_jax.fragments.plan.text import size
from msrl_jax.fragments.runtime.memory import lacking_memory

# With fewer operations per dispatch than this, a loop controlled by the host spends most of its time on dispatching.
_TINY_BODY = 1_000_000
# Exchanges of fewer bytes than this are negligible.
_SMALL = 1024
# Bytes of a changed word with its position.
_CHANGE = 6


def explain(
    placed: PlacedPolicy,
    jaxpr: Jaxpr,
    instructions: Sequence[Instruction],
    compiled: Mapping[Instruction, jax.stages.Compiled],
    shardings: Mapping[Value, NamedSharding],
    fused: bool,
    unused: Sequence[Edge],
    *,
    in_loop: bool,
    registers: Mapping[str, Sequence[Value]],
) -> Plan:
    """Describes a compiled training iteration, from its jaxpr, its instructions and the executable of each RunProgram.

    `registers` has, for every delayed leaf, the locations of its delayed values. If `in_loop`, the executable is the loop over
    iterations, and its launches per iteration are counted.
    """
    steps, layout = list(walk(instructions)), placed.layout
    fragments = tuple(fragment_plans(jaxpr, layout))
    modules = {i: module_of(compiled[i]) for i, _ in steps if isinstance(i, RunProgram)}
    reports = {i: collectives(module) for i, module in modules.items()}
    fragment_names = {f.name for f in fragments}
    launched = {
        i: launches(module, fragment_names) if i.placement.devices[0].platform != "cpu" else () for i, module in modules.items()
    }
    if in_loop:
        launched = {i: per_iteration(counts) for i, counts in launched.items()}
    programs = tuple(
        _program_plan(i, times, compiled[i], reports[i], launched[i]) for i, times in steps if isinstance(i, RunProgram)
    )
    moves = [(i, times) for i, times in steps if isinstance(i, Move) and not i.is_copy]
    crossings = tuple(c for i, times in moves for c in _find_crossings(i, shardings, times))
    loops = tuple(_loop_plan(i, times) for i, times in steps if isinstance(i, Loop))
    calls = [(i, times) for i, times in steps if isinstance(i, HostCall)]
    host_calls = tuple(HostCallPlan(i.name, times, sum(v.nbytes for v in i.outputs)) for i, times in calls)
    placements = {p.name: device_names(p.devices) for p in (*layout.placements, *(i.placement for i, _ in calls))}
    runs = list(zip([i for i, _ in steps if isinstance(i, RunProgram)], programs, strict=True))
    warnings = [
        *_collective_warnings(runs),
        *_loop_warnings(steps),
        *_unused_warnings(layout, steps),
        *_waiting_warnings(layout, instructions),
        *_replication_warnings(moves, shardings),
        *_codec_warnings(unused),
        *_callback_warnings(runs),
        *_memory_warnings(runs),
        *filter(None, [warn_of_idle(placed)]),
    ]
    if unclear := [f"{i.name!r} @ {i.placement.name}" for i, f in reports.items() if not f.understood]:
        warnings.append(
            f"the text that XLA prints for {', '.join(unclear)} could not be parsed completely: there may be more collectives "
            "than those listed"
        )
    if not all(f.lengths_known for f in reports.values()):
        warnings.append("a program has collectives in a loop of unknown length; their bytes are counted once")
    if not fragments:
        warnings.append("the iteration calls no function marked with `fragment`, so the policy has nothing to place")
    return Plan(
        layout.policy,
        placements,
        device_names(placed.idle),
        layout.staleness,
        fused,
        fragments,
        programs,
        crossings,
        loops,
        tuple(warnings),
        host_calls,
        _lower_bounds(layout, programs, fragments),
        tuple(_register_plans(registers, layout.staleness)),
    )


def _register_plans(registers: Mapping[str, Sequence[Value]], age: int) -> Iterator[RegisterPlan]:
    for leaf, values in registers.items():
        placements = dict.fromkeys(v.placement.name for v in values)
        for name in placements:
            yield RegisterPlan(leaf, name, sum(v.nbytes for v in values if v.placement.name == name), age)


def _lower_bounds(layout: Layout, programs: Sequence[ProgramPlan], fragments: Sequence[FragmentPlan]) -> dict[str, float]:
    lower_bounds = {}
    for placement in layout.placements:
        device_launches = [(x, p.runs * x.times) for p in programs if p.placement == placement.name for x in p.launches]
        total_flops = sum(f.flops * f.calls for f in fragments if f.placement == placement.name and not f.depth)
        kind, flops_per_device = getattr(placement.devices[0], "device_kind", ""), total_flops / len(placement.devices)
        if device_launches and (seconds := roofline_seconds(kind, device_launches, flops_per_device)) is not None:
            lower_bounds[placement.name] = seconds
    return lower_bounds


def _program_plan(
    run: RunProgram, times: int, compiled: jax.stages.Compiled, report: CollectiveReport, launched: tuple[Launches, ...]
) -> ProgramPlan:
    memory = compiled.memory_analysis()
    return ProgramPlan(
        run.name,
        run.placement.name,
        times,
        getattr(memory, "argument_size_in_bytes", 0),
        getattr(memory, "output_size_in_bytes", 0),
        getattr(memory, "temp_size_in_bytes", 0),
        getattr(memory, "alias_size_in_bytes", 0),
        tuple(report.collectives),
        report.understood,
        launched,
    )


def _find_crossings(move: Move, shardings: Mapping[Value, NamedSharding], times: int) -> Iterable[Crossing]:
    """Yields the values that a Move carries; the arrays of one packed value are one entry."""
    values: dict[object, list[Value]] = {}
    for result in move.results:
        values.setdefault(result.packed or result, []).append(result)
    source, destination = move.sources[0].placement.name, move.results[0].placement.name
    for item, parts in values.items():
        received_bytes = [_bytes_received(v, shardings[v]) for v in parts]
        label, aval = parts[0].label, parts[0].aval
        codec, unpacked = "", sum(received_bytes)
        if isinstance(item, Packed):
            label, aval, codec = item.label, item.aval, item.codec
            copies = max(received_bytes) // max(v.nbytes for v in parts)
            unpacked = copies * aval.size * aval.dtype.itemsize
            if changes := get(item.edge.codec).changes:
                received_bytes = [copies * _CHANGE * math.ceil(aval.size / changes.one_in)]
        yield Crossing(label, str(aval.dtype), aval.shape, source, destination, sum(received_bytes), times, codec, unpacked)


def _bytes_received(value: Value, sharding: NamedSharding) -> int:
    """Bytes that all devices of a sharding hold together; a replicated array counts once per device."""
    return math.prod(sharding.shard_shape(value.aval.shape)) * value.aval.dtype.itemsize * len(sharding.device_set)


def _loop_plan(loop: Loop, times: int) -> LoopPlan:
    inner = list(walk(loop.body, times * loop.length))
    names = dict.fromkeys(f for i, _ in inner if isinstance(i, RunProgram) for f in i.fragments)
    return LoopPlan(
        tuple(names),
        loop.length,
        sum(t for i, t in inner if isinstance(i, RunProgram)),
        sum(t for i, t in inner if isinstance(i, Move)),
    )


_Steps: TypeAlias = Sequence[tuple[Instruction, int]]
"""Instructions, with their executions per iteration."""

_Runs: TypeAlias = Sequence[tuple[RunProgram, ProgramPlan]]


def _collective_warnings(runs: _Runs) -> Iterator[str]:
    for run, program in runs:
        largest_state = sum(v.nbytes for v in run.inputs)
        for c in program.collectives:
            moved = c.kind != "all-reduce" and c.kind != "reduce-scatter"
            if moved and c.nbytes >= _SMALL:
                yield (
                    f"program {program.name!r} @ {program.placement} has an {c.kind} of {size(c.nbytes)} ({c.source}), "
                    f"{c.times} times per run: XLA exchanges whole batches between devices. Operations such as a shuffle or "
                    "a reshape that mix the split dimension with others cause this; keep that dimension outermost and whole"
                )
            elif c.nbytes > max(largest_state, _SMALL):
                yield (
                    f"program {program.name!r} @ {program.placement} all-reduces {size(c.nbytes)} ({c.source}), more than "
                    "all its inputs: something other than gradients is summed over devices"
                )


def _loop_warnings(steps: _Steps) -> Iterator[str]:
    for loop, _ in steps:
        if not isinstance(loop, Loop) or any(isinstance(i, HostCall) for i in loop.body):
            continue  # loops with host calls are always controlled by the host
        inner = [(i, t) for i, t in walk(loop.body) if isinstance(i, RunProgram)]
        dispatches = sum(t for _, t in inner)
        work = sum(flops(i.jaxpr.jaxpr, i.placement.devices[0].platform) * t for i, t in inner)
        if dispatches and work / dispatches < _TINY_BODY:
            names = "+".join(dict.fromkeys(f for i, _ in inner for f in i.fragments))
            yield (
                f"the host drives the loop over {names} ({loop.length} times, {dispatches} programs each, about "
                f"{work // dispatches:,} operations per program): dispatch will dominate. Give it more environments or "
                "larger batches, or a policy that places these roles together"
            )


def _unused_warnings(layout: Layout, steps: _Steps) -> Iterator[str]:
    used_devices = {d for i, _ in steps if isinstance(i, RunProgram) for d in i.placement.devices}
    for placement in layout.placements:
        if used_devices.isdisjoint(placement.devices):
            roles = " or ".join(repr(role) for role, where in layout.roles.items() if where == placement)
            yield f"nothing runs on {placement}: no fragment has the role {roles}. Assign these devices to another placement"


def _waiting_warnings(layout: Layout, instructions: Sequence[Instruction]) -> Iterator[str]:
    actors, learners = layout.placement("actor", "actor"), layout.placement("learner", "learner")
    if not set(actors.devices).isdisjoint(learners.devices):
        return
    parameters = {
        r
        for i, _ in walk(instructions)
        if isinstance(i, Move) and not i.is_copy
        for s, r in zip(i.sources, i.results, strict=True)
        if s.placement == learners and r.placement == actors
    }
    waiting_programs = [
        i for i in instructions if isinstance(i, RunProgram) and i.placement == actors and parameters & set(i.inputs)
    ]
    if layout.staleness and waiting_programs:
        yield (
            f"{waiting_programs[0].name!r} on the actors' devices ({actors.name}) reads the learner's newest values and waits "
            "for them: staleness delays what fragments of the roles 'actor' and 'buffer' read. Give the fragment that reads "
            "them one of these roles, or have an actor pass them on"
        )
    elif any("actor" in i.roles for i in waiting_programs):
        yield (
            f"actors ({actors.name}) wait for the learner ({learners.name}) in every iteration, and the learner waits for the "
            "actors: each idles while the other works. staleness=1 overlaps them; parameters are then one iteration old"
        )


def _replication_warnings(moves: Sequence[tuple[Move, int]], shardings: Mapping[Value, NamedSharding]) -> Iterator[str]:
    for i, _ in moves:
        for s, r in zip(i.sources, i.results, strict=True):
            was_split = s.placement.logical(shardings[s])
            rules = bool(r.placement.rules) and r.placement.mesh.size > 1
            if any(was_split) and rules and not any(shardings[r].spec) and r.nbytes >= _SMALL:
                axis, size = next((entry[0], size) for entry, size in zip(was_split, r.aval.shape, strict=False) if entry)
                divides = r.placement.split(axis) > 1
                yield (
                    f"{r.label} {r.aval.str_short()} is split at {s.placement.name!r} but copied whole to each of the "
                    f"{r.placement.mesh.size} devices of {r.placement.name!r}, which "
                    + (f"do not divide its {size} entries of axis {axis!r}" if divides else f"split no axis {axis!r}")
                )


def _codec_warnings(unused: Sequence[Edge]) -> Iterator[str]:
    for edge in unused:
        only = f" whose name contains {edge.only!r}" if edge.only else ""
        yield (
            f"codec {get(edge.codec).name!r} packs nothing: no value{only} that crosses from {edge.source!r} to "
            f"{edge.destination!r} has a dtype and a shape that it supports"
        )


def _callback_warnings(runs: _Runs) -> Iterator[str]:
    for i, _ in runs:
        names = (e.primitive.name for e in equations_in(i.jaxpr.jaxpr))
        if i.placement.mesh.size > 1 and any("callback" in name for name in names):
            yield (
                f"program {i.name!r} @ {i.placement.name} makes a host callback on {i.placement.mesh.size} devices: if it "
                "raises an exception, the other devices wait for this one until XLA ends the process. Catch exceptions inside "
                "the callback, or place this fragment on one device"
            )


def _memory_warnings(runs: _Runs) -> Iterator[str]:
    """Warns of programs that would be rejected because they need more memory than their devices have."""
    for i, program in runs:
        if excess := lacking_memory(dict.fromkeys(i.placement.devices, program.memory_bytes)):
            devices, nbytes, limit = excess
            ellipsis, verb = (", ...", "have") if len(devices) > 1 else ("", "has")
            yield (
                f"program {program.name!r} @ {program.placement} takes {size(nbytes)} of {device_names(devices)[0]}{ellipsis}, "
                f"which {verb} {size(limit)}: a run is refused. Use fewer environments, shorter unrolls or more devices"
            )


def warn_of_idle(placed: PlacedPolicy) -> str | None:
    """Says which devices stay idle, and which numbers would use them; it tries them, as only the policy knows what it does."""
    if not placed.idle:
        return None
    idle, total = len(placed.idle), len(placed.devices)
    envs = f" with num_envs={_num_envs(placed)}" if _num_envs(placed) else ""
    names, stay = ", ".join(device_names(placed.idle)), "stay" if idle > 1 else "stays"
    fact = f"{idle} of {total} devices {stay} idle ({names}): {placed.layout.policy} uses {total - idle}{envs}"
    try:
        ways = [*_sizes_without_idle(placed), *_parameters_without_idle(placed)]
    except Exception as error:
        return f"{fact}. Other numbers were not tried: {placed.layout.policy} raises {error!r}; raise ValueError to reject one"
    return f"{fact}. {' or '.join(ways)} would use all {total}" if ways else fact


def _num_envs(placed: PlacedPolicy) -> int:
    """Returns the size of the axis "env" if there is one and all leaves agree on it; else 0."""
    return placed.sizes["env"] if len({size for _, size in placed.leaves.get("env", ())}) == 1 else 0


def _sizes_without_idle(placed: PlacedPolicy) -> Iterator[str]:
    """Yields the nearest numbers of environments, below and above, that leave no device idle."""
    now = _num_envs(placed)
    reach = len(placed.devices) if now else 0  # a multiple of the number of devices is at most this far away
    for numbers in (range(now - 1, max(now - reach, 1) - 1, -1), range(now + 1, now + reach + 1)):
        with_envs = lambda n: dataclasses.replace(placed, leaves={**placed.leaves, "env": [("", n)]})
        yield from _first_without_idle(numbers, with_envs, "num_envs={}")


def _parameters_without_idle(placed: PlacedPolicy) -> list[str]:
    """Yields the policy with one number of devices changed; if no change helps, also with its other optional numbers set to
    None.
    """
    policy: Any = placed.policy
    if not dataclasses.is_dataclass(policy) or isinstance(policy, type):
        return []
    hints = typing.get_type_hints(type(policy))
    numbers = [f.name for f in dataclasses.fields(policy) if f.init and hints[f.name] in (int, int | None)]
    free = {name: None for name in numbers if hints[name] == int | None}

    def variants(overrides: dict[str, None]) -> Iterator[str]:
        for name in numbers:

            def with_number(n: int, name: str = name) -> PlacedPolicy:
                return dataclasses.replace(placed, policy=dataclasses.replace(policy, **(overrides | {name: n})))

            yield from _first_without_idle(range(1, len(placed.devices) + 1), with_number, "{policy}")

    return list(variants({})) or list(variants(free))


def _first_without_idle(numbers: Iterable[int], make: Callable[[int], PlacedPolicy], text: str) -> Iterator[str]:
    """Yields the first number that leaves no device idle, as text."""
    for n in numbers:
        try:
            placed = make(n)
            idle = placed.idle
        except ValueError:  # the policy refuses this number
            continue
        if not idle:
            yield text.format(n, policy=placed.layout.policy)
            return
