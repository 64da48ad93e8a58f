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
    found: dict[tuple[str, tuple[int, ...], str], list[int]] = {}

    def visit(name: str, trips: tuple[int, ...], loop: str) -> None:
        for made in module.instructions(name):
            if made.loop:
                (condition, body), known = made.loop, module.trip_count(made, name)
                if known is None:  # the device decides after every turn whether there is another one
                    visit(condition, (*trips, 1), body)
                visit(body, (*trips, 1 if known is None else known), body)
            elif made.kind in ("call", "async-start"):
                for inner in made.called:
                    visit(inner, trips, loop)
            elif made.kind == "conditional":
                _visit_largest(made.called, trips, loop)
            elif made.kind not in _NOTHING and not _NO_CALLS.search(made.rest):
                entry = found.setdefault((fragment_of(made) or "", trips, loop), [0] * (len(_COLUMNS) + 1))
                entry[_COLUMNS.index(_column(made.kind))] += 1
                entry[-1] += _moved(module, name, made)

    def _visit_largest(branches: Sequence[str], trips: tuple[int, ...], loop: str) -> None:
        nonlocal found
        before, outcomes = found, []
        for branch in branches:
            found = {key: list(numbers) for key, numbers in before.items()}
            visit(branch, trips, loop)
            outcomes.append(found)
        found = max(outcomes, key=lambda o: sum(sum(n[:-1]) for n in o.values()), default=before)

    visit(module.entry, (), "")
    return tuple(Launches(fragment, trips, *numbers) for (fragment, trips, _), numbers in found.items())


def per_iteration(found: Iterable[Launches]) -> tuple[Launches, ...]:
    """Returns the launches of one repetition of the outermost loops, without the surrounding code."""
    return tuple(replace(x, trips=x.trips[1:]) for x in found if x.trips)


def roofline_seconds(device_kind: str, found: Iterable[tuple[Launches, int]], flops: float) -> float | None:
    """Returns a lower bound on a device's time per iteration; None if the device is unknown.

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


def _column(kind: str) -> str:
    if kind.removesuffix("-start") in COLLECTIVES:
        return "collectives"
    return {"custom-call": "library_calls", "copy": "copies", "copy-start": "copies"}.get(kind, "kernels")


def _moved(module: Module, computation: str, made: HloInstruction) -> int:
    """Returns the bytes that an instruction of a computation reads and writes."""
    if made.kind != "fusion":
        return _of_one(made, module.computations[computation])
    inside = made.called[0]
    body = module.computations.get(inside, {})
    read = sum(_read(name, body) for name, inner in body.items() if inner.kind == "parameter")
    return read + _written(module.root(inside), body)


def _of_one(instruction: HloInstruction, made: Mapping[str, HloInstruction]) -> int:
    sizes = [nbytes_of(made[name].shape) for name in instruction.operands if name in made]
    if instruction.kind in _SLICES:
        return 2 * nbytes_of(instruction.shape)
    if instruction.kind == "dynamic-update-slice":
        return 2 * sizes[1]
    return nbytes_of(instruction.shape) + sum(sizes)


def _read(name: str, body: Mapping[str, HloInstruction]) -> int:
    """Returns the bytes of a parameter that a fusion reads: slices, where it takes nothing else of it."""
    total = 0
    for user, place in _uses(name, body):
        if user.kind in _SLICES and place == 0:
            total += nbytes_of(user.shape)
        elif user.kind != "dynamic-update-slice" or place != 0:
            return nbytes_of(body[name].shape)
    return min(total, nbytes_of(body[name].shape))


def _uses(name: str, body: Mapping[str, HloInstruction]) -> Iterator[tuple[HloInstruction, int]]:
    for other, user in body.items():
        for place, operand in enumerate(user.operands):
            if operand == name and user.kind == "bitcast":
                yield from _uses(other, body)
            elif operand == name:
                yield user, place


def _written(name: str, body: Mapping[str, HloInstruction]) -> int:
    """Returns the bytes that a fusion writes: an update, where its result is an array that it updates in place."""
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
