"""Draws a plan as SVG, for a notebook or a self-contained page.

Placements are lanes. Programs are boxes in dispatch order, with their fragments and the collectives that XLA inserted; dashed
frames are loops controlled by the host. Arrows are transfers per iteration.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, TypeAlias

from msrl_jax.fragments.plan.text import count, group_crossings, size, subtree

Plan: TypeAlias = Any  # those of `plan.py`, which imports this module
ProgramPlan: TypeAlias = Any
LoopPlan: TypeAlias = Any
_LANE, _GAP, _MARGIN, _LINE = 290, 36, 20, 17  # pixels
_LETTER = 6.1  # the mean width of a letter, in pixels
_ROLES = ("actor", "env", "learner", "server", "buffer")  # each has its own color; all others share one
_STYLE = """
.msrl-plan { font: 11px system-ui, sans-serif; max-width: 100%; height: auto }
.msrl-plan .paper, .msrl-plan .box { fill: #ffffff } .msrl-plan .lane { fill: #f1f3f6 } .msrl-plan text { fill: #1b1f24 }
.msrl-plan .box { stroke: #c5cad3 } .msrl-plan .loop { fill: none; stroke: #59616d; stroke-dasharray: 5 4 }
.msrl-plan .dim { fill: #59616d } .msrl-plan .right { text-anchor: end } .msrl-plan .mid { text-anchor: middle }
.msrl-plan .strong { font-weight: 600 } .msrl-plan .title { font-size: 14px; font-weight: 600 }
.msrl-plan .arrow { stroke: #0b62c4; stroke-width: 1.4 } .msrl-plan .head { fill: #0b62c4 }
.msrl-plan .actor { fill: #2f7ed8 } .msrl-plan .env { fill: #2a9d6f } .msrl-plan .learner { fill: #d0661f }
.msrl-plan .server { fill: #8a4fc7 } .msrl-plan .buffer { fill: #b08900 } .msrl-plan .role { fill: #7b8494 }
@media (prefers-color-scheme: dark) {
  .msrl-plan .paper, .msrl-plan .box { fill: #14171b } .msrl-plan .lane { fill: #1e2329 } .msrl-plan text { fill: #e6e9ee }
  .msrl-plan .box { stroke: #444c57 } .msrl-plan .dim { fill: #a0a8b4 } .msrl-plan .loop { stroke: #a0a8b4 }
  .msrl-plan .arrow { stroke: #6cb2ff } .msrl-plan .head { fill: #6cb2ff }
}
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark }} body {{ font: 14px system-ui, sans-serif; margin: 1.5rem }}
main {{ display: flex; flex-wrap: wrap; gap: 2rem; align-items: flex-start }} figure {{ margin: 0; max-width: 100% }}
pre {{ overflow-x: auto; font-size: 12px }}
</style></head><body><h1>{title}</h1><main>
{figures}
</main></body></html>
"""


@dataclasses.dataclass(frozen=True)
class _Row:
    """A line in the box of a program: the text at its left and right end, and its indentation."""

    left: str
    right: str
    depth: int = 0
    role: str | None = None  # of a fragment


@dataclasses.dataclass(frozen=True)
class _Box:
    """A box in a lane: a program, registers, or fragments without their own program."""

    placement: str
    title: str
    right: str
    rows: tuple[_Row, ...]
    top: int
    name: str = ""  # of the program, or of the placement of registers
    kind: str = "program"

    @property
    def height(self) -> int:
        return _LINE * (len(self.rows) + 1) + 12


def plan_svg(plan: Plan) -> str:
    """Draws a plan.

    Args:
      plan: the plan of a program, `program.explain()`.

    Returns:
      An `<svg>` element. Names that are too long are truncated, with the full name in a tooltip.
    """
    lanes = {name: _MARGIN + k * (_LANE + _GAP) for k, name in enumerate(plan.placements)}
    width = max(2 * _MARGIN + len(lanes) * (_LANE + _GAP) - _GAP, 620)
    stale = f", parameters {plan.staleness} iteration{'s' * (plan.staleness > 1)} old" if plan.staleness else ""
    how = "one program for a whole run of iterations" if plan.fused else f"{plan.dispatches} dispatches per iteration"
    parts = [
        _text_element(_MARGIN, 28, plan.policy, width - 2 * _MARGIN - 300, "title"),
        _text_element(_MARGIN, 46, how + stale, width, "dim"),
    ]
    heads = {name: _placement_lines(plan, name) for name in lanes}
    top = 60
    first = top + 14 + _LINE * (1 + max(map(len, heads.values()), default=0))
    boxes = _arrange_boxes(plan, first)
    bottom = max((box.top + box.height for box in boxes), default=first) + 14
    for name, x in lanes.items():
        lane = [_rect_element(x, top, _LANE, bottom - top, "lane"), _text_element(x + 10, top + 20, name, _LANE - 20, "strong")]
        lane += [
            _text_element(x + 10, top + 20 + _LINE * (k + 1), line, _LANE - 20, "dim") for k, line in enumerate(heads[name])
        ]
        parts.append(_group_element("placement", name, lane))
    parts += _draw_loops(plan, boxes, lanes)
    parts += [part for box in boxes for part in _draw_box(box, lanes[box.placement])]
    arrows, bottom = _draw_arrows(plan, lanes, bottom, width)
    notes = [("called by the host", f"{c.name}, {c.calls} times, {size(c.result_bytes)}") for c in plan.host_calls]
    notes += [("idle", _device_range(plan.idle))] * bool(plan.idle)
    notes += [("warning", text) for text in plan.warnings]
    parts += [*_draw_legend(plan, width), *arrows]
    for k, (word, text) in enumerate(notes):
        parts.append(_text_element(_MARGIN, bottom + _LINE * (k + 1), f"{word}: {text}", width - 2 * _MARGIN, "dim"))
    bottom += _LINE * (len(notes) + 1)
    return (
        f'<svg class="msrl-plan" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom}" width="{width}" '
        f'height="{bottom}" role="img"><title>{escape(plan.policy)}: {escape(how)}</title><style>{_STYLE}</style>'
        f"{_rect_element(0, 0, width, bottom, 'paper')}{''.join(parts)}</svg>"
    )


def page_of(plans: Sequence[Plan], title: str) -> str:
    """Returns a self-contained page with plans next to each other, each followed by its text."""
    figures = [
        f"<figure>{plan_svg(plan)}<figcaption><details><summary>as text</summary><pre>{escape(str(plan))}</pre></details>"
        "</figcaption></figure>"
        for plan in plans
    ]
    return _PAGE.format(title=escape(title), figures="\n".join(figures))


def _draw_legend(plan: Plan, width: int) -> list[str]:
    """Returns the legend of roles, at the upper right."""
    parts, x = list[str](), width - _MARGIN
    for role in sorted({f.role for f in plan.fragments}, reverse=True):
        parts.append(_text_element(x, 28, role, 100, "dim right"))
        x -= int(len(role) * _LETTER) + 12
        parts.append(f'<circle class="{role if role in _ROLES else "role"}" cx="{x}" cy="24" r="4"/>')
        x -= 18
    return parts


def _placement_lines(plan: Plan, name: str) -> list[str]:
    """Returns the description of a placement."""
    traffic = {"arrive": plan.bytes_arriving[name], "in collectives": plan.bytes_of_collectives[name]}
    lines = [_device_range(plan.placements[name]), f"{size(plan.memory[name])} of memory on each"]
    if any(traffic.values()):
        lines.append(", ".join(f"{size(nbytes)} {word}" for word, nbytes in traffic.items() if nbytes))
    if name in plan.launches:
        lower_bound = plan.roofline_seconds.get(name)
        predicted = f", at least {lower_bound * 1e3:.3g} ms (predicted)" if lower_bound else ""
        lines.append(f"{plan.launches[name]:,} launches{predicted}")
    return lines


def _device_range(devices: Sequence[str]) -> str:
    return ", ".join(devices) if len(devices) <= 3 else f"{devices[0]} to {devices[-1]} ({len(devices)} devices)"


def _arrange_boxes(plan: Plan, top: int) -> list[_Box]:
    """Registers, the programs in the order in which they run, then fragments that are in several programs."""
    boxes, drawn_fragments, loop = list[_Box](), set[int](), None
    for placement in plan.placements:
        if registers := [r for r in plan.registers if r.placement == placement]:
            sizes = {
                name: sum(r.nbytes for r in registers if subtree(r.value) == name)
                for name in (subtree(r.value) for r in registers)
            }
            rows = tuple(_Row(name, size(nbytes)) for name, nbytes in sizes.items())
            last = "value" if registers[0].age == 1 else f"{registers[0].age} values"
            boxes.append(_Box(placement, f"registers: the last {last} of", "", rows, top, placement, "registers"))
            top += boxes[-1].height + 12
    for program in plan.programs:
        before, loop = loop, _loop_of(plan, program.name)
        top += _LINE * (loop is not None and loop is not before)  # for the caption of the frame
        inside = list(_fragments_inside(plan, program))
        drawn_fragments |= set(inside)
        lines = _fragment_rows(plan, inside)
        lines += [_Row(f"{c.kind} {size(c.nbytes)}", f"{program.runs * c.times:,}x") for c in program.collectives]
        title = program.name if len(program.name.split("+")) == 1 else f"{len(program.name.split('+'))} fragments"
        right = "once" if program.runs == 1 else f"{program.runs:,}x"
        boxes.append(_Box(program.placement, title, right, tuple(lines), top, program.name))
        top += boxes[-1].height + 12
    for placement in plan.placements:
        remaining = [k for k, f in enumerate(plan.fragments) if k not in drawn_fragments and f.placement == placement]
        called = [k for k in remaining if plan.fragments[k].name in {call.name for call in plan.host_calls}]
        for title, indices in (
            ("called by the host", called),
            ("in several programs", [k for k in remaining if k not in called]),
        ):
            if indices:
                boxes.append(_Box(placement, title, "", tuple(_fragment_rows(plan, indices)), top))
                top += boxes[-1].height + 12
    return boxes


def _fragments_inside(plan: Plan, program: ProgramPlan) -> Iterable[int]:
    """Yields the indices of the fragments of a program, including nested ones."""
    names, depth = set(program.name.split("+")), None
    for k, fragment in enumerate(plan.fragments):
        if depth is not None and fragment.depth > depth:
            yield k
            continue
        is_own = fragment.name in names and fragment.placement == program.placement
        depth = fragment.depth if is_own else None
        if is_own:
            yield k


def _fragment_rows(plan: Plan, places: Sequence[int]) -> list[_Row]:
    fragments = [plan.fragments[k] for k in places]
    min_depth = min((f.depth for f in fragments), default=0)
    costs = [f"{f.calls:,}x" + f" {count(f.flops)} FLOPs" * bool(f.flops) for f in fragments]
    return [_Row(f.name, cost, f.depth - min_depth, f.role) for f, cost in zip(fragments, costs, strict=True)]


def _loop_of(plan: Plan, program: str) -> LoopPlan | None:
    """Returns the host-controlled loop that contains a program, if any."""
    names = set(program.split("+"))
    return next((loop for loop in plan.loops if names <= set(loop.fragments)), None)


def _draw_box(box: _Box, x: int) -> list[str]:
    left, width = x + 12, _LANE - 24
    parts = [_rect_element(left, box.top, width, box.height, "box")]
    parts.append(_text_element(left + 10, box.top + _LINE, box.title, width - 70, "strong", full_text=box.name))
    if box.right:
        parts.append(_text_element(left + width - 10, box.top + _LINE, box.right, 60, "dim right"))
    for k, row in enumerate(box.rows):
        y = box.top + _LINE * (k + 2)
        indent = left + 10 + 12 * row.depth
        line = [_text_element(left + width - 10, y, row.right, width / 2, "dim right")]
        space = left + width - 20 - len(row.right) * _LETTER - indent - 10
        if row.role is None:
            parts += [*line, _text_element(indent, y, row.left, space, "dim")]
        else:
            kind, tip = row.role if row.role in _ROLES else "role", escape(row.role)
            mark = f'<circle class="{kind}" cx="{indent + 3}" cy="{y - 4}" r="4"><title>{tip}</title></circle>'
            parts.append(
                _group_element("fragment", row.left, [mark, *line, _text_element(indent + 12, y, row.left, space - 12)])
            )
    return [_group_element(box.kind, box.name, parts)] if box.name else parts


def _draw_loops(plan: Plan, boxes: Sequence[_Box], lanes: dict[str, int]) -> list[str]:
    """Returns a dashed frame around the programs of each loop controlled by the host."""
    parts = []
    for loop in plan.loops:
        if loop_boxes := [box for box in boxes if box.name and box.kind == "program" and _loop_of(plan, box.name) is loop]:
            left, right = (
                min(lanes[box.placement] for box in loop_boxes) + 5,
                max(lanes[box.placement] for box in loop_boxes) + _LANE - 5,
            )
            top, bottom = min(box.top for box in loop_boxes) - _LINE, max(box.top + box.height for box in loop_boxes) + 5
            frame = [_rect_element(left, top, right - left, bottom - top, "loop")]
            frame.append(
                _text_element(left + 8, top + 12, f"a loop that the host drives, {loop.length:,} times", right - left, "dim")
            )
            parts.append(_group_element("loop", "+".join(loop.fragments), frame))
    return parts


def _draw_arrows(plan: Plan, lanes: dict[str, int], top: int, width: int) -> tuple[list[str], int]:
    """Arrows between lanes, and the vertical position of their end."""
    what = f"crossing placements: {size(plan.bytes_crossing)} per iteration" if plan.crossings else "nothing crosses placements"
    parts, y = [_text_element(_MARGIN, top + 18, what, width - 2 * _MARGIN, "strong")], top + 26
    for name, leaves in group_crossings(plan.crossings):
        c, middle = leaves[0], _LANE // 2
        start, end = lanes[c.source] + middle, lanes[c.destination] + middle
        y, step = y + 30, 7 if start < end else -7
        packed = f", {c.codec} of {size(sum(x.unpacked_bytes for x in leaves))}" if c.codec else ""
        label = f"{name}  {size(sum(x.nbytes for x in leaves))}{packed}, {c.times:,}x"
        arrow = [
            f'<line class="arrow" x1="{start}" y1="{y}" x2="{end - step}" y2="{y}"/>',
            f'<path class="head" d="M{end} {y}l{-step} -4v8z"/>',
            _text_element(
                (start + end) // 2, y - 6, label, abs(end - start) + 2 * middle - 20, "mid", full_text=f"{label}; {c.dtype}"
            ),
        ]
        parts.append(_group_element("crossing", name, arrow, source=c.source, destination=c.destination))
    return parts, y + 12


def _rect_element(x: float, y: float, width: float, height: float, kind: str) -> str:
    corner = 0 if kind == "paper" else 6
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="{corner}"/>'


def _text_element(x: float, y: float, text: str, space: float, kind: str = "", full_text: str = "") -> str:
    """Returns a line of text, truncated in the middle if it is too wide; the tooltip has the full text."""
    max_letters = max(int(space / (_LETTER * (1.3 if kind == "title" else 1))), 4)
    visible = (
        text
        if len(text) <= max_letters
        else f"{text[: max_letters // 2]}…{text[len(text) - (max_letters - max_letters // 2 - 1) :]}"
    )
    full_text = full_text or text
    tip = f"<title>{escape(full_text)}</title>" if full_text != visible else ""
    return f'<text x="{x}" y="{y}"{f" class={chr(34)}{kind}{chr(34)}" if kind else ""}>{escape(visible)}{tip}</text>'


def _group_element(kind: str, name: str, parts: Iterable[str], **attributes: str) -> str:
    """Returns an SVG group for an item of the plan, with its name."""
    data = "".join(f' data-{key}="{escape(value)}"' for key, value in {kind: name, **attributes}.items())
    return f"<g{data}>{''.join(parts)}</g>"
