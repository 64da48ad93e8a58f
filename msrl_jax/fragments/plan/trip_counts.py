"""How often a loop of a compiled program runs: as XLA says, or as its counter says if that goes from 0 to a bound by 1."""

import re
from collections.abc import Mapping, Sequence

_KNOWN = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"(\d+)"')
_DEFINITION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+)\((.*)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_COPIES = ("copy", "copy-start", "copy-done", "bitcast")


def trip_count(loop: str, around: Sequence[str], condition: Sequence[str], body: Sequence[str]) -> int | None:
    """Finds how often a loop runs.

    Args:
      loop: the line of the `while`.
      around: the lines of the computation that holds it.
      condition: the lines of its condition.
      body: the lines of its body.

    Returns:
      The number; None if it is not known.
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
