"""Partitioning: places glue and carried values, and groups nodes into programs.

Two rules avoid unnecessary waiting between placements:

- A value that does not depend on a placed fragment (a counter, a schedule, a split key) is *free*: every placement that needs
  it computes it locally. Other glue runs where its inputs are made.
- A node joins an earlier program of its placement only if the program then does not wait for anything new. If only one program
  reads some glue, and it is a later program of the same placement, the glue joins it.

A third rule preserves effects as under `jax.jit`: a node with effects (a callback, a print) runs at one placement even if no
program reads its results, and programs with effects keep their order.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from msrl_jax._compat import Atom, Literal, Var
from msrl_jax.fragments.graph.nodes import Graph, Node, Region
from msrl_jax.fragments.placement import Placement


@dataclass(eq=False)
class ProgramNodes:
    """Nodes that become one program at one placement, or one opened loop."""

    placement: Placement | None
    nodes: list[Node]
    waits_for: set["ProgramNodes"] = field(default_factory=set)

    @property
    def is_host_call(self) -> bool:
        """Whether this is a host call."""
        return self.nodes[0].is_host_call


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


def partition(graph: Graph, default: Placement) -> Partition:
    """Decides where everything runs; values that no fragment uses are at the placement `default`."""
    return _partition(graph.region, graph.registers, default)


def _partition(region: Region, registers: Mapping[Var, list[Placement]], default: Placement) -> Partition:
    """The partition of a region; `registers` has the carried variables whose homes are given."""
    loops = {n: _partition(n.loop, {}, default) for n in region.nodes if n.loop is not None}
    free = _replicable(region, registers)
    places, carry_placements = _place(region, registers, loops, free, default)
    carry_placements = [list({p.mesh: p for p in reversed(at)}.values())[::-1] for at in carry_placements]
    groups = _merge_into_single_reader(_group(region, places))
    available_at: dict[Var, list[Placement]] = dict(zip(region.carry, carry_placements, strict=True))
    for node in region.nodes:
        for i, var in enumerate(node.eqn.outvars):
            available_at[var] = _result_placements(loops[node], i) if node in loops else places[node]
    readers, home = _readers(region, loops), dict(zip(region.carry, carry_placements, strict=True))
    needed = {v: _needed_at([v], readers, places, home) for v in region.inputs}
    for out in region.results:
        if isinstance(out, Var) and (out in region.consts or out in region.xs) and out not in readers:
            needed[out] = [default]
    return Partition(region, groups, available_at, needed, carry_placements, loops)


def _result_placements(loop: Partition, i: int) -> list[Placement]:
    """The placements that can have an opened loop's i-th result without an additional transfer, the canonical one first.

    A result can be stacked where its rows are made, and where its rows are sent anyway.
    """
    if i < len(loop.carry_placements):
        return loop.carry_placements[i]
    out = loop.region.results[i - len(loop.carry_placements)]
    if not isinstance(out, Var):
        return [next(g.placement for g in _programs(loop) if g.placement is not None)]
    readers = (g.placement for g in loop.groups for n in g.nodes if out in n.eqn.invars)
    found = [*loop.available_at.get(out, ()), *loop.needed_at.get(out, ()), *(p for p in readers if p is not None)]
    return list(dict.fromkeys(found)) or [next(g.placement for g in _programs(loop) if g.placement is not None)]


def _programs(part: Partition) -> Iterable[ProgramNodes]:
    for group in part.groups:
        if group.placement is not None:
            yield group
        else:
            yield from _programs(part.loops[group.nodes[0]])


def _replicable(region: Region, registers: Mapping[Var, list[Placement]]) -> set[Var]:
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


def _place(
    region: Region,
    registers: Mapping[Var, list[Placement]],
    loops: dict[Node, Partition],
    free: set[Var],
    default: Placement,
) -> tuple[dict[Node, list[Placement]], list[list[Placement]]]:
    """The placements of every node (several for free glue), and the homes of the carry."""
    places: dict[Node, list[Placement]] = {n: [n.placement] for n in region.nodes if n.placement is not None}
    home: dict[Var, list[Placement]] = dict(registers)
    _place_dependents(region, loops, free, places, home)
    for node in region.nodes:
        if node.is_glue and node.has_effects and node not in places:
            places[node] = [_first_reader(region, node, places) or default]
            _place_dependents(region, loops, free, places, home)

    # Free glue and free carry go wherever they are needed. All loops terminate, because sets of placements only grow; readers
    # come first, so that only values carried between repetitions take more than one round.
    free_glue = [n for n in reversed(region.nodes) if n.is_glue and n not in places]
    for node in free_glue:
        places[node] = []
    readers = _readers(region, loops)
    while True:
        before = ({n: places[n] for n in free_glue}, dict(home))
        for node in free_glue:
            places[node] = _needed_at(node.eqn.outvars, readers, places, home)
        home.update({v: at for v in region.carry if v in free and (at := _needed_at([v], readers, places, home))})
        if ({n: places[n] for n in free_glue}, home) == before:
            break
    for var in region.carry:
        home.setdefault(var, [default])
    # Glue that only a counter or a metric needs runs at the default placement.
    wanted = {a for a in [*region.next_carry, *region.results] if isinstance(a, Var)}
    while True:
        grew = False
        for node in free_glue:
            at = list(dict.fromkeys([*places[node], *_needed_at(node.eqn.outvars, readers, places, home)]))
            if not at and any(v in wanted for v in node.eqn.outvars):
                at = [default]
            if at != places[node]:
                places[node], grew = at, True
        for var in region.carry:
            at = list(dict.fromkeys([*home[var], *_needed_at([var], readers, places, home)]))
            if var in free and at != home[var]:
                home[var], grew = at, True
        if not grew:
            return places, [home[v] for v in region.carry]


def _place_dependents(
    region: Region,
    loops: dict[Node, Partition],
    free: set[Var],
    places: dict[Node, list[Placement]],
    home: dict[Var, list[Placement]],
) -> None:
    """Fills in `places` and `home`: glue that depends on a placed node runs where its inputs are made.

    Among several placements, it uses the one that waits for the others anyway; elsewhere, it would delay the next program.
    """
    producers, depth = region.producers, _depth(region)

    def located(atom: Atom) -> list[Placement]:
        if isinstance(atom, Literal) or atom in free:
            return []
        node = producers.get(atom)
        if node is None:
            return home.get(atom, [])
        if node in loops:
            return _result_placements(loops[node], node.eqn.outvars.index(atom))
        return places.get(node, [])

    changed = True
    while changed:
        changed = False
        for node in region.nodes:
            if not node.is_glue or node in places:
                continue
            sources = [a for a in node.eqn.invars if located(a)]
            if sources:
                deepest = max(sources, key=lambda a: depth.get(a, 0))
                places[node] = located(deepest)[:1]
                changed = True
        for var, out in zip(region.carry, region.next_carry, strict=True):
            if var not in home and var not in free and (at := located(out)):
                home[var] = at
                changed = True


def _first_reader(region: Region, node: Node, places: dict[Node, list[Placement]]) -> Placement | None:
    """The placement of the first placed node that reads a node's results, directly or through glue, if any."""
    reached = set(node.eqn.outvars)
    for reader in region.nodes:
        if reached.isdisjoint(a for a in reader.eqn.invars if isinstance(a, Var)):
            continue
        if reader in places:
            return places[reader][0]
        reached.update(reader.eqn.outvars)
    return None


