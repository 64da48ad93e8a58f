"""Staleness: delays values from the learner with registers, so that actors and buffers do not wait for it."""

from msrl_jax._compat import Atom, Var, new_var
from msrl_jax.fragments.graph.nodes import Graph, Node, upstream
from msrl_jax.fragments.placement import Layout, Placement

_UPSTREAM = {"actor", "buffer"}
_DOWNSTREAM = {"learner", "server"}


def delay(graph: Graph, depth: int, layout: Layout) -> None:
    """Modifies the graph in place: adds registers of depth `depth` to every edge from the learner back to actors and buffers.

    Let p[i] be the value of a leaf at the start of iteration i. In iteration i, actors read p[i - depth], or the initial value
    if i < depth. So do buffers on placements other than the learner's: parameters and priorities have the same delay. The
    registers follow the state in the carry: `depth` for each delayed leaf, oldest first. Glue between the leaf and its reader
    is evaluated on the delayed value. Raises ValueError if nothing is delayed, or if that glue has effects.
    """
    region = graph.region
    producers = region.producers
    next_value = dict(zip(region.carry, region.next_carry, strict=True))
    registers = {var: new_var(var) for var in region.carry}
    readers: dict[Var, list[Placement]] = {}
    cloned: dict[Node, list[Node]] = {}
    # For each placement: results of learners elsewhere; the glue visited so far; what is read instead of its results.
    learner_results: dict[Placement, set[Atom]] = {}
    visited_glue: dict[Placement, set[Node]] = {}
    replacements: dict[Placement, dict[Var, Var]] = {}

    def learner_results_at(placement: Placement) -> set[Atom]:
        if placement not in learner_results:
            variables = learner_results[placement] = set[Atom]()
            for node in region.nodes:
                is_learner = bool(node.kinds & _DOWNSTREAM) and node.placement != placement
                if is_learner or (node.is_glue and any(isinstance(a, Var) and a in variables for a in node.eqn.invars)):
                    variables.update(node.eqn.outvars)
        return learner_results[placement]

    def delayed(atom: Atom, placement: Placement) -> Atom:
        """Returns the atom to read at `placement` instead of `atom`."""
        if not isinstance(atom, Var):
            return atom
        if atom in next_value and isinstance(out := next_value[atom], Var) and out in learner_results_at(placement):
            if placement not in readers.setdefault(atom, []):
                readers[atom].append(placement)
            return registers[atom]
        return replacements.setdefault(placement, {}).get(atom, atom)

    def delay_glue(reader: Node, placement: Placement) -> None:
        """Clones the glue between delayed leaves and a reader."""
        visited = visited_glue.setdefault(placement, set())
        for node in upstream(producers, reader.eqn.invars, lambda _, node: node.is_glue and node not in visited):
            visited.add(node)
            ins = [delayed(a, placement) for a in node.eqn.invars]
            if all(a is b for a, b in zip(ins, node.eqn.invars, strict=True)):
                continue
            if node.has_effects:
                raise ValueError(
                    f"`{node.eqn.primitive.name}` has effects and is between a learner and {reader}, which reads values from "
                    f"{depth} iterations ago: it would run twice, on old and on new values. Move it into a fragment"
                )
            outs = [new_var(v) for v in node.eqn.outvars]
            replacements.setdefault(placement, {}).update(zip(node.eqn.outvars, outs, strict=True))
            cloned.setdefault(reader, []).append(Node(node.eqn.replace(invars=ins, outvars=outs), placement))
            graph.labels.update({o: graph.labels.get(v, "") for o, v in zip(outs, node.eqn.outvars, strict=True)})

    for node in region.nodes:
        if node.kinds & _UPSTREAM and not node.kinds & _DOWNSTREAM:
            placement = node.placement or layout.placement("actor", "actor")
            delay_glue(node, placement)
            node.eqn = node.eqn.replace(invars=[delayed(a, placement) for a in node.eqn.invars])
    if not readers:
        raise ValueError(
            f"staleness={depth} has nothing to delay: no actor and no buffer on a separate placement reads values of a "
            "learner. Choose a policy with separate actors and learners, such as SingleLearnerCoarse, or staleness=0"
        )
    region.nodes[:] = [n for node in region.nodes for n in [*cloned.get(node, []), node]]
    for position, leaf in enumerate(list(region.carry)):
        if leaf not in readers:
            continue
        row = [registers[leaf], *[new_var(leaf) for _ in range(depth - 1)]]
        graph.labels.update({v: f"{graph.labels[leaf]} (delayed {depth - i})" for i, v in enumerate(row)})
        graph.delayed.append(position)
        graph.axes += [graph.axes[position]] * depth
        graph.registers.update(dict.fromkeys(row, readers[leaf]))
        region.carry += row
        region.next_carry += [*row[1:], leaf]
