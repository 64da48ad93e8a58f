"""Staleness: delays values from the learner with registers, so that actors and buffers do not wait for it."""

from msrl_jax._compat import Atom, Var, fresh
from msrl_jax.fragments.graph import Graph, Node
from msrl_jax.fragments.placement import Layout, Placement

_UPSTREAM = {"actor", "buffer"}
_DOWNSTREAM = {"learner", "server"}


def delay(graph: Graph, depth: int, layout: Layout) -> None:
    """Changes the graph in place: a `depth`-deep register on every edge from the learner back to actors and buffers.

    Let p[i] be the value of a leaf at the start of iteration i. Actors in iteration i read p[i - depth], or the initial value
    if i < depth. Buffers on another placement than the learner's do too: parameters and priorities are late by the same number
    of iterations. The registers follow the state in the carry: `depth` for each delayed leaf, oldest first. Glue between the
    leaf and its reader is evaluated on the delayed value.

    Args:
      graph: the iteration.
      depth: the staleness, in iterations; at least 1.
      layout: where each role runs.

    Raises:
      ValueError: if no actor or buffer on a separate placement reads values of a learner, or if code with effects is between
        a learner and an actor.
    """
    region = graph.region
    producers = region.producers
    next_value = dict(zip(region.carry, region.next_carry, strict=True))
    registers = {var: fresh(var) for var in region.carry}
    readers: dict[Var, list[Placement]] = {}
    clones: dict[tuple[Var, Placement], Var] = {}
    cloned: dict[Node, list[Node]] = {}

    def learned(atom: Atom, at: Placement) -> bool:
        """Whether a learner at another placement than `at` makes the atom."""
        node = producers.get(atom) if isinstance(atom, Var) else None
        if node is None:
            return False
        if node.is_glue:
            return any(learned(a, at) for a in node.eqn.invars)
        return bool(node.kinds & _DOWNSTREAM) and node.placement != at

    def delayed(atom: Atom, at: Placement, reader: Node) -> Atom:
        """The atom that `reader`, at placement `at`, reads instead of an atom."""
        if not isinstance(atom, Var):
            return atom
        if atom in next_value:
            if not learned(next_value[atom], at):
                return atom
            if at not in readers.setdefault(atom, []):
                readers[atom].append(at)
            return registers[atom]
        node = producers.get(atom)
        if node is None or not node.is_glue:
            return atom
        if (atom, at) not in clones:
            ins = [delayed(a, at, reader) for a in node.eqn.invars]
            if all(a is b for a, b in zip(ins, node.eqn.invars, strict=True)):
                return atom
            if node.has_effects:
                raise ValueError(
                    f"`{node.eqn.primitive.name}` has effects and is between a learner and {reader}, which reads values from "
                    f"{depth} iterations ago: it would run twice, on old and on new values. Move it into a fragment"
                )
            outs = [fresh(v) for v in node.eqn.outvars]
            clones.update({(v, at): o for v, o in zip(node.eqn.outvars, outs, strict=True)})
            cloned.setdefault(reader, []).append(Node(node.eqn.replace(invars=ins, outvars=outs), at))
            graph.labels.update({o: graph.labels.get(v, "") for o, v in zip(outs, node.eqn.outvars, strict=True)})
        return clones[atom, at]

    for node in region.nodes:
        if node.kinds & _UPSTREAM and not node.kinds & _DOWNSTREAM:
            at = node.placement or layout.placement("actor", "actor")
            node.eqn = node.eqn.replace(invars=[delayed(a, at, node) for a in node.eqn.invars])
    if not readers:
        raise ValueError(
            f"staleness={depth} has nothing to delay: no actor and no buffer on a separate placement reads values of a "
            "learner. Choose a policy with separate actors and learners, such as SingleLearnerCoarse, or staleness=0"
        )
    region.nodes[:] = [n for node in region.nodes for n in [*cloned.get(node, []), node]]
    for position, leaf in enumerate(list(region.carry)):
        if leaf not in readers:
            continue
        row = [registers[leaf], *[fresh(leaf) for _ in range(depth - 1)]]
        graph.labels.update({v: f"{graph.labels[leaf]} (delayed {depth - i})" for i, v in enumerate(row)})
        graph.delayed.append(position)
        graph.axes += [graph.axes[position]] * depth
        graph.registers.update(dict.fromkeys(row, readers[leaf]))
        region.carry += row
        region.next_carry += [*row[1:], leaf]
