"""Staleness: registers on the edges that lead back from the learner, so that nobody upstream of it waits for it."""

from msrl_jax._compat import Atom, Var, fresh
from msrl_jax.fragments.graph import Node, Region, producers
from msrl_jax.fragments.placement import Layout, Placement

_UPSTREAM = {"actor", "buffer"}
_DOWNSTREAM = {"learner", "server"}


def delay(region: Region, depth: int, layout: Layout) -> int:
    """Puts a `depth`-deep register on every loop-carried edge from the learner to actors and buffers apart from it, in place.

    With p[i] the value of a leaf at the start of iteration i, acting nodes of iteration i read p[i - depth] (the initial
    value while there is none), and so do buffers on a placement other than the learner's: parameters and priorities arrive
    late by the same number of iterations. The registers become part of the carry. Glue between the leaf and its reader is
    evaluated on the delayed value.

    Args:
      region: the iteration.
      depth: the staleness, in iterations; at least 1.
      layout: where each role runs.

    Returns:
      The number of delayed leaves. Registers follow the state in `region.carry`: `depth` for each delayed leaf, oldest
      first, and so do they in `region.outputs`.

    Raises:
      ValueError: if no actor or buffer on a placement of its own reads anything that a learner makes.
    """
    made_by = producers(region)
    num_state = len(region.carry)
    made = dict(zip(region.carry, region.outputs, strict=False))
    registers = {var: fresh(var) for var in region.carry}
    readers: dict[Var, list[Placement]] = {}
    clones: dict[tuple[Var, Placement], Var] = {}
    cloned: dict[Node, list[Node]] = {}

    def learned(atom: Atom, at: Placement) -> bool:
        """Whether a learner that is not at `at` makes it."""
        node = made_by.get(atom) if isinstance(atom, Var) else None
        if node is None:
            return False
        if node.is_glue:
            return any(learned(a, at) for a in node.eqn.invars)
        return bool(node.kinds & _DOWNSTREAM) and node.placement != at

    def delayed(atom: Atom, at: Placement, before: Node) -> Atom:
        if not isinstance(atom, Var):
            return atom
        if atom in made:
            if not learned(made[atom], at):
                return atom
            if at not in readers.setdefault(atom, []):
                readers[atom].append(at)
            return registers[atom]
        node = made_by.get(atom)
        if node is None or not node.is_glue:
            return atom
        if (atom, at) not in clones:
            ins = [delayed(a, at, before) for a in node.eqn.invars]
            if all(a is b for a, b in zip(ins, node.eqn.invars, strict=True)):
                return atom
            outs = [fresh(v) for v in node.eqn.outvars]
            clones.update({(v, at): o for v, o in zip(node.eqn.outvars, outs, strict=True)})
            cloned.setdefault(before, []).append(Node(node.eqn.replace(invars=ins, outvars=outs), at))
            region.labels.update({o: region.labels.get(v, "") for o, v in zip(outs, node.eqn.outvars, strict=True)})
        return clones[atom, at]

    for node in region.nodes:
        if node.kinds & _UPSTREAM and not node.kinds & _DOWNSTREAM:
            at = node.placement or layout.placement("actor", "actor")
            node.eqn = node.eqn.replace(invars=[delayed(a, at, node) for a in node.eqn.invars])
    if not readers:
        raise ValueError(
            f"staleness={depth} has nothing to delay: no actor and no buffer on a placement of its own reads what a learner "
            "makes. Choose a policy with separate actors and learners, such as SingleLearnerCoarse, or staleness=0"
        )
    region.nodes[:] = [n for node in region.nodes for n in [*cloned.get(node, []), node]]
    next_state, rest = region.outputs[:num_state], region.outputs[num_state:]
    for position, leaf in enumerate(region.carry[:num_state]):
        if leaf not in readers:
            continue
        row = [registers[leaf], *[fresh(leaf) for _ in range(depth - 1)]]
        region.labels.update({v: f"{region.labels[leaf]} (delayed {depth - i})" for i, v in enumerate(row)})
        region.delayed.append(position)
        region.axes += [region.axes[position]] * depth
        region.carry += row
        region.homes.update(dict.fromkeys(row, readers[leaf]))
        next_state += [*row[1:], leaf]
    region.outputs = next_state + rest
    return len(region.delayed)
