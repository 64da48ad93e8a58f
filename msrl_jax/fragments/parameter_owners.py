"""Who updates what: a leaf of the state belongs to one learner."""

from msrl_jax._compat import Atom, Var, aval
from msrl_jax.fragments.graph import Graph, Node
from msrl_jax.fragments.marker import is_fragment


def check_owners(graph: Graph) -> None:
    """Checks that no two learners update the same leaf of the state.

    Learners are told apart by the suffix of their role, as in `"learner:critic"`. A leaf that passes through fragments of
    two of them on its way to the next iteration would have two owners, each undoing what the other did; on placements of
    their own it would travel between them twice. (The insides of loops are not looked at.)

    Args:
      graph: the iteration.

    Raises:
      ValueError: naming the leaf and both fragments.
    """
    region = graph.region
    producers = region.producers
    for leaf, out in zip(region.carry, region.next_carry, strict=True):
        owners = _path(out, leaf, producers, {}) or {}
        if len(owners) > 1:
            names = " and ".join(f"fragment {name!r} (role {role!r})" for role, name in owners.items())
            raise ValueError(
                f"{graph.labels.get(leaf, 'a leaf of the state')} is updated by {names}: two learners claim the same "
                "parameters. Give each learner parameters of its own, or both fragments the same role"
            )


def _path(atom: Atom, leaf: Var, producers: dict[Var, Node], known: dict[Var, dict[str, str] | None]) -> dict[str, str] | None:
    """Role -> fragment of the learners between `leaf` and `atom`, along values of the leaf's type; None if no path exists."""
    if atom is leaf:
        return {}
    if not isinstance(atom, Var) or atom not in producers:
        return None
    if (aval(atom).shape, aval(atom).dtype) != (aval(leaf).shape, aval(leaf).dtype):
        return None
    if atom not in known:
        known[atom] = None
        eqn = producers[atom].eqn
        found = [p for a in eqn.invars if (p := _path(a, leaf, producers, known)) is not None]
        if found:
            merged: dict[str, str] = {}
            for path in found:
                merged |= path
            if is_fragment(eqn) and eqn.params["role"].startswith("learner:"):
                merged.setdefault(eqn.params["role"], eqn.params["name"])
            known[atom] = merged
    return known[atom]
