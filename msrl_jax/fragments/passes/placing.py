"""Placing: where glue and carried values are, once fragments have their placements.

A value that does not depend on a placed fragment (a counter, a schedule, a split key) is *free*: every placement that needs it
computes it locally. Other glue runs where its inputs are made. A node with effects (a callback, a print) runs at one placement,
even if no program reads its results.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias

from msrl_jax._compat import Atom, Literal, Var
from msrl_jax.fragments.graph.nodes import Node, Region
from msrl_jax.fragments.passes.grouping import ProgramNodes
from msrl_jax.fragments.placement import Placement, one_per_mesh


@dataclass(eq=False)
class Partition:
    """A region with all placement decisions."""

    region: Region
    groups: list[ProgramNodes]  # the programs and opened loops, in an order that respects all dependencies
    # for each variable, the placements that have it without a transfer, the canonical one first. (The code around a loop
    # determines where its constants and xs are; stacked results are where they are read.)
    available_at: dict[Var, list[Placement]]
    needed_at: dict[Var, list[Placement]]  # for each constant, carried variable and x, the placements that use it
    # for each carried variable, the placements that keep a copy of it between repetitions
    carry_placements: list[list[Placement]]
    loops: dict[Node, "Partition"]  # the partitions of opened loops

    @property
    def inputs_at(self) -> list[list[Placement]]:
        """The placements that use each input of the region."""
        carry_placements = dict(zip(self.region.carry, self.carry_placements, strict=True))
        return [carry_placements[v] if v in carry_placements else self.needed_at[v] for v in self.region.inputs]

    def program_placements(self) -> Iterator[Placement]:
        """Yields the placements of the programs in order, also of those in opened loops."""
        for group in self.groups:
            if group.placement is not None:
                yield group.placement
            else:
                yield from self.loops[group.nodes[0]].program_placements()

    def result_placements(self, i: int) -> list[Placement]:
        """Returns the placements that can have the loop's i-th result without an additional transfer, the canonical one first.

        A result can be stacked where its rows are made, and where its rows are sent anyway.
        """
        if i < len(self.carry_placements):
            return self.carry_placements[i]
        out, placements = self.region.results[i - len(self.carry_placements)], list[Placement | None]()
        if isinstance(out, Var):
            readers = (g.placement for g in self.groups for n in g.nodes if out in n.eqn.invars)
            placements = [*self.available_at.get(out, ()), *self.needed_at.get(out, ()), *readers]
        return list(dict.fromkeys(p for p in placements if p is not None)) or [next(self.program_placements())]


_Reader: TypeAlias = Node | Var | Sequence[Placement]
"""A reader of a variable: a node, a carried variable whose next value it is, or code in a loop at some placements."""


@dataclass(frozen=True, eq=False)
class Places:
    """The placements of the nodes and the carried variables of a region. Each step of `place` adds some."""

    nodes: dict[Node, list[Placement]]  # only free glue has several
    home: dict[Var, list[Placement]]  # the placements that keep a carried variable between repetitions
    loops: Mapping[Node, Partition]  # the opened loops of the region, which are placed already
    readers: Mapping[Var, Sequence[_Reader]]  # what reads each variable

    def needed_at(self, variables: Iterable[Var]) -> list[Placement]:
        """Returns the placements that read some variables."""
        placements: dict[Placement, None] = {}
        for reader in (r for v in variables for r in self.readers.get(v, ())):
            if isinstance(reader, Node):
                reader = self.nodes.get(reader, ())
            elif isinstance(reader, Var):
                reader = self.home.get(reader, ())
            placements.update(dict.fromkeys(reader))
        return list(placements)

    def made_at(self, node: Node, i: int) -> list[Placement]:
        """Returns the placements that have a node's i-th result; none if the node is not placed yet."""
        return self.loops[node].result_placements(i) if node in self.loops else self.nodes.get(node, [])


def place(
    region: Region, registers: Mapping[Var, list[Placement]], loops: Mapping[Node, Partition], default: Placement
) -> Places:
    """Places the nodes and the carried variables of a region.

    Args:
      region: the region.
      registers: the carried variables whose homes are given.
      loops: the opened loops of the region, which are placed already.
      default: the placement of what nothing else places.
    """
    # 1. Fragments are where the policy puts them, and glue that depends on them is where its inputs are made.
    fragments = {n: [n.placement] for n in region.nodes if n.placement is not None}
    places = Places(fragments, dict(registers), loops, _readers(region, loops))
    free = _find_free(region, registers)
    _place_dependents(places, region, free)
    # 2. A node with effects runs once, where it is read first.
    for node in region.nodes:
        if node.is_glue and node.has_effects and node not in places.nodes:
            places.nodes[node] = [_first_reader(places, region, node) or default]
            _place_dependents(places, region, free)
    # 3. Free glue is wherever it is needed. Readers come first, so that only carried values take more than one round.
    free_glue = [n for n in reversed(region.nodes) if n.is_glue and n not in places.nodes]
    free_carry = [v for v in region.carry if v in free]
    _place_where_needed(places, free_glue, free_carry)
    # 4. Values that no placed node needs are at the default placement, with their inputs.
    for var in region.carry:
        places.home.setdefault(var, [default])
    results = {a for a in [*region.next_carry, *region.results] if isinstance(a, Var)}
    _place_remaining(places, free_glue, free_carry, results, default)
    places.home.update({v: one_per_mesh(placements) for v, placements in places.home.items()})
    return places


