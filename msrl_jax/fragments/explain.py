"""The plan of a compiled training loop, before it runs: as plain data and as a text table."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from msrl_jax.fragments.cost import FragmentCost, flops
from msrl_jax.fragments.hlo import Collective, collectives
from msrl_jax.fragments.instructions import Instruction, Loop, Move, Run, Value, walk
from msrl_jax.fragments.placement import Layout

# Below this many operations for each dispatch, a loop driven by the host spends its time on dispatching.
_TINY_BODY = 1_000_000
# Exchanges below this size are bookkeeping.
_SMALL = 1024


@dataclass(frozen=True)
class FragmentPlan:
    """A fragment: `flops` of one call on the whole batch, `calls` per iteration, on `devices` devices of `placement`."""

    name: str
    role: str
    placement: str
    devices: int
    depth: int
    flops: int
    calls: int


@dataclass(frozen=True)
class ProgramPlan:
    """A program: `runs` per iteration; memory in bytes for each device; the collectives that XLA put into it."""

    name: str
    placement: str
    runs: int
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    donated_bytes: int
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class Crossing:
    """A value that crosses placements: `nbytes` arrive at all devices of `destination` together, `times` per iteration."""

    value: str
    dtype: str
    shape: tuple[int, ...]
    source: str
    destination: str
    nbytes: int
    times: int


@dataclass(frozen=True)
class LoopPlan:
    """A loop that the host drives: dispatched programs and transfers per training iteration."""

    fragments: tuple[str, ...]
    length: int
    programs: int
    transfers: int


@dataclass(frozen=True)
class Plan:
    """What a training iteration does, and where.

    Attributes:
      policy: the distribution policy.
      placements: name -> devices.
      staleness: iterations that actors' parameters lag behind.
      fused: whether whole runs of iterations are one program.
      fragments: the fragments, nested ones indented behind those that hold them.
      programs: the XLA programs.
      crossings: the values that cross placements.
      loops: the loops that the host drives.
      warnings: what looks expensive, in words.
    """

    policy: str
    placements: dict[str, tuple[str, ...]]
    staleness: int
    fused: bool
    fragments: tuple[FragmentPlan, ...]
    programs: tuple[ProgramPlan, ...]
    crossings: tuple[Crossing, ...]
    loops: tuple[LoopPlan, ...]
    warnings: tuple[str, ...]

    @property
    def bytes_crossing(self) -> int:
        """Bytes that cross placements per iteration."""
        return sum(c.nbytes * c.times for c in self.crossings)

    @property
    def dispatches(self) -> int:
        """Programs that the host dispatches per iteration."""
        return sum(p.runs for p in self.programs)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain Python data, ready for JSON."""
        data = dataclasses.asdict(self)
        return data | {"bytes_crossing": self.bytes_crossing, "dispatches": self.dispatches}

    def __str__(self) -> str:
        return _table(self)


def explain(
    layout: Layout,
    costs: Iterable[FragmentCost],
    instructions: Sequence[Instruction],
    compiled: Mapping[Instruction, jax.stages.Compiled],
    shardings: Mapping[Value, NamedSharding],
    fused: bool,
) -> Plan:
    """Describes a compiled training iteration.

    Args:
      layout: the placements.
      costs: the fragments.
      instructions: what one iteration executes.
      compiled: the executable of each Run.
      shardings: where each value lies, as far as values cross placements.
      fused: whether whole runs of iterations are one program.

    Returns:
      The plan.
    """
    steps = list(walk(instructions))
    fragments = tuple(_fragment(layout, c) for c in costs)
    programs, sure = _programs(steps, compiled)
    crossings = tuple(
        _crossing(s, r, shardings[r], times)
        for i, times in steps
        if isinstance(i, Move) and not i.is_copy
        for s, r in zip(i.sources, i.results, strict=True)
    )
    loops = tuple(_loop(i, times) for i, times in steps if isinstance(i, Loop))
    warnings = [
        *_collective_warnings(steps, programs),
        *_loop_warnings(steps),
        *_waiting_warnings(layout, instructions),
        *_replication_warnings(steps, shardings),
    ]
    if not sure:
        warnings.append("a program holds collectives in a loop of unknown length; their bytes are counted once")
    if not fragments:
        warnings.append("the iteration calls no function marked with `fragment`, so the policy has nothing to place")
    return Plan(
        layout.policy,
        {p.name: tuple(f"{d.platform}:{d.id}" for d in p.devices) for p in layout.placements},
        layout.staleness, fused, fragments, programs, crossings, loops, tuple(warnings),
    )  # fmt: skip


