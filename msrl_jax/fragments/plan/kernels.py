"""What a program launches on an accelerator, from XLA's text: kernels, library calls, copies, collectives, and their traffic.

At small batch sizes, the time on a GPU is determined by the number of launches: each takes a microsecond or more, however
small. Every instruction of the compiled program is one launch, except those that only name values; a loop launches its body in
every repetition. The traffic of an instruction is the bytes that it reads and writes: for a sliced array only the slice, for an
updated array only the update.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from msrl_jax.fragments.plan.cost import COLLECTIVES, DEFINITION, WHILE, called, computations, nbytes_of, operands_of
from msrl_jax.fragments.plan.cost import trip_count as trips_of
from msrl_jax.fragments.plan.operation_owners import innermost

# These instructions name values, or wait for what another one has launched.
_NOTHING = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "opt-barrier"),
        *("optimization-barrier", "domain", "partition-id", "replica-id", "async-update", "async-done", "copy-done"),
        *("fusion-done", "send-done", "recv-done", *(f"{kind}-done" for kind in COLLECTIVES)),
    )
)
_NO_CALLS = re.compile(r'custom_call_target="(?:AllocateBuffer|PinnedBuffer|Sharding|annotate_device_placement|MoveTo\w+)"')
_SLICES = ("dynamic-slice", "slice", "gather")


# Bytes and operations per second (of matrix units, in the format used for float32), and the minimum seconds per launch, from
# the vendors' data sheets, by a part of the device's name, longer ones first.
_SPEEDS = {
    "H200": (4.8e12, 495e12, 1e-6), "H100": (3.35e12, 495e12, 1e-6), "A100": (2.04e12, 156e12, 1e-6),
    "TPU v6 lite": (1.64e12, 918e12, 0.0), "TPU v5 lite": (0.82e12, 197e12, 0.0), "TPU v5": (2.77e12, 459e12, 0.0),
}  # fmt: skip


@dataclass(frozen=True)
class Launches:
    """What a program launches for a fragment in a loop, per repetition of the loop.

    Attributes:
      fragment: the innermost fragment; empty outside fragments.
      trips: repetitions of the surrounding loops, outermost first; `()` outside loops. A loop of unknown length counts once.
      kernels: generated code: fusions and separate instructions.
      library_calls: calls of libraries, such as cuBLAS, cuDNN and CUB, and of the host.
      copies: copies of arrays.
      collectives: exchanges between devices.
      nbytes: bytes that they read and write on each device.
    """

    fragment: str
    trips: tuple[int, ...]
    kernels: int
    library_calls: int
    copies: int
    collectives: int
    nbytes: int

    @property
    def count(self) -> int:
        """The number of launches per repetition."""
        return self.kernels + self.library_calls + self.copies + self.collectives

    @property
    def times(self) -> int:
        """The number of repetitions per run of the program."""
        times = 1
        for trips in self.trips:
            times *= trips
        return times


class _Instruction(NamedTuple):
    kind: str
    shape: str
    operands: list[str]
    line: str


def launches(text: str, fragments: Collection[str] = ()) -> tuple[Launches, ...]:
    """Finds what a program launches in its optimized HLO (`compiled.as_text()`).

    Args:
      text: the program.
      fragments: the names of the fragments that it may contain.

    Returns:
      The launches in every loop for every fragment, in the order of the text.
    """
    entry, bodies = computations(text)
    fragment_of = innermost(fragments)
    parsed: dict[str, dict[str, _Instruction]] = {}
    found: dict[tuple[str, tuple[int, ...], str], list[int]] = {}

    def instructions(name: str) -> dict[str, _Instruction]:
        if name not in parsed:
            matches = [(line, match) for line in bodies.get(name, ()) if (match := DEFINITION.match(line))]
            parsed[name] = {m[2]: _Instruction(_started(m[4]), m[3], operands_of(m[5]), line) for line, m in matches}
        return parsed[name]

    def visit(name: str, trips: tuple[int, ...], loop: str) -> None:
        made = instructions(name)
        for instruction in made.values():
            kind, line = instruction.kind, instruction.line
            if kind == "while" and (match := WHILE.search(line)):
                known = trips_of(line, bodies[name], bodies.get(match[1], ()), bodies.get(match[2], ()))
                if known is None:  # the device decides after every repetition whether to continue
                    visit(match[1], (*trips, 1), match[2])
                visit(match[2], (*trips, 1 if known is None else known), match[2])
            elif kind in ("call", "async-start"):
                for inner in called(line):
                    visit(inner, trips, loop)
            elif kind == "conditional":
                _visit_largest(called(line), trips, loop)
            elif kind not in _NOTHING and not _NO_CALLS.search(line):
                entry = found.setdefault((fragment_of(line) or "", trips, loop), [0] * (len(_COLUMNS) + 1))
                entry[_COLUMNS.index(_column(kind))] += 1
                entry[-1] += _moved(instruction, made, instructions)

    def _visit_largest(branches: Sequence[str], trips: tuple[int, ...], loop: str) -> None:
        nonlocal found
        before, outcomes = found, []
        for branch in branches:
            found = {key: list(numbers) for key, numbers in before.items()}
            visit(branch, trips, loop)
            outcomes.append(found)
        found = max(outcomes, key=lambda o: sum(sum(n[:-1]) for n in o.values()), default=before)

    visit(entry, (), "")
    return tuple(Launches(fragment, trips, *numbers) for (fragment, trips, _), numbers in found.items())


def one_turn(found: Iterable[Launches]) -> tuple[Launches, ...]:
    """The launches of one repetition of the outermost loops, without the surrounding code."""
    return tuple(replace(x, trips=x.trips[1:]) for x in found if x.trips)


def least_seconds(device_kind: str, found: Iterable[tuple[Launches, int]], flops: float) -> float | None:
    """A lower bound on a device's time per iteration; None if the device is unknown.

    Args:
      device_kind: JAX's name of the device.
      found: its launches, with their repetitions.
      flops: its floating-point operations.
    """
    speeds = next((speeds for kind, speeds in _SPEEDS.items() if kind in device_kind), None)
    if speeds is None:
        return None
    (bandwidth, peak, launch), found = speeds, list(found)
    moved, count = (sum(getattr(x, name) * times for x, times in found) for name in ("nbytes", "count"))
    return max(moved / bandwidth, flops / peak, count * launch)


_COLUMNS = ("kernels", "library_calls", "copies", "collectives")


def _started(kind: str) -> str:
    """The kind of an instruction; an asynchronous fusion counts as a fusion."""
    return "fusion" if kind == "fusion-start" else kind


def _column(kind: str) -> str:
    if kind.removesuffix("-start") in COLLECTIVES:
        return "collectives"
    return {"custom-call": "library_calls", "copy": "copies", "copy-start": "copies"}.get(kind, "kernels")


def _moved(instruction: _Instruction, made: Mapping[str, _Instruction], instructions: Any) -> int:
    """The bytes that an instruction reads and writes."""
    if instruction.kind != "fusion":
        return _of_one(instruction, made)
    body = instructions(called(instruction.line)[0])
    read = sum(_read(name, body) for name, inner in body.items() if inner.kind == "parameter")
    root = next((name for name, inner in body.items() if inner.line.lstrip().startswith("ROOT ")), "")
    return read + _written(root, body)


def _of_one(instruction: _Instruction, made: Mapping[str, _Instruction]) -> int:
    sizes = [nbytes_of(made[name].shape) for name in instruction.operands if name in made]
    if instruction.kind in _SLICES:
        return 2 * nbytes_of(instruction.shape)
    if instruction.kind == "dynamic-update-slice":
        return 2 * sizes[1]
    return nbytes_of(instruction.shape) + sum(sizes)


def _read(name: str, body: Mapping[str, _Instruction]) -> int:
    """The bytes of a parameter that a fusion reads: only slices, if it uses nothing else of it."""
    total = 0
    for user, place in _uses(name, body):
        if user.kind in _SLICES and place == 0:
            total += nbytes_of(user.shape)
        elif user.kind != "dynamic-update-slice" or place != 0:
            return nbytes_of(body[name].shape)
    return min(total, nbytes_of(body[name].shape))


def _uses(name: str, body: Mapping[str, _Instruction]) -> Iterator[tuple[_Instruction, int]]:
    for other, user in body.items():
        for place, operand in enumerate(user.operands):
            if operand == name and user.kind == "bitcast":
                yield from _uses(other, body)
            elif operand == name:
                yield user, place


def _written(name: str, body: Mapping[str, _Instruction]) -> int:
    """The bytes that a fusion writes: only the update, if its result is an array that it updates in place."""
    made = body.get(name)
    if made is None:
        return 0
    if made.kind == "tuple":
        return sum(_written(operand, body) for operand in made.operands)
    if made.kind == "bitcast" and made.operands:
        return _written(made.operands[0], body)
    if made.kind == "dynamic-update-slice":
        return nbytes_of(body[made.operands[1]].shape) if made.operands[1] in body else 0
    return nbytes_of(made.shape)
