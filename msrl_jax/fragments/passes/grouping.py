"""Grouping: nodes at one placement become programs, as few as possible without waiting for anything new.

A node joins an earlier program of its placement only if the program then does not wait for anything new. If only one program
reads some glue, and it is a later program of the same placement, the glue joins it. Programs with effects keep their order.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msrl_jax._compat import Var
from msrl_jax.fragments.graph.nodes import Node, Region
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


def group_nodes(region: Region, places: Mapping[Node, Sequence[Placement]]) -> list[ProgramNodes]:
    """Groups the nodes of a region, given their placements, into programs and opened loops, in an order that can run."""
    return _merge_into_single_reader(_join_earliest(region, places))


def _join_earliest(region: Region, places: Mapping[Node, Sequence[Placement]]) -> list[ProgramNodes]:
    """Groups nodes into programs: each joins the earliest program of its placement that then waits for nothing new."""
    groups: list[ProgramNodes] = []
    joinable: dict[Placement | None, list[ProgramNodes]] = defaultdict(list)
    producers: dict[tuple[Var, Placement | None], ProgramNodes] = {}
    last_effect: set[ProgramNodes] = set()
    earlier_calls = _host_calls_before(region)

    def find_sources(node: Node, placement: Placement | None) -> set[ProgramNodes]:
        source_groups: set[ProgramNodes] = set()
        for atom in node.eqn.invars:
            if isinstance(atom, Var):
                local = producers.get((atom, placement)) or producers.get((atom, None))
                if local is not None:
                    source_groups.add(local)
                source_groups |= earlier_calls.get(atom, set())
        return source_groups

    for node in region.nodes:
        for placement in [None] if node.loop is not None else places[node]:
            direct = find_sources(node, placement) | (last_effect if node.has_effects else set())
            waits_for = direct.union(*(g.waits_for for g in direct))
            is_alone = placement is None or node.is_host_call
            group = None if is_alone else next((g for g in joinable[placement] if waits_for - {g} <= g.waits_for), None)
            if group is None:
                group = ProgramNodes(placement, [], waits_for)
                groups.append(group)
                if not is_alone:
                    joinable[placement].append(group)
            group.nodes.append(node)
            if node.has_effects:
                last_effect = {group}
            for var in node.eqn.outvars:
                producers[var, placement] = group
                producers.setdefault((var, None), group)
    return groups


def _host_calls_before(region: Region) -> dict[Var, set[ProgramNodes]]:
    """For each carried variable, the host calls of the previous repetition that its value comes from.

    They count as dependencies, so that code that waits for one call is not merged with code that waits for another.
    """
    calls: dict[Var, set[ProgramNodes]] = {}
    for node in region.nodes:
        sources = set().union(*(calls.get(a, set()) for a in node.eqn.invars if isinstance(a, Var)))
        if node.is_host_call:
            sources = {ProgramNodes(node.placement, [node])}
        if sources:
            calls.update(dict.fromkeys(node.eqn.outvars, sources))
    pairs = zip(region.carry, region.next_carry, strict=True)
    return {var: calls[out] for var, out in pairs if isinstance(out, Var) and out in calls}


def _merge_into_single_reader(groups: list[ProgramNodes]) -> list[ProgramNodes]:
    """Merges a glue program into a later program of its placement if no other program reads it.

    A result that is carried to the next repetition delays no program: it is made where it is carried.
    """
    for group in list(groups):
        if group.placement is None or any(n.fragments or n.has_effects for n in group.nodes):
            continue
        outputs = {v for n in group.nodes for v in n.eqn.outvars}
        readers = [g for g in groups if g is not group and _reads(g, outputs, [o for o in groups if o is not group])]
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


def _reads(reader: ProgramNodes, variables: set[Var], groups: list[ProgramNodes]) -> bool:
    """Whether a group reads any of these variables, except those that its own placement also makes."""
    local_variables = {v for g in groups if g.placement == reader.placement for n in g.nodes for v in n.eqn.outvars}
    return any(a in variables and a not in local_variables for n in reader.nodes for a in n.eqn.invars if isinstance(a, Var))