def _fragment(layout: Layout, cost: FragmentCost) -> FragmentPlan:
    placement = layout.placement(cost.role, cost.name)
    return FragmentPlan(
        cost.name, cost.role, placement.name, len(placement.devices), cost.depth, cost.flops, cost.calls
    )


def _programs(
    steps: Sequence[tuple[Instruction, int]], compiled: Mapping[Instruction, jax.stages.Compiled]
) -> tuple[tuple[ProgramPlan, ...], bool]:
    plans, sure = [], True
    for i, times in steps:
        if not isinstance(i, Run):
            continue
        memory = compiled[i].memory_analysis()
        found, known = collectives(compiled[i].as_text() or "")
        sure &= known
        plans.append(
            ProgramPlan(
                i.name, i.placement.name, times,
                getattr(memory, "argument_size_in_bytes", 0), getattr(memory, "output_size_in_bytes", 0),
                getattr(memory, "temp_size_in_bytes", 0), getattr(memory, "alias_size_in_bytes", 0), tuple(found),
            )
        )
    return tuple(plans), sure


def _crossing(source: Value, result: Value, sharding: NamedSharding, times: int) -> Crossing:
    shape = result.aval.shape
    nbytes = received(sharding, shape, result.aval.dtype.itemsize)
    dtype = str(result.aval.dtype)
    return Crossing(result.label, dtype, shape, source.placement.name, result.placement.name, nbytes, times)


def received(sharding: NamedSharding, shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes that all devices of a sharding hold together.

    Args:
      sharding: the sharding.
      shape: the array's shape.
      itemsize: bytes of one element.

    Returns:
      The bytes; a replicated array counts once for each device.
    """
    shard = sharding.shard_shape(shape)
    size = itemsize
    for n in shard:
        size *= n
    return size * len(sharding.device_set)


def _loop(loop: Loop, times: int) -> LoopPlan:
    inner = list(walk(loop.body, times * loop.length))
    names = dict.fromkeys(f for i, _ in inner if isinstance(i, Run) for f in i.fragments)
    return LoopPlan(
        tuple(names), loop.length,
        sum(t for i, t in inner if isinstance(i, Run)), sum(t for i, t in inner if isinstance(i, Move)),
    )  # fmt: skip


def _collective_warnings(
    steps: Sequence[tuple[Instruction, int]], programs: Sequence[ProgramPlan]
) -> Iterable[str]:
    runs = [i for i, _ in steps if isinstance(i, Run)]
    for run, program in zip(runs, programs, strict=True):
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
                    "all of its inputs: something other than gradients is summed over devices"
                )


def _loop_warnings(steps: Sequence[tuple[Instruction, int]]) -> Iterable[str]:
    for loop, _ in steps:
        if not isinstance(loop, Loop):
            continue
        inner = [(i, t) for i, t in walk(loop.body) if isinstance(i, Run)]
        dispatches = sum(t for _, t in inner)
        work = sum(flops(i.jaxpr.jaxpr) * t for i, t in inner)
        if dispatches and work / dispatches < _TINY_BODY:
            names = "+".join(dict.fromkeys(f for i, _ in inner for f in i.fragments))
            yield (
                f"the host drives the loop over {names} ({loop.length} times, {dispatches} programs each, about "
                f"{work // dispatches:,} operations per program): dispatch will dominate. Give it more environments, or a "
                "policy that places these roles together"
            )


def _waiting_warnings(layout: Layout, instructions: Sequence[Instruction]) -> Iterable[str]:
    if layout.staleness:
        return
    actors, learners = layout.placement("actor", "actor"), layout.placement("learner", "learner")
    if not set(actors.devices).isdisjoint(learners.devices):
        return
    down = {
        r for i, _ in walk(instructions) if isinstance(i, Move) and not i.is_copy
        for s, r in zip(i.sources, i.results, strict=True) if s.placement == learners and r.placement == actors
    }  # fmt: skip
    if any(isinstance(i, Run) and "actor" in i.roles and down & set(i.inputs) for i in instructions):
        yield (
            f"actors ({actors.name}) wait for the learner ({learners.name}) in every iteration, and it for them: each "
            "idles while the other works. staleness=1 overlaps them, at the price of parameters one iteration old"
        )


def _replication_warnings(
    steps: Sequence[tuple[Instruction, int]], shardings: Mapping[Value, NamedSharding]
) -> Iterable[str]:
    for i, _ in steps:
        if not isinstance(i, Move) or i.is_copy:
            continue
        for s, r in zip(i.sources, i.results, strict=True):
            was_split = any(s.placement.logical(shardings[s]))
            rules = bool(r.placement.rules) and r.placement.mesh.size > 1
            if was_split and rules and not any(shardings[r].spec) and r.nbytes >= _SMALL:
                yield (
                    f"{r.label} {r.aval.str_short()} is split at {s.placement.name!r} but copied whole to each of the "
                    f"{r.placement.mesh.size} devices of {r.placement.name!r}: its dimensions do not divide"
                )


def size(nbytes: int) -> str:
    """A number of bytes for people: `1.5 KiB`."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError


def _count(number: int) -> str:
    amount = float(number)
    for unit in ("", "k", "M", "G"):
        if amount < 1000:
            return f"{amount:.0f}{unit}" if unit == "" else f"{amount:.1f}{unit}"
        amount /= 1000
    return f"{amount:.1f}T"


def _shorten(name: str, most: int = 40) -> str:
    parts = name.split("+")
    return name if len(name) <= most else f"{parts[0]}+...+{parts[-1]} ({len(parts)} fragments)"


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in [head, *rows]]


