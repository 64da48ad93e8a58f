"""Parses the text of a compiled program: its computations, its collectives, and the fragment of each operation.

No other module reads this text. XLA counts the body of a loop once, so what is found is multiplied by the lengths of loops.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax

COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
_MODULE = re.compile(r"^HloModule ([\w.\-]+)", re.MULTILINE)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")  # root, name, shape, kind, rest
_OPERAND = re.compile(r"%([\w.\-]+)")
_WHILE = re.compile(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_CALL = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"(\d+)"')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_MENTION = re.compile(rf"(?<![\w\-])(?:{'|'.join(COLLECTIVES)})(?:-start)?\(")
_SHAPE = re.compile(r"(pred|[a-z]+\d+\w*)\[([\d,<=]*)\]")
_BRACKETS = re.compile(r"[()\[\]{},]")
_QUOTED = re.compile(r'"[^"]*"')
_COPIES = ("copy", "copy-start", "copy-done", "bitcast")


class HloInstruction(NamedTuple):
    """An instruction of a computation."""

    name: str
    kind: str  # such as "fusion", also for one that runs in parallel to others
    shape: str  # as XLA writes it
    arguments: str  # operands and attributes: the text behind the opening parenthesis
    is_root: bool  # whether its value is that of the computation
    line: str

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        return _OPERAND.findall(self.arguments.split(")", 1)[0])

    @property
    def loop(self) -> tuple[str, str] | None:
        """The names of the condition and of the body of a loop; None if it is none."""
        match = _WHILE.search(self.arguments) if self.kind == "while" else None
        return (match[1], match[2]) if match else None

    @property
    def called(self) -> list[str]:
        """The names of the computations that it calls once, or one of which it calls."""
        branches = _BRANCHES.search(self.arguments)
        return [b.strip().lstrip("%") for b in branches[1].split(",")] if branches else _CALL.findall(self.arguments)

    @property
    def source(self) -> str | None:
        """JAX's name for the operation that caused it, such as `jit(iteration)/learn/while/body/jvp(gradients)/dot_general`."""
        match = _OP_NAME.search(self.arguments)
        return match[1] if match else None


class Module:
    """A compiled program.

    Attributes:
      text: what XLA prints of it.
      name: its name.
      entry: the name of the computation that it begins with.
      computations: the instructions of each computation, by name.
    """

    def __init__(self, text: str):
        match = _MODULE.search(text)
        self.text, self.name, self.entry = text, match[1] if match else "", ""
        self.computations: dict[str, dict[str, HloInstruction]] = {}
        current: dict[str, HloInstruction] = {}
        for line in text.splitlines():
            if match := _COMPUTATION.match(line):
                current = self.computations.setdefault(match[2], {})
                self.entry = match[2] if match[1] else self.entry
            elif match := _INSTRUCTION.match(line):
                root, name, shape, kind, arguments = match.groups()
                kind = "fusion" if kind == "fusion-start" else kind
                current[name] = HloInstruction(name, kind, shape, arguments, bool(root), line)

    def instructions(self, computation: str) -> list[HloInstruction]:
        """Returns the instructions of a computation; none if the text has no such computation."""
        return list(self.computations.get(computation, {}).values())

    def root(self, computation: str) -> str:
        """Returns the name of the value of a computation."""
        return next((x.name for x in self.instructions(computation) if x.is_root), "")

    def trip_count(self, loop: HloInstruction, enclosing: str) -> int | None:
        """How often a loop in a computation runs: as XLA says, or as its counter says if that goes from 0 to a bound by 1; None
        if it is unknown."""
        if match := _TRIPS.search(loop.arguments):
            return int(match[1])
        condition, body = loop.loop or ("", "")
        counts = re.fullmatch(r"entry (\d+) < (\d+)", self._evaluate(condition, self.root(condition)))
        if not counts:
            return None
        number = int(counts[1])
        from_zero = self._evaluate(enclosing, loop.operands[0], number) == "0"
        by_one = self._evaluate(body, self.root(body), number) == f"entry {number} + 1"
        return int(counts[2]) if from_zero and by_one else None

    def _evaluate(self, computation: str, name: str, number: int | None = None) -> str:
        """Returns a value, or an entry of a tuple, in terms of the parameter's entries: `entry 1 + 1`; another text if it has
        none.
        """
        instruction = self.computations.get(computation, {}).get(name)
        if instruction is None:
            return ""
        kind, operands = instruction.kind, instruction.operands
        if kind in _COPIES:
            return self._evaluate(computation, operands[0], number)
        if kind == "tuple" and number is not None:
            return self._evaluate(computation, operands[number]) if number < len(operands) else ""
        if kind == "constant":
            return instruction.arguments.split(")", 1)[0]
        if kind == "get-tuple-element" and self._evaluate(computation, operands[0]) == "parameter":
            return f"entry {instruction.arguments.rpartition('index=')[2].partition(',')[0]}"
        if kind == "add" or (kind == "compare" and "direction=LT" in instruction.arguments):
            return {"add": " + ", "compare": " < "}[kind].join(self._evaluate(computation, x) for x in operands)
        return kind


def module_of(compiled: jax.stages.Compiled) -> Module:
    """Reads a compiled program."""
    return Module(compiled.as_text() or "")


