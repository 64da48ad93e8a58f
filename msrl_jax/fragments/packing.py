"""Compressed edges: packs values that cross between placements, where the layout declares a codec for the edge.

The packing joins the program that makes a value and the unpacking the program that reads it, so what a Move carries is
the packed form. Where a codec does not hold every value, the program checks it and the run stops with an error.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax._compat import Atom, Literal, Var, aval, fresh, is_dropped
from msrl_jax.codecs import Codec, get
from msrl_jax.fragments.graph import Node, Region, inlined
from msrl_jax.fragments.instructions import Packed
from msrl_jax.fragments.partition import Partition, partition
from msrl_jax.fragments.placement import Edge, Layout, Placement


@dataclass(frozen=True)
class Check:
    """What a program measures of a value that a codec may not hold; three scalars among the metrics: ok, low, high.

    Attributes:
      label: the value.
      codec: the codec.
      edge: the placements that it crosses between, in words.
    """

    label: str
    codec: Codec
    edge: str

    def raise_if_lost(self, ok: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
        """Raises if a value was lost.

        Args:
          ok: whether the codec held the values of each iteration. `[N]`
          low: their least. `[N]`
          high: their greatest. `[N]`

        Raises:
          ValueError: naming the value, its range and the codec's promise.
        """
        if not ok.all():
            lost = ~ok
            raise ValueError(
                f"codec {self.codec.name!r} cannot hold {self.label} on its way {self.edge}: its values are in "
                f"[{low[lost].min():g}, {high[lost].max():g}], and the codec promises {self.codec.promise}. "
                "Pack it with another codec, or pack others only, by their names: {'state.obs': 'uint8'} instead of 'uint8'"
            )


@dataclass
class Packing:
    """What was packed.

    Attributes:
      checks: the checks; the scalars of each follow the metrics in the region's outputs.
      packed: the variables that cross packed.
      unused: the codecs of the layout that pack nothing, though their placements are apart.
    """

    checks: list[Check] = field(default_factory=list)
    packed: dict[Var, Packed] = field(default_factory=dict)
    unused: list[Edge] = field(default_factory=list)


def compress(region: Region, layout: Layout, default: Placement) -> Packing:
    """Inserts packing and unpacking into a region and its loops, in place.

    Args:
      region: the iteration.
      layout: the placements, with the codecs of the edges between them.
      default: where values live that no fragment touches.

    Returns:
      What was packed.

    Raises:
      ValueError: if a codec is unknown, or declared between placements that there are not.
    """
    meshes = {p.name: p.mesh for p in layout.placements}
    for edge in layout.codecs:
        get(edge.codec)
        for name in (edge.source, edge.destination):
            if name not in meshes:
                raise ValueError(
                    f"{layout.policy} packs what goes from {edge.source!r} to {edge.destination!r}, but has no placement "
                    f"{name!r}: it has {', '.join(meshes)}"
                )
    packing = Packing(unused=[e for e in layout.codecs if meshes[e.source] != meshes[e.destination]])
    while layout.codecs:
        before = len(packing.packed)
        # Packing a row changes where its stack is to be had, so what crosses is looked up again until nothing is left.
        pass_ = _Pass(partition(region, default), layout, packing)
        pass_.run()
        for measured in pass_.checks:
            region.outputs += measured.scalars
            packing.checks.append(measured.check)
        if len(packing.packed) == before:
            break
    return packing


@dataclass
class _Measured:
    check: Check
    scalars: list[Atom]


class _Pass:
    """One region: `decoded` holds the unpacked variable at each placement, `packing` what is packed already."""

    def __init__(self, part: Partition, layout: Layout, packing: Packing):
        self.part, self.layout, self.region, self.packing = part, layout, part.region, packing
        self.nodes: list[Node] = []
        self.decoded: dict[tuple[Var, Placement], Var] = {}
        self.checks: list[_Measured] = []

    def run(self) -> None:
        places = {n: g.placement for g in self.part.groups for n in g.nodes}
        for node in self.region.nodes:
            if node.loop is not None:
                self.loop(node)
            elif (at := places.get(node)) is not None:
                node.eqn = node.eqn.replace(invars=[self.crossing(a, [at]) for a in node.eqn.invars])
            self.nodes.append(node)
        for i, homes in enumerate(self.part.homes):
            self.region.outputs[i] = self.crossing(self.region.outputs[i], homes)
        self.region.nodes[:] = self.nodes

    def crossing(self, atom: Atom, readers: Sequence[Placement]) -> Atom:
        """The atom that `readers` read: what it unpacks to, if it crosses to all of them over an edge with a codec."""
        made = self.part.made_at.get(atom) if isinstance(atom, Var) else None
        if not made or not readers or not isinstance(atom, Var) or atom in self.packing.packed:
            return atom
        to = readers[0]
        if (atom, to) in self.decoded and len(readers) == 1:
            return self.decoded[atom, to]
        if any(r.mesh != to.mesh for r in readers) or any(p.mesh == to.mesh for p in made):
            return atom
        label = self.region.labels.get(atom, "")
        for edge in self.layout.codecs:
            codec = get(edge.codec)
            if edge.matches(made[0].name, to.name, label) and codec.takes(aval(atom)):
                if (atom, to) not in self.decoded:
                    self.decoded[atom, to] = self.pack(atom, made[0], to, codec, label)
                    self.packing.unused = [e for e in self.packing.unused if e != edge]
                return self.decoded[atom, to]
        return atom

    def pack(self, var: Var, source: Placement, to: Placement, codec: Codec, label: str) -> Var:
        shape = aval(var)
        crossing, tree = self.call(lambda x: codec.encode(x), [var], source, f"{label} as {codec.name}")
        (result,), _ = self.call(lambda *xs: codec.decode(jax.tree.unflatten(tree, xs), shape), crossing, to, label)
        self.packing.packed.update(dict.fromkeys(crossing, Packed(label, shape, codec.name)))
        if codec.holds is not None:
            holds = codec.holds
            measure = lambda x: (holds(x), x.min().astype(jnp.float32), x.max().astype(jnp.float32))  # noqa: E731
            scalars, _ = self.call(measure, [var], source, f"range of {label}")
            check = Check(label, codec, f"from {source.name!r} to {to.name!r}")
            self.checks.append(_Measured(check, list(scalars)))
        return result

    def call(self, fn: Callable, args: Sequence[Var], at: Placement, label: str):
        """Appends a function as nodes at a placement; returns its result variables and their tree."""
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(
            *[jax.ShapeDtypeStruct(aval(a).shape, aval(a).dtype) for a in args]
        )
        outs = inlined(closed, args, at, self.nodes)
        self.region.labels.update(dict.fromkeys(outs, label))
        return outs, jax.tree.structure(shape)

    def loop(self, node: Node) -> None:
        """Packs what crosses into a loop before it, and what crosses inside of it there."""
        inner = self.part.loops[node]
        region = inner.region
        variables = [*region.consts, *region.carry, *region.xs]
        first = len(region.consts)
        homes = dict(enumerate(inner.homes, first))
        reads = [homes.get(i, inner.needed_at[v]) for i, v in enumerate(variables)]
        node.eqn = node.eqn.replace(
            invars=[self.crossing(a, at) for a, at in zip(node.eqn.invars, reads, strict=True)]
        )
        inside = _Pass(inner, self.layout, self.packing)
        inside.run()
        self.stack(node, region, inside.decoded)
        for measured in inside.checks:
            self.carry_out(node, region, measured)

    def stack(self, node: Node, region: Region, decoded: Mapping[tuple[Var, Placement], Var]) -> None:
        """Rows that a loop has unpacked somewhere are stacked there, for readers of the stack: it need not cross as well."""
        first = len(region.carry)
        outvars = list(node.eqn.outvars)
        for row, stacked in zip(region.outputs[first:], node.eqn.outvars[first:], strict=True):
            for (var, at), unpacked in decoded.items():
                if var is row and not is_dropped(stacked):
                    self.decoded[stacked, at] = fresh(stacked)
                    self.region.labels[self.decoded[stacked, at]] = self.region.labels.get(stacked, "")
                    region.outputs.append(unpacked)
                    outvars.append(self.decoded[stacked, at])
        node.eqn = node.eqn.replace(outvars=outvars)

    def carry_out(self, node: Node, region: Region, measured: _Measured) -> None:
        """Folds the scalars of a check over the times of a loop, as values that the loop carries."""
        ok, low, high = measured.scalars
        starts = [np.bool_(True), np.float32(np.inf), np.float32(-np.inf)]
        folds = [jnp.logical_and, jnp.minimum, jnp.maximum]
        (source,) = {n.placement for n in region.nodes if ok in n.eqn.outvars}
        assert source is not None
        body: list[Node] = []
        results: list[Atom] = []
        for start, fold, now in zip(starts, folds, (ok, low, high), strict=True):
            assert isinstance(now, Var)
            enter, result = fresh(now), fresh(now)
            closed = jax.make_jaxpr(fold)(start, start)
            (leave,) = inlined(closed, [enter, now], source, body)
            at = len(region.carry)
            region.carry.append(enter)
            region.outputs.insert(at, leave)
            invars, outvars = list(node.eqn.invars), list(node.eqn.outvars)
            invars.insert(len(region.consts) + at, Literal(start, aval(now)))
            outvars.insert(at, result)
            node.eqn = node.eqn.replace(invars=invars, outvars=outvars)
            results.append(result)
        region.nodes += body
        self.checks.append(_Measured(measured.check, results))
