"""Packing: packs values that are sent between placements, with the codecs that the layout declares.

The program that makes a value packs it, the program that reads it unpacks it, and the Move between them transfers the packed
form. If a codec does not hold every value, the program checks the values, and the run stops with an error.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax._compat import Atom, Literal, Var, aval, is_dropped, new_var
from msrl_jax.fragments.codecs import Codec, get
from msrl_jax.fragments.graph.build import append_inlined
from msrl_jax.fragments.graph.nodes import Check, CheckScalars, Graph, Node, Packed, Region
from msrl_jax.fragments.passes.placing import Partition
from msrl_jax.fragments.placement import Edge, Layout, Placement


def unused_codecs(graph: Graph, layout: Layout) -> list[Edge]:
    """Returns the codecs of a layout that pack nothing although their placements are different."""
    meshes = {p.name: p.mesh for p in layout.placements}
    used_edges = [packed.edge for packed in graph.packed.values()]
    return [e for e in layout.codecs if meshes[e.source] != meshes[e.destination] and e not in used_edges]


def pack(partition: Partition, graph: Graph, layout: Layout) -> bool:
    """Packs values that cross placements and are not yet packed; modifies the graph in place, returns whether it changed.

    If a loop unpacks a row, the stack of the row may be made elsewhere, and another value may cross. Therefore call this again
    with a new partition until nothing changes. This terminates, because each change packs one more of finitely many values.
    """
    if not layout.codecs:
        return False
    before = len(graph.packed)
    packer = _Packer(partition, graph, layout)
    packer.pack_region()
    graph.checks += packer.checks
    return len(graph.packed) > before


class _Packer:
    """Packs one region; `decoded` has the unpacked variable at each placement."""

    def __init__(self, partition: Partition, graph: Graph, layout: Layout):
        self.partition, self.graph, self.layout = partition, graph, layout
        self.nodes: list[Node] = []
        self.decoded: dict[tuple[Var, Placement], Var] = {}
        self.checks: list[tuple[Check, CheckScalars]] = []

    def pack_region(self) -> None:
        region = self.partition.region
        places = {n: g.placement for g in self.partition.groups for n in g.nodes}
        for node in region.nodes:
            if node.loop is not None:
                self.pack_loop(node, node.loop)
            elif (placement := places.get(node)) is not None:
                node.eqn = node.eqn.replace(invars=[self.replace_crossing(a, [placement]) for a in node.eqn.invars])
            self.nodes.append(node)
        pairs = zip(region.next_carry, self.partition.carry_placements, strict=True)
        region.next_carry[:] = [self.replace_crossing(atom, carry_placements) for atom, carry_placements in pairs]
        region.nodes[:] = self.nodes

    def replace_crossing(self, atom: Atom, readers: Sequence[Placement]) -> Atom:
        """Returns the atom that `readers` read: the unpacked value if it crosses to all of them over an edge with a codec."""
        sources = self.partition.available_at.get(atom) if isinstance(atom, Var) else None
        if not sources or not readers or not isinstance(atom, Var) or atom in self.graph.packed:
            return atom
        destination = readers[0]
        if (atom, destination) in self.decoded and len(readers) == 1:
            return self.decoded[atom, destination]
        if any(r.mesh != destination.mesh for r in readers) or any(p.mesh == destination.mesh for p in sources):
            return atom
        label = self.graph.labels.get(atom, "")
        for edge in self.layout.codecs:
            codec = get(edge.codec)
            matches = (edge.source, edge.destination) == (sources[0].name, destination.name) and edge.only in label
            if matches and codec.takes(aval(atom)):
                if (atom, destination) not in self.decoded:
                    self.decoded[atom, destination] = self.pack_value(atom, sources[0], destination, codec, edge)
                return self.decoded[atom, destination]
        return atom

    def pack_value(self, var: Var, source: Placement, destination: Placement, codec: Codec, edge: Edge) -> Var:
        shape, label = aval(var), self.graph.labels.get(var, "")
        packed_vars, tree = self.append_call(codec.encode, [var], source, f"{label} as {codec.name}")
        (result,), _ = self.append_call(
            lambda *xs: codec.decode(jax.tree.unflatten(tree, xs), shape), packed_vars, destination, label
        )
        self.graph.packed.update(dict.fromkeys(packed_vars, Packed(label, shape, codec.name, edge)))
        if codec.holds is not None:
            holds = codec.holds

            def measure(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
                return holds(x), x.min().astype(jnp.float32), x.max().astype(jnp.float32)

            (ok, low, high), _ = self.append_call(measure, [var], source, f"range of {label}")
            self.checks.append((Check(label, codec, f"from {source.name!r} to {destination.name!r}"), (ok, low, high)))
        return result

    def append_call(
        self, fn: Callable[..., Any], args: Sequence[Var], placement: Placement, label: str
    ) -> tuple[list[Var], Any]:
        """Appends a function as nodes at a placement; returns its result variables and their tree."""
        kinds = [jax.ShapeDtypeStruct(aval(a).shape, aval(a).dtype) for a in args]
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*kinds)
        outs = append_inlined(closed, args, placement, self.nodes)
        self.graph.labels.update(dict.fromkeys(outs, label))
        return outs, jax.tree.structure(shape)

    def pack_loop(self, node: Node, region: Region) -> None:
        """Packs values that cross into a loop before the loop, and values that cross inside it in its body."""
        inner = self.partition.loops[node]
        pairs = zip(node.eqn.invars, inner.inputs_at, strict=True)
        node.eqn = node.eqn.replace(invars=[self.replace_crossing(a, placements) for a, placements in pairs])
        inside = _Packer(inner, self.graph, self.layout)
        inside.pack_region()
        self.stack_unpacked_rows(node, region, inside.decoded)
        self.checks += [(check, self.fold_over_loop(scalars, node, region)) for check, scalars in inside.checks]

    def stack_unpacked_rows(self, node: Node, region: Region, decoded: Mapping[tuple[Var, Placement], Var]) -> None:
        """Stacks rows at the placement where a loop has unpacked them, so that the stack does not have to cross too."""
        outvars = list(node.eqn.outvars)
        stacks = outvars[len(region.carry) :]
        for row, stacked in list(zip(region.results, stacks, strict=True)):
            for (var, placement), unpacked in decoded.items():
                if var is row and not is_dropped(stacked):
                    self.decoded[stacked, placement] = new_var(stacked)
                    self.graph.labels[self.decoded[stacked, placement]] = self.graph.labels.get(stacked, "")
                    region.results.append(unpacked)
                    outvars.append(self.decoded[stacked, placement])
        node.eqn = node.eqn.replace(outvars=outvars)

    def fold_over_loop(self, scalars: CheckScalars, node: Node, region: Region) -> CheckScalars:
        """Combines the scalars of a check over all repetitions of a loop, in carried values."""
        starts = [np.bool_(True), np.float32(np.inf), np.float32(-np.inf)]
        folds = [jnp.logical_and, jnp.minimum, jnp.maximum]
        (source,) = {n.placement for n in region.nodes if scalars[0] in n.eqn.outvars}
        assert source is not None
        results: list[Var] = []
        for start, fold, now in zip(starts, folds, scalars, strict=True):
            body_in, result = new_var(now), new_var(now)
            (body_out,) = append_inlined(jax.make_jaxpr(fold)(start, start), [body_in, now], source, region.nodes)
            position = len(region.carry)
            region.carry.append(body_in)
            region.next_carry.append(body_out)
            invars, outvars = list(node.eqn.invars), list(node.eqn.outvars)
            invars.insert(len(region.consts) + position, Literal(start, aval(now)))
            outvars.insert(position, result)
            node.eqn = node.eqn.replace(invars=invars, outvars=outvars)
            results.append(result)
        ok, low, high = results
        return ok, low, high
