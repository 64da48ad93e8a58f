"""Counts the launches of a program on an accelerator: kernels, library calls, copies and collectives, and their bytes.

At small batch sizes, the time on a GPU is determined by the number of launches: each takes a microsecond or more, however
small. Every instruction of the compiled program is one launch, except those that only name values; a loop launches its body in
every repetition. The traffic of an instruction is the bytes that it reads and writes: for a sliced array only the slice, for an
updated array only the update.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from msrl_jax.fragments.plan.hlo import COLLECTIVES, HloInstruction, Module, fragment_finder, nbytes_of

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
    "H200": (4.8e12, 495e12, 1e-6),
    "H100": (3.35e12, 495e12, 1e-6),
    "A100": (2.04e12, 156e12, 1e-6),
    "TPU v6 lite": (1.64e12, 918e12, 0.0),
    "TPU v5 lite": (0.82e12, 197e12, 0.0),
    "TPU v5": (2.77e12, 459e12, 0.0),
}


@dataclass(frozen=True)
class Launches:
    """The launches of a program for a fragment in a loop, per repetition of the loop.

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


def launches(module: Module, fragments: Collection[str] = ()) -> tuple[Launches, ...]:
    """Finds what a program launches.

    Args:
      module: the program.
      fragments: the names of the fragments that it may hold.

    Returns:
      What is launched in every loop for every fragment, in the order of the program.
    """
    fragment_of = fragment_finder(fragments)
    counts: dict[tuple[str, tuple[int, ...], str], list[int]] = {}

    def visit(name: str, trips: tuple[int, ...], loop: str) -> None:
        for instruction in module.instructions(name):
            if instruction.loop:
                (condition, body), trip_count = instruction.loop, module.trip_count(instruction, name)
                if trip_count is None:  # the device decides after every turn whether there is another one
                    visit(condition, (*trips, 1), body)
                visit(body, (*trips, 1 if trip_count is None else trip_count), body)
            elif instruction.kind in ("call", "async-start"):
                for inner in instruction.called:
                    visit(inner, trips, loop)
            elif instruction.kind == "conditional":
                _visit_largest(instruction.called, trips, loop)
            elif instruction.kind not in _NOTHING and not _NO_CALLS.search(instruction.arguments):
                entry = counts.setdefault((fragment_of(instruction) or "", trips, loop), [0] * (len(_COLUMNS) + 1))
                entry[_COLUMNS.index(_column(instruction.kind))] += 1
                entry[-1] += _traffic(module, name, instruction)

    def _visit_largest(branches: Sequence[str], trips: tuple[int, ...], loop: str) -> None:
        nonlocal counts
        before, outcomes = counts, []
        for branch in branches:
            counts = {key: list(numbers) for key, numbers in before.items()}
            visit(branch, trips, loop)
            outcomes.append(counts)
        counts = max(outcomes, key=lambda o: sum(sum(n[:-1]) for n in o.values()), default=before)

    visit(module.entry, (), "")
    return tuple(Launches(fragment, trips, *numbers) for (fragment, trips, _), numbers in counts.items())


def per_iteration(program_launches: Iterable[Launches]) -> tuple[Launches, ...]:
    """Returns the launches of one repetition of the outermost loops, without the surrounding code."""
    return tuple(replace(x, trips=x.trips[1:]) for x in program_launches if x.trips)


def roofline_seconds(device_kind: str, device_launches: Iterable[tuple[Launches, int]], flops: float) -> float | None:
    """Returns a lower bound on a device's time per iteration; None if the device is unknown.

    Args:
      device_kind: JAX's name of the device.
      device_launches: its launches, with their repetitions.
      flops: its floating-point operations.
    """
    speeds = next((speeds for kind, speeds in _SPEEDS.items() if kind in device_kind), None)
    if speeds is None:
        return None
    (bandwidth, peak, launch), device_launches = speeds, list(device_launches)
    moved, count = (sum(getattr(x, name) * times for x, times in device_launches) for name in ("nbytes", "count"))
    return max(moved / bandwidth, flops / peak, count * launch)


_COLUMNS = ("kernels", "library_calls", "copies", "collectives")


def _column(kind: str) -> str:
    if kind.removesuffix("-start") in COLLECTIVES:
        return "collectives"
    return {"custom-call": "library_calls", "copy": "copies", "copy-start": "copies"}.get(kind, "kernels")


def _traffic(module: Module, computation: str, instruction: HloInstruction) -> int:
    """Returns the bytes that an instruction of a computation reads and writes."""
    if instruction.kind != "fusion":
        return _traffic_of_one(instruction, module.computations[computation])
    body_name = instruction.called[0]
    body = module.computations.get(body_name, {})
    read_bytes = sum(_bytes_read(name, body) for name, inner in body.items() if inner.kind == "parameter")
    return read_bytes + _bytes_written(module.root(body_name), body)


def _traffic_of_one(instruction: HloInstruction, body: Mapping[str, HloInstruction]) -> int:
    sizes = [nbytes_of(body[name].shape) for name in instruction.operands if name in body]
    if instruction.kind in _SLICES:
        return 2 * nbytes_of(instruction.shape)
    if instruction.kind == "dynamic-update-slice":
        return 2 * sizes[1]
    return nbytes_of(instruction.shape) + sum(sizes)


def _bytes_read(name: str, body: Mapping[str, HloInstruction]) -> int:
    """Returns the bytes of a parameter that a fusion reads: slices, where it takes nothing else of it."""
    total = 0
    for user, place in _find_uses(name, body):
        if user.kind in _SLICES and place == 0:
            total += nbytes_of(user.shape)
        elif user.kind != "dynamic-update-slice" or place != 0:
            return nbytes_of(body[name].shape)
    return min(total, nbytes_of(body[name].shape))


def _find_uses(name: str, body: Mapping[str, HloInstruction]) -> Iterator[tuple[HloInstruction, int]]:
    for other, user in body.items():
        for place, operand in enumerate(user.operands):
            if operand == name and user.kind == "bitcast":
                yield from _find_uses(other, body)
            elif operand == name:
                yield user, place


def _bytes_written(name: str, body: Mapping[str, HloInstruction]) -> int:
    """Returns the bytes that a fusion writes: an update, where its result is an array that it updates in place."""
    instruction = body.get(name)
    if instruction is None:
        return 0
    if instruction.kind == "tuple":
        return sum(_bytes_written(operand, body) for operand in instruction.operands)
    if instruction.kind == "bitcast" and instruction.operands:
        return _bytes_written(instruction.operands[0], body)
    if instruction.kind == "dynamic-update-slice":
        return nbytes_of(body[instruction.operands[1]].shape) if instruction.operands[1] in body else 0
    return nbytes_of(instruction.shape)
