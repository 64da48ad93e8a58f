"""A plan as text: tables that fit the terminal."""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from msrl_jax.fragments.support.terminal import paragraph, table

Plan: TypeAlias = Any  # those of `plan.py`, which imports this module
Crossing: TypeAlias = Any


def size(nbytes: int) -> str:
    """Returns a readable number of bytes, such as `1.5 KiB`."""
    return _with_unit(nbytes, 1024, (" B", " KiB", " MiB", " GiB"))


def count(number: int) -> str:
    """Returns a readable number, such as `1.5M`."""
    return _with_unit(number, 1000, ("", "k", "M", "G", "T"))


def _with_unit(number: int, step: int, units: Sequence[str]) -> str:
    last_unit = len(units) - 1
    power = next((k for k in range(last_unit) if number / step**k < step), last_unit)
    return f"{number / step**power:.{min(power, 1)}f}{units[power]}"


def _shorten(name: str, max_length: int = 40) -> str:
    parts = name.split("+")
    return name if len(name) <= max_length else f"{parts[0]}+...+{parts[-1]} ({len(parts)} fragments)"


_columns = functools.partial(table, indent=2)

# Groups: the root with its first step and attributes; then keys and indices, such as those of parameters; then the rest.
_PATH = re.compile(r"([^.\[\s]+(?:\.\w+|\[[^\]]*\])?(?:\.\w+)*)(\[\S*)?(.*)")


def subtree(path: str) -> str:
    """Returns the subtree that an array is reported under: `state.params` for `state.params['layer']['bias']`."""
    match = _PATH.fullmatch(path)
    return match[1] + match[3] if match else path


def group_crossings(crossings: Sequence[Crossing]) -> list[tuple[str, list[Crossing]]]:
    """Groups the arrays of a subtree with equal dtype, source, destination, times and codec; returns names and groups."""
    groups: dict[tuple[str | int, ...], list[Crossing]] = {}
    for c in crossings:
        key = (subtree(c.value), c.dtype, c.codec, c.source, c.destination, c.times)
        groups.setdefault(key, []).append(c)
    return [
        (leaves[0].value if len(leaves) == 1 else f"{subtree} ({len(leaves)} leaves)", leaves)
        for (subtree, *_), leaves in groups.items()
    ]


def _crossing_row(name: str, leaves: Sequence[Crossing]) -> list[str]:
    c = leaves[0]
    return [
        name,
        f"{c.dtype}{list(c.shape)}" if len(leaves) == 1 else c.dtype,
        c.source,
        c.destination,
        size(sum(x.nbytes for x in leaves)),
        str(c.times),
        c.codec or "-",
        size(sum(x.unpacked_bytes for x in leaves)),
    ]


def _device_range(devices: Sequence[str]) -> str:
    """Returns the names of devices, or only the first and the last if there are many."""
    return ", ".join(devices) if len(devices) <= 16 else f"{devices[0]}, ..., {devices[-1]} ({len(devices)} devices)"


def _launch_lines(plan: Plan, title: Mapping[str, str]) -> list[str]:
    counts = [f"{number:,} @ {name}" for name, number in plan.launches.items()]
    lower_bounds = [f"{seconds * 1e3:.3g} ms @ {name}" for name, seconds in plan.roofline_seconds.items()]
    predicted = f"; predicted, at least {', '.join(lower_bounds)}" if lower_bounds else ""
    in_all = dict.fromkeys([d for name in plan.launches for d in plan.placements[name]], 0)
    for name, number in plan.launches.items():
        in_all |= {d: in_all[d] + number for d in plan.placements[name]}
    if (largest := max(in_all.values())) > max(plan.launches.values()):
        device = next(d for d, number in in_all.items() if number == largest)
        predicted += f"; {device}, which placements share, launches {largest:,} in all"
    head = ("program", "fragment", "loops", "times/iteration", "kernels", "library calls", "copies", "collectives", "bytes")
    rows = [
        (
            title[p.name],
            x.fragment or "-",
            " x ".join(map(str, x.trips)) or "-",
            str(p.runs * x.times),
            str(x.kernels),
            str(x.library_calls),
            str(x.copies),
            str(x.collectives),
            size(x.nbytes),
        )
        for p in plan.programs
        for x in p.launches
    ]
    first = 1 if len(plan.programs) == 1 else 0
    table = _columns(head[first:], [row[first:] for row in rows])
    return ["", *paragraph(f"launches of each device ({', '.join(counts)} per iteration{predicted})", "", "  "), *table]


def table_of(plan: Plan) -> str:
    """Returns the tables of a plan."""
    where = "; ".join(f"{name} = {_device_range(devices)}" for name, devices in plan.placements.items())
    where += f"; idle = {_device_range(plan.idle)}" if plan.idle else ""
    how = "one program for a whole run of iterations" if plan.fused else f"{plan.dispatches} dispatches per iteration"
    stale = f", staleness {plan.staleness}" if plan.staleness else ""
    lines = [*paragraph(f"{plan.policy}: {how}{stale}", rest="  "), *paragraph(where, "  ", "    "), "", "fragments"]
    lines += _columns(
        ("name", "role", "placement", "devices", "FLOPs/call", "calls/iteration"),
        [("  " * f.depth + f.name, f.role, f.placement, str(f.devices), count(f.flops), str(f.calls)) for f in plan.fragments],
    )
    title = {p.name: _shorten(p.name) for p in plan.programs}
    lines += ["", "programs (memory on each device)"]
    lines += _columns(
        ("name", "placement", "runs/iteration", "arguments", "results", "temporary", "reused"),
        [
            (
                title[p.name],
                p.placement,
                str(p.runs),
                size(p.argument_bytes),
                size(p.output_bytes),
                size(p.temporary_bytes),
                size(p.donated_bytes),
            )
            for p in plan.programs
        ],
    )
    for p in plan.programs:
        if title[p.name] != p.name:
            lines += paragraph(f"{title[p.name]}: {', '.join(p.name.split('+'))}", "  ", "    ")
    packed = any(c.codec for c in plan.crossings)
    unpacked = f", {size(plan.unpacked_bytes_crossing)} unpacked" if packed else ""
    lines += ["", f"crossing placements ({size(plan.bytes_crossing)} per iteration{unpacked})"]
    head = ("value", "type", "from", "to", "bytes", "times/iteration", "codec", "unpacked")
    num_columns = len(head) if packed else head.index("codec")
    rows = [_crossing_row(*group)[:num_columns] for group in group_crossings(plan.crossings)]
    lines += _columns(head[:num_columns], rows) if rows else ["  nothing"]
    collectives = [(p, c) for p in plan.programs for c in p.collectives]
    unclear = [p for p in plan.programs if not p.collectives_known]
    lines += ["", "collectives inside programs"]
    lines += (
        _columns(
            ("program", "kind", "bytes", "times/iteration", "source"),
            [
                (title[p.name], c.kind, size(c.nbytes), str(p.runs * c.times), "/".join(c.source.split("/")[-2:])[-60:])
                for p, c in collectives
            ],
        )
        if collectives
        else ["  none"]
        if not unclear
        else []
    )
    lines += [f"  {title[p.name]}: unknown, see the warnings" for p in unclear]
    if plan.launches:
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