_Reader: TypeAlias = Node | Var | Sequence[Placement]
"""A reader of a variable: a node, a carried variable whose next value it is, or code in a loop at some placements."""


def _readers(region: Region, loops: dict[Node, Partition]) -> dict[Var, list[_Reader]]:
    """The readers of each variable, in program order."""
    readers: dict[Var, list[_Reader]] = {}

    def read(atom: Atom, reader: _Reader) -> None:
        if isinstance(atom, Var):
            readers.setdefault(atom, []).append(reader)

    for node in region.nodes:
        if node in loops:
            for atom, at in zip(node.eqn.invars, loops[node].inputs_at, strict=True):
                read(atom, at)
        else:
            for atom in node.eqn.invars:
                read(atom, node)
    for atom, var in zip(region.next_carry, region.carry, strict=True):
        read(atom, var)
    return readers


def _needed_at(
    variables: Iterable[Var],
    readers: Mapping[Var, Sequence[_Reader]],
    places: Mapping[Node, list[Placement]],
    home: Mapping[Var, list[Placement]],
) -> list[Placement]:
    found: dict[Placement, None] = {}
    for reader in (r for v in variables for r in readers.get(v, ())):
        at = places.get(reader, ()) if isinstance(reader, Node) else home.get(reader, ()) if isinstance(reader, Var) else reader
        found.update(dict.fromkeys(at))
    return list(found)


