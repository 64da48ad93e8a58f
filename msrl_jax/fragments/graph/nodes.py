"""The fragmented dataflow graph: nodes with one placement each, unmarked glue between them, and opened loops."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from jax.sharding import PartitionSpec

from msrl_jax._compat import Atom, JaxprEqn, ShapedArray, Var, sub_jaxprs
from msrl_jax.fragments.codecs import Codec
from msrl_jax.fragments.graph.marker import is_fragment, is_host_call
from msrl_jax.fragments.placement import Edge, Placement


@dataclass(eq=False)
class Node:
    """One vertex of the graph."""

    eqn: JaxprEqn  # the equation it evaluates, over the variables of its region
    placement: Placement | None  # where it runs; None for opened loops, and for glue, which is placed later
    fragments: tuple[str, ...] = ()  # names of the fragments in it, including nested ones, in order of appearance
    roles: frozenset[str] = frozenset()  # their roles; for unmarked code in an opened fragment, that fragment's role
    loop: "Region | None" = None  # the body, if this is a scan whose fragments span placements; the host runs such a loop

    @property
    def is_glue(self) -> bool:
        """Whether this is unmarked code between fragments."""
        return self.placement is None and self.loop is None

    @property
    def has_effects(self) -> bool:
        """Whether it has side effects, such as a host call. It then runs exactly once, in order."""
        return bool(self.eqn.effects)

    @property
    def is_host_call(self) -> bool:
        """Whether this is a host call, which is not part of any program."""
        return is_host_call(self.eqn)

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
        """The names of its outermost fragments, joined."""
        return "+".join(dict.fromkeys(_outermost_fragments(self.eqn, set())))

    def __str__(self) -> str:
        name = self.title or self.eqn.primitive.name
        if self.loop is not None:
            return f"loop x{self.loop.length} ({name})"
        return f"{name} @ {self.placement.name}" if self.placement else f"glue {name}"


@dataclass(eq=False)
class Region:
    """A sequence of nodes that runs `length` times: the training iteration itself, or the body of an opened loop."""

    consts: list[Var]  # variables with the same value in every repetition
    carry: list[Var]  # variables with the values of `next_carry` of the previous repetition
    xs: list[Var]  # variables with one row of a stacked array per repetition
    nodes: list[Node]
    next_carry: list[Atom]  # the carry of the next repetition, one value per variable of `carry`
    results: list[Atom]  # the rows that a repetition adds to the stacked results; for the iteration itself, the metrics
    length: int = 1  # number of repetitions
    reverse: bool = False  # whether the rows of `xs` and `results` are visited in reverse

    @property
    def inputs(self) -> list[Var]:
        """The variables defined outside, in the order of a scan's operands."""
        return [*self.consts, *self.carry, *self.xs]

    @property
    def producers(self) -> dict[Var, Node]:
        """The node that makes each variable."""
        return {v: node for node in self.nodes for v in node.eqn.outvars}


@dataclass(frozen=True, eq=False)
class Packed:
    """A value that a codec packs into one or more arrays for sending."""

    label: str
    aval: ShapedArray  # its shape and dtype, unpacked
    codec: str
    edge: Edge  # the layout's entry that declares the codec


@dataclass(frozen=True, eq=False)
class Check:
    """Stops a run if a codec cannot hold a value."""

    label: str
    codec: Codec  # the codec that packs it
    edge: str  # names of the sending and the receiving placement, for the message

    def raise_if_lost(self, ok: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
        """Raises ValueError if a value was lost, given the scalars `[N]` of each iteration: held, minimum, maximum."""
        if not ok.all():
            lost = ~ok
            raise ValueError(
                f"codec {self.codec.name!r} cannot hold {self.label} on its way {self.edge}: its values are in "
                f"[{low[lost].min():g}, {high[lost].max():g}], and the codec promises {self.codec.promise}. "
                "Pack it with another codec, or pack only other values by name: {'state.obs': 'uint8'} instead of 'uint8'"
            )


CheckScalars: TypeAlias = tuple[Var, Var, Var]
"""Three scalars: whether a codec holds a value, the value's smallest element, and its largest."""


@dataclass(eq=False)
class Graph:
    """The fragmented dataflow graph of a training iteration."""

    region: Region  # the iteration. Its carry is the training state, followed by the registers of delayed leaves.
    constants: dict[Var, object]  # the values of `region.consts`, which the traced function captured
    labels: dict[Var, str]  # readable names of variables, also in loops; the pytree path if there is one
    axes: list[PartitionSpec]  # logical axes of the carry
    delayed: list[int] = field(default_factory=list)  # positions in the carry of the leaves that have registers
    registers: dict[Var, list[Placement]] = field(default_factory=dict)  # the placements that keep the registers
    # checks of values that a codec might not hold, each with the three scalars that it reads
    checks: list[tuple[Check, CheckScalars]] = field(default_factory=list)
    packed: dict[Var, Packed] = field(default_factory=dict)  # the variables that contain packed values

    @property
    def placements(self) -> set[Placement]:
        """The placements that the fragments use."""
        return {p for node in self.region.nodes for p in node.placements}

    @property
    def host_calls(self) -> list[str]:
        """The names of the host functions."""

        def names(region: Region) -> Iterator[str]:
            for node in region.nodes:
                if node.is_host_call:
                    yield node.title
                if node.loop is not None:
                    yield from names(node.loop)

        return list(dict.fromkeys(names(self.region)))


def upstream(producers: Mapping[Var, Node], atoms: Iterable[Atom], follow: Callable[[Var, Node], bool]) -> list[Node]:
    """Returns the nodes that lead to some atoms, in dependency order; `follow` says from which results to continue."""
    nodes: list[Node] = []
    visited: set[Node] = set()
    stack: list[Atom | Node] = list(atoms)
    while stack:
        top = stack.pop()
        if isinstance(top, Node):
            nodes.append(top)
        elif isinstance(top, Var) and top in producers and producers[top] not in visited and follow(top, producers[top]):
            visited.add(producers[top])
            stack += [producers[top], *producers[top].eqn.invars]
    return nodes


def _outermost_fragments(eqn: JaxprEqn, visited: set[int]) -> Iterator[str]:
    """Yields the names of the fragments in an equation that are in no other fragment; visits no jaxpr twice."""
    if is_fragment(eqn):
        yield eqn.params["name"]
        return
    for sub in sub_jaxprs(eqn):
        if id(sub) not in visited:
            visited.add(id(sub))
            for inner in sub.eqns:
                yield from _outermost_fragments(inner, visited)
