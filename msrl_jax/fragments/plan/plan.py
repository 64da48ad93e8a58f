"""The plan of a compiled training loop: plain data that prints as a text table."""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msrl_jax._terminal import paragraph, table
from msrl_jax.fragments.plan.cost import Collective, FragmentPlan
from msrl_jax.fragments.plan.kernels import Launches


@dataclass(frozen=True)
class ProgramPlan:
    """A program: `runs` per iteration; memory in bytes for each device; the collectives that XLA put into it.

    If `collectives_known` is False, there may be more, because the program's text was not understood in full. `launches` are
    those of accelerators; CPUs have none.
    """

    name: str
    placement: str
    runs: int
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    donated_bytes: int
    collectives: tuple[Collective, ...]
    collectives_known: bool = True
    launches: tuple[Launches, ...] = ()

    @property
    def memory_bytes(self) -> int:
        """Bytes that the program takes on each device while it runs."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes - self.donated_bytes

    @property
    def collective_bytes(self) -> int:
        """Bytes of the results of its collectives on each device, per iteration."""
        return sum(c.nbytes * c.times for c in self.collectives) * self.runs


@dataclass(frozen=True)
class Crossing:
    """A value that crosses placements."""

    value: str  # the path of a state's leaf, or of a fragment's result
    dtype: str  # its dtype, unpacked
    shape: tuple[int, ...]  # its shape, unpacked
    source: str  # the placement that sends it
    destination: str  # the placement that receives it
    nbytes: int  # bytes that arrive at all devices of the destination together
    times: int  # transfers per iteration
    codec: str  # name of the codec that packs it; empty if none does
    unpacked_bytes: int  # bytes that would arrive without the codec


@dataclass(frozen=True)
class HostCallPlan:
    """A Python function that the host calls between programs: `calls` per iteration, with its results in bytes."""

    name: str
    calls: int
    result_bytes: int


@dataclass(frozen=True)
class LoopPlan:
    """A loop that the host drives: dispatched programs and transfers per training iteration."""

    fragments: tuple[str, ...]
    length: int
    programs: int
    transfers: int


@dataclass(frozen=True)
class Plan:
    """The fragments, programs, transfers and placements of a training iteration.

    Attributes:
      policy: the distribution policy.
      placements: name -> devices.
      idle: devices that the policy was given and does not use.
      staleness: iterations that actors' parameters lag behind.
      fused: whether whole runs of iterations are one program.
      fragments: the fragments, each followed by the fragments nested in it.
      programs: the XLA programs.
      crossings: the values that cross placements, one entry for each array.
      loops: the loops that the host drives.
      warnings: warnings about expensive or fragile parts, with remedies.
      host_calls: the Python functions that the host calls.
      least_seconds: of placements on known accelerators, a time below which an iteration cannot be; a prediction.
    """

    policy: str
    placements: dict[str, tuple[str, ...]]
    idle: tuple[str, ...]
    staleness: int
    fused: bool
    fragments: tuple[FragmentPlan, ...]
    programs: tuple[ProgramPlan, ...]
    crossings: tuple[Crossing, ...]
    loops: tuple[LoopPlan, ...]
    warnings: tuple[str, ...]
    host_calls: tuple[HostCallPlan, ...] = ()
    least_seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def launches(self) -> dict[str, int]:
        """What each device of a placement launches per iteration: kernels, library calls, copies and collectives."""
        found = [(p.placement, p.runs * x.times * x.count) for p in self.programs for x in p.launches]
        return {name: sum(n for placement, n in found if placement == name) for name in self.placements}

    @property
    def bytes_crossing(self) -> int:
        """Bytes that cross placements per iteration."""
        return sum(c.nbytes * c.times for c in self.crossings)

    @property
    def unpacked_bytes_crossing(self) -> int:
        """Bytes that would cross placements per iteration without codecs."""
        return sum(c.unpacked_bytes * c.times for c in self.crossings)

    @property
    def dispatches(self) -> int:
        """Programs that the host dispatches per iteration."""
        return sum(p.runs for p in self.programs)

    @property
    def bytes_arriving(self) -> dict[str, int]:
        """Bytes that transfers bring to each device of a placement per iteration."""
        return {
            name: sum(c.nbytes * c.times for c in self.crossings if c.destination == name) // len(devices)
            for name, devices in self.placements.items()
        }

    @property
    def bytes_of_collectives(self) -> dict[str, int]:
        """Bytes of the results of collectives on each device of a placement per iteration."""
        return {name: sum(p.collective_bytes for p in self.programs if p.placement == name) for name in self.placements}

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that the largest program takes on each device of a placement."""
        return {
            name: max((p.memory_bytes for p in self.programs if p.placement == name), default=0) for name in self.placements
        }

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain Python data, ready for JSON."""
        totals = ("bytes_crossing", "unpacked_bytes_crossing", "dispatches", "bytes_arriving", "bytes_of_collectives", "memory")
        totals += ("launches",)
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in totals}

    def __str__(self) -> str:
        """The plan as tables that fit the terminal; arrays of one subtree that cross alike share a row."""
        return _table(self)


def size(nbytes: int) -> str:
    """A readable number of bytes, such as `1.5 KiB`."""
    return _readable(nbytes, 1024, (" B", " KiB", " MiB", " GiB"))


def _count(number: int) -> str:
    return _readable(number, 1000, ("", "k", "M", "G", "T"))


def _readable(number: int, step: int, units: Sequence[str]) -> str:
    most = len(units) - 1
    power = next((k for k in range(most) if number / step**k < step), most)
    return f"{number / step**power:.{min(power, 1)}f}{units[power]}"


def _shorten(name: str, most: int = 40) -> str:
    parts = name.split("+")
    return name if len(name) <= most else f"{parts[0]}+...+{parts[-1]} ({len(parts)} fragments)"


_columns = functools.partial(table, indent=2)

# Groups: the root with its first step and attributes; then keys and indices, such as those of parameters; then the rest.
_PATH = re.compile(r"([^.\[\s]+(?:\.\w+|\[[^\]]*\])?(?:\.\w+)*)(\[\S*)?(.*)")


def _subtree(path: str) -> str:
    """The subtree that an array is reported with: `state.params` for `state.params['layer']['bias']`."""
    match = _PATH.fullmatch(path)
    return match[1] + match[3] if match else path


def _crossing_rows(crossings: Sequence[Crossing]) -> list[list[str]]:
    """One row for the arrays of a subtree with equal dtype, source, destination, times and codec."""
    together: dict[tuple[Any, ...], list[Crossing]] = {}
    for c in crossings:
        key = (_subtree(c.value), c.dtype, c.codec, c.source, c.destination, c.times)
        together.setdefault(key, []).append(c)
    rows = []
    for (subtree, *_), leaves in together.items():
        c = leaves[0]
        alone = len(leaves) == 1
        rows.append(
            [
                c.value if alone else f"{subtree} ({len(leaves)} leaves)",
                f"{c.dtype}{list(c.shape)}" if alone else c.dtype,
                c.source, c.destination, size(sum(x.nbytes for x in leaves)), str(c.times),
                c.codec or "-", size(sum(x.unpacked_bytes for x in leaves)),
            ]
        )  # fmt: skip
    return rows


def _some(devices: Sequence[str]) -> str:
    """The names of devices, of the first and the last one if they are many."""
    return ", ".join(devices) if len(devices) <= 16 else f"{devices[0]}, ..., {devices[-1]} ({len(devices)} devices)"


def _launch_lines(plan: Plan, title: Mapping[str, str]) -> list[str]:
    counts = [f"{number:,} @ {name}" for name, number in plan.launches.items() if number]
    least = [f"{seconds * 1e3:.3g} ms @ {name}" for name, seconds in plan.least_seconds.items()]
    predicted = f"; predicted, at least {', '.join(least)}" if least else ""
    head = ("program", "fragment", "loops", "times/iteration", "kernels", "library calls", "copies", "collectives", "bytes")
    rows = [
        (title[p.name], x.fragment or "-", " x ".join(map(str, x.trips)) or "-", str(p.runs * x.times), str(x.kernels),
         str(x.library_calls), str(x.copies), str(x.collectives), size(x.nbytes))
        for p in plan.programs for x in p.launches
    ]  # fmt: skip
    first = 1 if len(plan.programs) == 1 else 0
    table = _columns(head[first:], [row[first:] for row in rows])
    return ["", *paragraph(f"launches of each device ({', '.join(counts)} per iteration{predicted})", "", "  "), *table]


def _table(plan: Plan) -> str:
    where = "; ".join(f"{name} = {_some(devices)}" for name, devices in plan.placements.items())
    where += f"; idle = {_some(plan.idle)}" if plan.idle else ""
    how = "one program for a whole run of iterations" if plan.fused else f"{plan.dispatches} dispatches per iteration"
    stale = f", staleness {plan.staleness}" if plan.staleness else ""
    lines = [*paragraph(f"{plan.policy}: {how}{stale}", rest="  "), *paragraph(where, "  ", "    "), "", "fragments"]
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
    for p in plan.programs:
        if title[p.name] != p.name:
            lines += paragraph(f"{title[p.name]}: {', '.join(p.name.split('+'))}", "  ", "    ")
    packed = any(c.codec for c in plan.crossings)
    unpacked = f", {size(plan.unpacked_bytes_crossing)} unpacked" if packed else ""
    lines += ["", f"crossing placements ({size(plan.bytes_crossing)} per iteration{unpacked})"]
    head = ("value", "type", "from", "to", "bytes", "times/iteration", "codec", "unpacked")
    shown = len(head) if packed else head.index("codec")
    rows = [row[:shown] for row in _crossing_rows(plan.crossings)]
    lines += _columns(head[:shown], rows) if rows else ["  nothing"]
    found = [(p, c) for p in plan.programs for c in p.collectives]
    unclear = [p for p in plan.programs if not p.collectives_known]
    lines += ["", "collectives inside programs"]
    lines += _columns(
        ("program", "kind", "bytes", "times/iteration", "source"),
        [
            (title[p.name], c.kind, size(c.nbytes), str(p.runs * c.times), "/".join(c.source.split("/")[-2:])[-60:])
            for p, c in found
        ],
    ) if found else ["  none"] if not unclear else []  # fmt: skip
    lines += [f"  {title[p.name]}: unknown, see the warnings" for p in unclear]
    if any(plan.launches.values()):
        lines += _launch_lines(plan, title)
    if plan.host_calls:
        lines += ["", "called by the host"]
        lines += _columns(
            ("name", "calls/iteration", "results"), [(c.name, str(c.calls), size(c.result_bytes)) for c in plan.host_calls]
        )
    if plan.loops:
        lines += ["", "loops driven by the host"]
        lines += _columns(
            ("over", "length", "programs/iteration", "transfers/iteration"),
            [("+".join(p.fragments), str(p.length), str(p.programs), str(p.transfers)) for p in plan.loops],
        )
    if plan.warnings:
        lines += ["", "warnings"]
        for warning in plan.warnings:
            lines += paragraph(warning, "  - ", "    ")
    return "\n".join(lines)