def nbytes_of(shape: str) -> int:
    """Returns the bytes of a shape in XLA's syntax, such as `f32[8,2]{1,0}`, or of all shapes of a tuple."""
    return sum(math.prod(map(int, re.findall(r"\d+", dims))) * _element_bytes(dtype) for dtype, dims in _SHAPE.findall(shape))


def _element_bytes(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1  # pred


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program."""

    kind: str  # such as "all-reduce"
    nbytes: int  # bytes of its result on each device
    times: int  # executions per run. A loop of unknown length counts once; a conditional counts all branches
    source: str  # JAX's name for the operation that caused it


class CollectiveReport(NamedTuple):
    """The collectives of a program."""

    collectives: list[Collective]
    lengths_known: bool  # whether all loops around them have a known length
    understood: bool  # whether the list is complete; if not, parts of the text could not be parsed


def collectives(module: Module) -> CollectiveReport:
    """Finds the collectives of a compiled program."""
    lengths_known, parsed_lines = True, set[str]()

    def visit(name: str, times: int, sure: bool) -> Iterator[Collective]:
        nonlocal lengths_known
        for instruction in module.instructions(name):
            kind = instruction.kind.removesuffix("-start")
            if kind in COLLECTIVES:
                lengths_known &= sure
                parsed_lines.add(instruction.line)
                shape = _result_shape(instruction.shape) if kind not in (instruction.kind, "all-reduce") else instruction.shape
                yield Collective(kind, nbytes_of(shape), times, instruction.source or "")
            if instruction.loop:
                trips = module.trip_count(instruction, name)
                length, sure_inside = 1 if trips is None else trips, sure and trips is not None
                condition, body = instruction.loop
                yield from visit(condition, times * (1 if trips is None else length + 1), sure_inside)
                yield from visit(body, times * length, sure_inside)
            elif instruction.kind not in ("async-update", "async-done"):  # they repeat the computation that async-start calls
                for inner in instruction.called:
                    yield from visit(inner, times, sure)

    results = list(visit(module.entry, 1, True))
    mentioned = {line for line in module.text.splitlines() if _MENTION.search(_QUOTED.sub("", line))}
    return CollectiveReport(results, lengths_known, bool(module.instructions(module.entry)) and mentioned <= parsed_lines)


def _result_shape(shape: str) -> str:
    """Returns the result's shape in an asynchronous start, which is a tuple of operands, results and possibly contexts."""
    if not shape.startswith("("):
        return shape
    depth, commas = 0, []
    for bracket in _BRACKETS.finditer(shape):
        if bracket[0] == ",":
            commas += [bracket.start()] if depth == 1 else []
        else:
            depth += 1 if bracket[0] in "([{" else -1
    return shape[commas[0] : commas[1] if len(commas) > 1 else None]


class Operation(NamedTuple):
    """An operation of a program."""

    kind: str  # such as "fusion"
    fragment: str | None  # the innermost one; "" outside fragments, None if unknown
    holder: str = ""  # the operation that contains it, such as a loop; empty if there is none


def operations(module: Module, fragments: Collection[str]) -> dict[str, Operation]:
    """Returns the operations of a program by their names.

    One without a name of JAX is of the fragment of what it fuses, else of the loop that it is in.

    Args:
      module: the program.
      fragments: the names of the fragments that it may hold.
    """
    find = fragment_finder(fragments)
    by_name: dict[str, Operation] = {}
    users: dict[str, str] = {}  # the operation that each computation is a part of
    inside: dict[str, str] = {}  # the computation that each operation is in
    for computation, instructions in module.computations.items():
        for name, instruction in instructions.items():
            inside[name] = computation
            users |= dict.fromkeys(instruction.loop or instruction.called, name)
            by_name[name] = Operation(instruction.kind, _fragment_of(module, find, instruction))
    for name, (kind, fragment, _) in by_name.items():
        enclosing = name
        while fragment is None and (user := users.get(inside[enclosing])) is not None:
            enclosing, fragment = user, by_name[user].fragment
        by_name[name] = Operation(kind, fragment, users.get(inside[name], ""))
    return by_name


def _fragment_of(module: Module, find: Callable[[HloInstruction], str | None], instruction: HloInstruction) -> str | None:
    """Returns the fragment of an instruction: as its own name says, or for a fusion, the last of its parts that has one."""
    if (direct := find(instruction)) is not None or instruction.kind != "fusion":
        return direct
    parts = (find(inner) for part in instruction.called for inner in module.instructions(part))
    return next((fragment for fragment in reversed([*parts]) if fragment is not None), None)


def fragment_finder(fragments: Collection[str]) -> Callable[[HloInstruction], str | None]:
    """Finds the innermost of these fragments that an instruction is of; "" if it is of none, None if its text does not tell."""
    names_in_text: Mapping[str, str] = {_as_written(name): name for name in fragments}
    names = "|".join(re.escape(name) for name in sorted(names_in_text, key=len, reverse=True))
    fragment = re.compile(rf"(?<!\w)(?:{names})(?!\w)") if names else None

    def find(instruction: HloInstruction) -> str | None:
        matches = fragment.findall(instruction.source or "") if fragment else []
        return None if instruction.source is None else names_in_text[matches[-1]] if matches else ""

    return find


def _as_written(name: str) -> str:
    """Returns a name in XLA's quoting: non-ASCII bytes in octal."""
    quoted = name.replace("\\", "\\\\").replace('"', '\\"')
    return "".join(c if c.isascii() else "".join(f"\\{byte:03o}" for byte in c.encode()) for c in quoted)
