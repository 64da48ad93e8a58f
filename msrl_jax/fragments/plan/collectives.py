"""Finds the collectives of a compiled program in its text."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(_KINDS)})(-start)?\(")
_MENTION = re.compile(rf"(?<![\w\-])(?:{'|'.join(_KINDS)})(?:-start)?\(")
_WHILE = re.compile(r" while\(.*?condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_CALL = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_SHAPE = re.compile(r"(pred|[a-z]+\d+\w*)\[([\d,<=]*)\]")
_BRACKETS = re.compile(r"[()\[\]{},]")
_QUOTED = re.compile(r'"[^"]*"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program.

    Attributes:
      kind: such as "all-reduce".
      nbytes: bytes of its result on each device.
      times: executions per run of the program. A loop of unknown length counts once; a conditional counts all branches.
      source: JAX's name for the operation that caused it.
    """

    kind: str
    nbytes: int
    times: int
    source: str


class Found(NamedTuple):
    """The collectives of a program."""

    collectives: list[Collective]
    lengths_known: bool  # whether every loop around them has a known length
    understood: bool  # whether the list is complete; if not, part of the text was not understood


def collectives(text: str) -> Found:
    """Finds the collectives of a compiled program in its optimized HLO (`compiled.as_text()`)."""
    bodies: dict[str, list[str]] = {}
    entry, current = "", ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = match[2]
            bodies[current] = []
            entry = current if match[1] else entry
        elif current:
            bodies[current].append(line)
    known, read = True, set[str]()

    def visit(name: str, times: int, sure: bool) -> Iterator[Collective]:
        nonlocal known
        for line in bodies.get(name, ()):
            if match := _COLLECTIVE.search(line):
                op = _OP_NAME.search(line)
                known &= sure
                read.add(line)
                shape = _result(match[1]) if match[3] and match[2] != "all-reduce" else match[1]
                yield Collective(match[2], _nbytes(shape), times, op[1] if op else "")
            if match := _WHILE.search(line):
                trips = trip_count(line, bodies[name], bodies.get(match[1], ()), bodies.get(match[2], ()))
                length, sure_inside = 1 if trips is None else trips, sure and trips is not None
                yield from visit(match[1], times * (1 if trips is None else length + 1), sure_inside)
                yield from visit(match[2], times * length, sure_inside)
                continue
            if " async-update(" in line or " async-done(" in line:
                continue  # repeats the computation that async-start calls
            branches = _BRANCHES.search(line)
            inner = [b.strip().lstrip("%") for b in branches[1].split(",")] if branches else _CALL.findall(line)
            for called in inner:
                yield from visit(called, times, sure)

    found = list(visit(entry, 1, True))
    mentioned = {line for line in text.splitlines() if _MENTION.search(_QUOTED.sub("", line))}
    return Found(found, known, bool(bodies.get(entry)) and mentioned <= read)


def _result(shape: str) -> str:
    """The result's shape within that of an asynchronous start, a tuple of operands, results and possibly contexts."""
    if not shape.startswith("("):
        return shape
    depth, commas = 0, []
    for bracket in _BRACKETS.finditer(shape):
        if bracket[0] == ",":
            commas += [bracket.start()] if depth == 1 else []
        else:
            depth += 1 if bracket[0] in "([{" else -1
    return shape[commas[0] : commas[1] if len(commas) > 1 else None]


def _nbytes(shape: str) -> int:
    return sum(math.prod(map(int, re.findall(r"\d+", dims))) * _width(dtype) for dtype, dims in _SHAPE.findall(shape))


def _width(dtype: str) -> int:
    if dtype == "pred":
        return 1
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 0


_KNOWN = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"(\d+)"')
_DEFINITION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+)\((.*)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_COPIES = ("copy", "copy-start", "copy-done", "bitcast")


def trip_count(loop: str, around: Sequence[str], condition: Sequence[str], body: Sequence[str]) -> int | None:
    """How often a loop runs: as XLA says, or as its counter says if that goes from 0 to a bound by 1; None if unknown.

    `loop` is the line of the `while`, the others are the lines of the computation around it, of its condition and of its body.
    """
    if known := _KNOWN.search(loop):
        return int(known[1])
    compared = _Computation(condition)
    kind, rest = compared.root
    operands = _operands(rest)
    if kind != "compare" or "direction=LT" not in rest or len(operands) != 2:
        return None
    number, bound = compared.element(operands[0]), compared.constant(operands[1])
    if number is None or bound is None:
        return None
    entering, leaving = _Computation(around), _Computation(body)
    start = _entry(entering, loop, number)
    kind, rest = leaving.follow(_entry(leaving, leaving.root_line, number))
    steps = _operands(rest)
    counts = kind == "add" and len(steps) == 2 and leaving.element(steps[0]) == number and leaving.constant(steps[1]) == 1
    return bound if counts and entering.constant(start) == 0 else None


def _operands(rest: str) -> list[str]:
    return _OPERAND.findall(rest.split(")", 1)[0])


def _entry(computation: "_Computation", line: str, number: int) -> str:
    """The entry of the tuple that an instruction takes (a `while`) or is (a root); empty if there is no such tuple."""
    match = _DEFINITION.match(line)
    kind, rest = (match[3], match[4]) if match else ("", "")
    if kind == "while":
        kind, rest = computation.follow(_operands(rest)[0])
    entries = _operands(rest) if kind == "tuple" else []
    return entries[number] if number < len(entries) else ""


class _Computation:
    """The instructions of a computation by name, each a kind and the text of its operands and attributes."""

    def __init__(self, lines: Sequence[str]):
        found = [(match, line) for line in lines if (match := _DEFINITION.match(line))]
        self._made: Mapping[str, tuple[str, str]] = {match[2]: (match[3], match[4]) for match, _ in found}
        self.root_line = next((line for match, line in found if match[1]), "")
        self.root = next(((match[3], match[4]) for match, _ in found if match[1]), ("", ""))

    def follow(self, name: str) -> tuple[str, str]:
        """What makes a value, behind its copies."""
        kind, rest = self._made.get(name, ("", ""))
        return self.follow(_operands(rest)[0]) if kind in _COPIES else (kind, rest)

    def constant(self, name: str) -> int | None:
        kind, rest = self.follow(name)
        match = re.match(r"(-?\d+)\)", rest) if kind == "constant" else None
        return int(match[1]) if match else None

    def element(self, name: str) -> int | None:
        """The number of the parameter's entry that a value is."""
        kind, rest = self.follow(name)
        match = re.search(r"index=(\d+)", rest) if kind == "get-tuple-element" else None
        from_parameter = match is not None and self.follow(_operands(rest)[0])[0] == "parameter"
        return int(match[1]) if match and from_parameter else None
