"""The fragmented dataflow graph: nodes with a placement each, unmarked glue between them, and opened loops."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from jax.sharding import PartitionSpec

from msrl_jax._compat import Atom, JaxprEqn, Var, sub_jaxprs
from msrl_jax.fragments.instructions import Check, Packed
from msrl_jax.fragments.marker import is_fragment
from msrl_jax.fragments.placement import Placement


@dataclass(eq=False)
class Node:
    """One vertex of the graph.

    Attributes:
      eqn: the equation it evaluates, over the variables of its region.
      placement: where it runs; None for glue, whose place follows from its neighbors, and for an opened loop.
      fragments: names of the fragments in it, in order of appearance, nested ones included.
      roles: their roles; of unmarked code in an opened fragment, the role of that fragment.
      loop: the body, if this is a scan whose fragments span placements; the host drives such a loop.
    """

    eqn: JaxprEqn
    placement: Placement | None
    fragments: tuple[str, ...] = ()
    roles: frozenset[str] = frozenset()
    loop: "Region | None" = None

    @property
    def is_glue(self) -> bool:
        """Whether this is unmarked code between fragments."""
        return self.placement is None and self.loop is None

    @property
    def has_effects(self) -> bool:
        """Whether it does more than compute its results, such as call the host: it then runs exactly once, in order."""
        return bool(self.eqn.effects)

    @property
    def kinds(self) -> set[str]:
        """The roles without their suffixes."""
        return {role.partition(":")[0] for role in self.roles}

    @property
    def placements(self) -> set[Placement]:
        """Where it runs: several placements if it is an opened loop."""
        if self.loop is not None:
            return {p for node in self.loop.nodes for p in node.placements}
        return {self.placement} if self.placement else set()

    @property
    def title(self) -> str:
        """The fragments in it that no other fragment holds."""
        return "+".join(fragments_in(self.eqn, nested=False)[0])

    def __str__(self) -> str:
        what = self.title or self.eqn.primitive.name
        if self.loop is not None:
            return f"loop x{self.loop.length} ({what})"
        return f"{what} @ {self.placement.name}" if self.placement else f"glue {what}"


@dataclass(eq=False)
class Region:
    """A straight line of nodes that runs `length` times: the training iteration itself, or the body of an opened loop.

    Attributes:
      consts: variables that hold the same value every time.
      carry: variables that hold what the previous time left in `next_carry`.
      xs: variables that hold one row of a stacked array each time.
      nodes: the nodes, in program order.
      next_carry: what each time leaves to the next, one for each variable of `carry`.
      results: what each time adds to the stacked results; the metrics, for the iteration itself.
      length: how many times.
      reverse: whether the rows of `xs` and `results` are visited from the last to the first.
    """

    consts: list[Var]
    carry: list[Var]
    xs: list[Var]
    nodes: list[Node]
    next_carry: list[Atom]
    results: list[Atom]
    length: int = 1
    reverse: bool = False

    @property
    def inputs(self) -> list[Var]:
        """The variables that the surroundings define, in the order of a scan's operands."""
        return [*self.consts, *self.carry, *self.xs]

    @property
    def producers(self) -> dict[Var, Node]:
        """The node that makes each variable."""
        return {v: node for node in self.nodes for v in node.eqn.outvars}

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __str__(self) -> str:
        def lines(region: Region, indent: str) -> Iterator[str]:
            for node in region.nodes:
                yield f"{indent}{node}"
                if node.loop is not None:
                    yield from lines(node.loop, indent + "  ")

        return "\n".join(lines(self, ""))


Measured: TypeAlias = tuple[Var, Var, Var]
"""Whether a codec holds a value, the value's least element and its greatest: scalars."""


@dataclass(eq=False)
class Graph:
    """The fragmented dataflow graph of a training iteration.

    Attributes:
      region: the iteration. Its carry is the training state, followed by the registers of delayed leaves.
      constants: values of those `region.consts` that the traced function had captured.
      labels: readable names of variables, in loops too: pytree paths where there is one.
      axes: logical axes of the carry.
      delayed: positions in the carry of the leaves that have registers.
      registers: where the registers are kept.
      checks: the checks of values that codecs may not hold, each with the three scalars that it reads.
      packed: the variables that carry packed values.
    """

    region: Region
    constants: dict[Var, object]
    labels: dict[Var, str]
    axes: list[PartitionSpec]
    delayed: list[int] = field(default_factory=list)
    registers: dict[Var, list[Placement]] = field(default_factory=dict)
    checks: list[tuple[Check, Measured]] = field(default_factory=list)
    packed: dict[Var, Packed] = field(default_factory=dict)

    @property
    def placements(self) -> set[Placement]:
        """The placements that the fragments use."""
        return {p for node in self.region.nodes for p in node.placements}

    def __iter__(self) -> Iterator[Node]:
        return iter(self.region)

    def __str__(self) -> str:
        return str(self.region)


def fragments_in(eqn: JaxprEqn, nested: bool = True) -> tuple[tuple[str, ...], frozenset[str]]:
    """The fragments in an equation.

    Args:
      eqn: the equation.
      nested: whether to count fragments that other fragments hold.

    Returns:
      Their names, in order of appearance, and their roles.
    """
    names: dict[str, None] = {}
    roles: set[str] = set()

    def visit(e: JaxprEqn) -> None:
        if is_fragment(e):
            names[e.params["name"]] = None
            roles.add(e.params["role"])
            if not nested:
                return
        for sub in sub_jaxprs(e):
            for inner in sub.eqns:
                visit(inner)

    visit(eqn)
    return tuple(names), frozenset(roles)