def _place_dependents(places: Places, region: Region, free: Set[Atom]) -> None:
    """Glue that depends on a placed node runs where its inputs are made.

    Among several placements, it uses the one that waits for the others anyway; elsewhere, it would delay the next program.
    """
    producers, depth = region.producers, _depth(region)

    def located(atom: Atom) -> list[Placement]:
        if isinstance(atom, Literal) or atom in free:
            return []
        node = producers.get(atom)
        return places.home.get(atom, []) if node is None else places.made_at(node, node.eqn.outvars.index(atom))

    changed = True
    while changed:
        changed = False
        for node in region.nodes:
            if not node.is_glue or node in places.nodes:
                continue
            sources = [a for a in node.eqn.invars if located(a)]
            if sources:
                deepest = max(sources, key=lambda a: depth.get(a, 0))
                places.nodes[node] = located(deepest)[:1]
                changed = True
        for var, out in zip(region.carry, region.next_carry, strict=True):
            if var not in places.home and var not in free and (placements := located(out)):
                places.home[var] = placements
                changed = True


def _place_where_needed(places: Places, free_glue: Sequence[Node], free_carry: Sequence[Var]) -> None:
    """Free glue and free carry go wherever they are needed. This ends, because sets of placements only grow."""
    places.nodes.update({node: [] for node in free_glue})
    while True:
        before = [places.nodes[n] for n in free_glue], dict(places.home)
        for node in free_glue:
            places.nodes[node] = places.needed_at(node.eqn.outvars)
        places.home.update({v: placements for v in free_carry if (placements := places.needed_at([v]))})
        if before == ([places.nodes[n] for n in free_glue], places.home):
            return


def _place_remaining(
    places: Places, free_glue: Sequence[Node], free_carry: Sequence[Var], results: Set[Var], default: Placement
) -> None:
    """Glue that only a counter or a metric needs runs at the default placement, and what it reads is there, too."""
    grew = True
    while grew:
        grew = False
        for node in free_glue:
            placements = list(dict.fromkeys([*places.nodes[node], *places.needed_at(node.eqn.outvars)]))
            if not placements and any(v in results for v in node.eqn.outvars):
                placements = [default]
            if placements != places.nodes[node]:
                places.nodes[node], grew = placements, True
        for var in free_carry:
            placements = list(dict.fromkeys([*places.home[var], *places.needed_at([var])]))
            if placements != places.home[var]:
                places.home[var], grew = placements, True


def _first_reader(places: Places, region: Region, node: Node) -> Placement | None:
    """Returns the placement of the first placed node that reads a node's results, directly or through glue, if any."""
    variables = set(node.eqn.outvars)
    for reader in region.nodes:
        if variables.isdisjoint(a for a in reader.eqn.invars if isinstance(a, Var)):
            continue
        if reader in places.nodes:
            return places.nodes[reader][0]
        variables.update(reader.eqn.outvars)
    return None


def _find_free(region: Region, registers: Mapping[Var, list[Placement]]) -> set[Var]:
    """Variables that depend on no placed fragment and no effect, in any repetition (a greatest fixed point)."""
    carried = set(region.carry) - set(registers)
    while True:  # terminates, because `carried` shrinks every time
        free: set[Var] = {*region.consts, *region.xs, *carried}
        for node in region.nodes:
            pure = node.is_glue and not node.has_effects
            if pure and all(isinstance(a, Literal) or a in free for a in node.eqn.invars):
                free.update(node.eqn.outvars)
        pairs = zip(region.carry, region.next_carry, strict=True)
        stays = {v for v, out in pairs if v in carried and (isinstance(out, Literal) or out in free)}
        if stays == carried:
            return free
        carried = stays


def _depth(region: Region) -> dict[Atom, int]:
    """For each variable, the length of the longest chain of placed nodes that leads to it."""
    depth: dict[Atom, int] = {}
    for node in region.nodes:
        before = max((depth.get(a, 0) for a in node.eqn.invars if isinstance(a, Var)), default=0)
        depth.update(dict.fromkeys(node.eqn.outvars, before + (not node.is_glue)))
    return depth


def _readers(region: Region, loops: Mapping[Node, Partition]) -> dict[Var, list[_Reader]]:
    """Returns the readers of each variable, in program order."""
    readers: dict[Var, list[_Reader]] = {}

    def add_reader(atom: Atom, reader: _Reader) -> None:
        if isinstance(atom, Var):
            readers.setdefault(atom, []).append(reader)

    for node in region.nodes:
        if node in loops:
            for atom, placements in zip(node.eqn.invars, loops[node].inputs_at, strict=True):
                add_reader(atom, placements)
        else:
            for atom in node.eqn.invars:
                add_reader(atom, node)
    for atom, var in zip(region.next_carry, region.carry, strict=True):
        add_reader(atom, var)
    return readers
