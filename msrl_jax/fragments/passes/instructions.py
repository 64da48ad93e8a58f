"""The instruction list: plain data that people can read, tests can check and the runtime executes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from msrl_jax._compat import ClosedJaxpr, ShapedArray
from msrl_jax.fragments.graph.host_calls import HostFunction
from msrl_jax.fragments.graph.nodes import Check, Packed
from msrl_jax.fragments.placement import Placement


@dataclass(frozen=True, eq=False)
class Value:
    """An array at one placement."""

    index: int  # its number, unique in a program
    aval: ShapedArray
    placement: Placement  # where it is located
    label: str  # a readable name: the path of a state leaf, or the fragment that makes it
    packed: Packed | None = None  # the packed value that the array belongs to, if a codec made it

    @property
    def nbytes(self) -> int:
        """The bytes of one copy of the array."""
        return self.aval.size * self.aval.dtype.itemsize

    def __str__(self) -> str:
        return f"%{self.index}:{self.aval.str_short()}@{self.placement.name}"


@dataclass(frozen=True, eq=False)
class RunProgram:
    """Runs one XLA program."""

    name: str  # the joined names of its fragments
    placement: Placement  # where it runs
    jaxpr: ClosedJaxpr  # maps `inputs` to `outputs`, followed by the rows that `writes` stores
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    rows: tuple[int, ...] = ()  # positions of stacked inputs; the program reads their row `index`
    # pairs of a buffer and the updated buffer; the program writes its last results to row `index` of these
    writes: tuple[tuple[Value, Value], ...] = ()
    index: Value | None = None  # number of the current row, if the program is part of a loop and needs it
    donated: tuple[int, ...] = ()  # positions of inputs that are not read later, so that results may reuse their memory
    fragments: tuple[str, ...] = ()  # names of the fragments in it
    roles: frozenset[str] = frozenset()

    def reads(self) -> list[Value]:
        """Returns all values that it reads."""
        return [*self.inputs, *(b for b, _ in self.writes)]

    def makes(self) -> list[Value]:
        """Returns all values that it makes."""
        return [*self.outputs, *(b for _, b in self.writes)]

    def __str__(self) -> str:
        args = [
            ("donate " if i in self.donated else "") + str(v) + ("[i]" if i in self.rows else "")
            for i, v in enumerate(self.inputs)
        ]
        outs = [*map(str, self.outputs), *(f"{b}[i]" for _, b in self.writes)]
        return f"run  {self.name} @ {self.placement.name} ({', '.join(args)}) -> {', '.join(outs)}"


@dataclass(frozen=True, eq=False)
class HostCall:
    """Calls a Python function with NumPy arrays."""

    name: str
    placement: Placement  # the CPU device of its arguments and results
    function: HostFunction
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    def reads(self) -> list[Value]:
        """Returns all values that it reads."""
        return list(dict.fromkeys(self.inputs))

    def makes(self) -> list[Value]:
        """Returns all values that it makes."""
        return list(self.outputs)

    def __str__(self) -> str:
        return f"call {self.name}({', '.join(map(str, self.inputs))}) -> {', '.join(map(str, self.outputs))}"


@dataclass(frozen=True, eq=False)
class Move:
    """Transfers values together to another placement, or copies them if the placement is the same."""

    sources: tuple[Value, ...]
    results: tuple[Value, ...]  # the same values at the other placement

    def reads(self) -> list[Value]:
        """Returns all values that it reads."""
        return list(self.sources)

    def makes(self) -> list[Value]:
        """Returns all values that it makes."""
        return list(self.results)

    @property
    def is_copy(self) -> bool:
        """Whether the values stay at their placement."""
        return self.sources[0].placement.mesh == self.results[0].placement.mesh

    @property
    def shares_devices(self) -> bool:
        """Whether the placements share a device; a transfer could then share the source's memory."""
        return not set(self.sources[0].placement.devices).isdisjoint(self.results[0].placement.devices)

    @property
    def processes(self) -> set[int]:
        """The processes that own a device of a placement."""
        return {d.process_index for v in (self.sources[0], self.results[0]) for d in v.placement.devices}

    def __str__(self) -> str:
        pairs = ", ".join(f"{s} -> {r}" for s, r in zip(self.sources, self.results, strict=True))
        return f"{'copy' if self.is_copy else 'move'} {pairs}"


