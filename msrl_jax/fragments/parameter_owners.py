"""Checks that only one learner updates each leaf of the state."""

from msrl_jax._compat import Atom, Var, aval
from msrl_jax.fragments.graph import Graph, Node
from msrl_jax.fragments.marker import is_fragment


def check_owners(graph: Graph) -> None:
    """Checks that no two learners update the same leaf of the state.

    The suffix of the role distinguishes learners, as in `"learner:critic"`. If a leaf passed through fragments of two learners
    within an iteration, each would undo the other's update. (Bodies of loops are not checked.)

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
    """The learners between `leaf` and `atom`, role -> fragment, along values of the leaf's type; None if no path exists."""
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
