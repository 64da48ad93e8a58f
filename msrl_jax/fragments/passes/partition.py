"""Partitioning: decides where everything runs, and groups nodes into programs; see `placing.py` and `grouping.py`."""

from collections.abc import Mapping

from msrl_jax._compat import Var
from msrl_jax.fragments.graph.nodes import Graph, Region
from msrl_jax.fragments.passes.grouping import group_nodes
from msrl_jax.fragments.passes.placing import Partition, place
from msrl_jax.fragments.placement import Placement


def partition(graph: Graph, default: Placement) -> Partition:
    """Decides where everything runs; values that no fragment uses are at the placement `default`."""
    return _partition(graph.region, graph.registers, default)


def _partition(region: Region, registers: Mapping[Var, list[Placement]], default: Placement) -> Partition:
    """Returns the partition of a region; `registers` has the carried variables whose homes are given."""
    loops = {n: _partition(n.loop, {}, default) for n in region.nodes if n.loop is not None}
    places = place(region, registers, loops, default)
    carry_placements = [places.home[v] for v in region.carry]
    available_at = dict(zip(region.carry, carry_placements, strict=True))
    available_at |= {v: places.made_at(node, i) for node in region.nodes for i, v in enumerate(node.eqn.outvars)}
    needed_at = {v: places.needed_at([v]) for v in region.inputs}
    for out in region.results:
        if isinstance(out, Var) and (out in region.consts or out in region.xs) and out not in places.readers:
            needed_at[out] = [default]
    return Partition(region, group_nodes(region, places.nodes), available_at, needed_at, carry_placements, loops)