@dataclass(frozen=True, eq=False)
class Alloc:
    """Allocates the buffers that a loop writes its stacked results to."""

    results: tuple[Value, ...]

    def reads(self) -> list[Value]:
        """Returns all values that it reads."""
        return []

    def makes(self) -> list[Value]:
        """Returns all values that it makes."""
        return list(self.results)

    def __str__(self) -> str:
        return f"alloc {', '.join(map(str, self.results))}"


@dataclass(frozen=True, eq=False)
class Free:
    """Frees values that are no longer read."""

    values: tuple[Value, ...]

    def reads(self) -> list[Value]:
        """Returns all values that it reads."""
        return []

    def makes(self) -> list[Value]:
        """Returns all values that it makes."""
        return []

    def __str__(self) -> str:
        return f"free {', '.join(f'%{v.index}' for v in self.values)}"


@dataclass(frozen=True, eq=False)
class LoopCarry:
    """A value that a loop carries."""

    init: Value  # its value before the loop
    body_in: Value  # its value at the start of the body
    body_out: Value  # its value at the end of the body
    result: Value  # its value after the loop


@dataclass(frozen=True, eq=False)
class Loop:
    """Runs its body `length` times, controlled by the host."""

    length: int  # number of repetitions
    reverse: bool  # whether rows are visited in reverse
    carry: tuple[LoopCarry, ...]  # values that change between repetitions, including buffers of stacked results
    consts: tuple[Value, ...]  # outer values that the body reads, including stacked inputs
    indices: tuple[Value, ...]  # the row number at each placement that needs it
    body: tuple["Instruction", ...]

    def reads(self) -> list[Value]:
        """Returns all outer values that it reads."""
        return [*(c.init for c in self.carry), *self.consts]

    def makes(self) -> list[Value]:
        """Returns all values that it makes for outer instructions."""
        return [c.result for c in self.carry]

    def __str__(self) -> str:
        carried = ", ".join(f"{c.body_in} = {c.init} | {c.body_out}" for c in self.carry)
        body = "\n".join("    " + line for i in self.body for line in str(i).splitlines())
        return f"loop x{self.length}{' reversed' if self.reverse else ''} ({carried})\n{body}"


Instruction: TypeAlias = RunProgram | HostCall | Move | Alloc | Free | Loop


@dataclass(frozen=True, eq=False)
class Schedule:
    """The instructions of one training iteration."""

    inputs: tuple[tuple[Value, ...], ...]  # the copies of each state leaf, the canonical one first; registers follow the leaves
    body: tuple[Instruction, ...]
    outputs: tuple[tuple[Value, ...], ...]  # the next state, in the same form as `inputs`
    metrics: tuple[Value, ...]  # the metrics' leaves
    # checks of packed values, each with three scalars: whether the codec held the value, its smallest element and its
    # largest element
    checks: tuple[tuple[Check, tuple[Value, Value, Value]], ...] = ()
    # the program's constant arrays: literals, and arrays that the traced function captured
    constants: dict[Value, object] = field(default_factory=dict)

    @property
    def free_index(self) -> int:
        """The first number that no value has, for values that a pass adds."""
        results = [v for i, _ in walk(self.body) for v in i.makes()]
        loops = [i for i, _ in walk(self.body) if isinstance(i, Loop)]
        loop_values = [v for loop in loops for v in (*loop.indices, *(v for c in loop.carry for v in (c.body_in, c.body_out)))]
        all_values = [*results, *loop_values, *self.constants, *(v for copies in self.inputs for v in copies)]
        return 1 + max((v.index for v in all_values), default=-1)

    def __str__(self) -> str:
        return "\n".join(str(i) for i in self.body)


def walk(instructions: Iterable[Instruction], times: int = 1) -> Iterator[tuple[Instruction, int]]:
    """Yields all instructions in program order, including those in loops, with their number of executions per iteration."""
    for i in instructions:
        yield i, times
        if isinstance(i, Loop):
            yield from walk(i.body, times * i.length)