def _table(plan: Plan) -> str:
    where = "; ".join(f"{name} = {', '.join(devices)}" for name, devices in plan.placements.items())
    how = "one program for a whole run of iterations" if plan.fused else f"{plan.dispatches} dispatches per iteration"
    stale = f", staleness {plan.staleness}" if plan.staleness else ""
    lines = [f"{plan.policy}: {how}{stale}", f"  {where}", "", "fragments"]
    lines += _columns(
        ("name", "role", "placement", "devices", "FLOPs/call", "calls/iteration"),
        [
            ("  " * f.depth + f.name, f.role, f.placement, str(f.devices), _count(f.flops), str(f.calls))
            for f in plan.fragments
        ],
    )
    title = {p.name: _shorten(p.name) for p in plan.programs}
    lines += ["", "programs (memory on each device)"]
    lines += _columns(
        ("name", "placement", "runs/iteration", "arguments", "results", "temporary", "reused"),
        [
            (title[p.name], p.placement, str(p.runs), size(p.argument_bytes), size(p.output_bytes), size(p.temporary_bytes),
             size(p.donated_bytes))
            for p in plan.programs
        ],
    )  # fmt: skip
    lines += ["", f"crossing placements ({size(plan.bytes_crossing)} per iteration)"]
    lines += _columns(
        ("value", "type", "from", "to", "bytes", "times/iteration"),
        [
            (c.value, f"{c.dtype}{list(c.shape)}", c.source, c.destination, size(c.nbytes), str(c.times))
            for c in plan.crossings
        ],
    ) if plan.crossings else ["  nothing"]  # fmt: skip
    found = [(p, c) for p in plan.programs for c in p.collectives]
    lines += ["", "collectives inside programs"]
    lines += _columns(
        ("program", "kind", "bytes", "times/iteration", "source"),
        [
            (title[p.name], c.kind, size(c.nbytes), str(p.runs * c.times), "/".join(c.source.split("/")[-2:])[-60:])
            for p, c in found
        ],
    ) if found else ["  none"]  # fmt: skip
    if plan.loops:
        lines += ["", "loops driven by the host"]
        lines += _columns(
            ("over", "length", "programs/iteration", "transfers/iteration"),
            [("+".join(p.fragments), str(p.length), str(p.programs), str(p.transfers)) for p in plan.loops],
        )
    if plan.warnings:
        lines += ["", "warnings", *(f"  - {w}" for w in plan.warnings)]
    return "\n".join(lines)