def _group(region: Region, places: dict[Node, list[Placement]]) -> list[ProgramNodes]:
    """Groups nodes into programs: each joins the earliest program of its placement that then waits for nothing new."""
    groups: list[ProgramNodes] = []
    joinable: dict[Placement | None, list[ProgramNodes]] = defaultdict(list)
    made_in: dict[tuple[Var, Placement | None], ProgramNodes] = {}
    last_effect: set[ProgramNodes] = set()
    before = _host_calls_before(region)

    def sources(node: Node, at: Placement | None) -> set[ProgramNodes]:
        found: set[ProgramNodes] = set()
        for atom in node.eqn.invars:
            if isinstance(atom, Var):
                local = made_in.get((atom, at)) or made_in.get((atom, None))
                if local is not None:
                    found.add(local)
                found |= before.get(atom, set())
        return found

    for node in region.nodes:
        for at in [None] if node.loop is not None else places[node]:
            direct = sources(node, at) | (last_effect if node.has_effects else set())
            waits_for = direct.union(*(g.waits_for for g in direct))
            alone = at is None or node.is_host_call
            group = None if alone else next((g for g in joinable[at] if waits_for - {g} <= g.waits_for), None)
            if group is None:
                group = ProgramNodes(at, [], waits_for)
                groups.append(group)
                if not alone:
                    joinable[at].append(group)
            group.nodes.append(node)
            if node.has_effects:
                last_effect = {group}
            for var in node.eqn.outvars:
                made_in[var, at] = group
                made_in.setdefault((var, None), group)
    return groups


def _host_calls_before(region: Region) -> dict[Var, set[ProgramNodes]]:
    """For each carried variable, the host calls of the previous repetition that its value comes from.

    They count as dependencies, so that code that waits for one call is not merged with code that waits for another.
    """
    found: dict[Var, set[ProgramNodes]] = {}
    for node in region.nodes:
        sources = set().union(*(found.get(a, set()) for a in node.eqn.invars if isinstance(a, Var)))
        if node.is_host_call:
            sources = {ProgramNodes(node.placement, [node])}
        if sources:
            found.update(dict.fromkeys(node.eqn.outvars, sources))
    pairs = zip(region.carry, region.next_carry, strict=True)
    return {var: found[out] for var, out in pairs if isinstance(out, Var) and out in found}


def _merge_into_single_reader(groups: list[ProgramNodes]) -> list[ProgramNodes]:
    """Merges a glue program into a later program of its placement if no other program reads it.

    A result that is carried to the next repetition delays no program: it is made where it is carried.
    """
    for group in list(groups):
        if group.placement is None or any(n.fragments or n.has_effects for n in group.nodes):
            continue
        made = {v for n in group.nodes for v in n.eqn.outvars}
        readers = [g for g in groups if g is not group and _reads(g, made, [o for o in groups if o is not group])]
        if len(readers) == 1 and readers[0].placement == group.placement and not readers[0].is_host_call:
            into = readers[0]
            if not {g for g in into.waits_for if g.is_host_call} <= group.waits_for:
                continue  # its results for the next repetition would wait for another host call
            into.nodes[:0] = group.nodes
            into.waits_for |= group.waits_for
            into.waits_for.discard(group)
            groups.remove(group)
            for g in groups:
                if group in g.waits_for:
                    g.waits_for.discard(group)
                    if g is not into:
                        g.waits_for.add(into)
    return groups


def _reads(reader: ProgramNodes, made: set[Var], groups: list[ProgramNodes]) -> bool:
    """Whether a group reads any of these variables, except those that its own placement also makes."""
    own = {v for g in groups if g.placement == reader.placement for n in g.nodes for v in n.eqn.outvars}
    return any(a in made and a not in own for n in reader.nodes for a in n.eqn.invars if isinstance(a, Var))
