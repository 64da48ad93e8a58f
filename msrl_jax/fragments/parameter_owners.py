"""Who updates what: a leaf of the state belongs to one learner."""

from msrl_jax._compat import Atom, Var
from msrl_jax.fragments.graph import Node, Region, producers
from msrl_jax.fragments.marker import is_fragment


def check_claims(region: Region) -> None:
    """Checks that no leaf of the state is updated by two learners.

    Learners are told apart by the suffix of their role, as in `"learner:critic"`. A leaf that passes through fragments of
    two of them on its way to the next iteration would have two owners, each undoing what the other did; on placements of
    their own it would travel between them twice. (What happens inside of a loop is not looked at.)

    Args:
      region: the iteration.

    Raises:
      ValueError: naming the leaf and both fragments.
    """
    made_by = producers(region)
    for leaf, out in zip(region.carry, region.outputs, strict=False):
        claims = _path(out, leaf, made_by, {}) or {}
        if len(claims) > 1:
            owners = " and ".join(f"fragment {name!r} (role {role!r})" for role, name in claims.items())
            raise ValueError(
                f"{region.labels.get(leaf, 'a leaf of the state')} is updated by {owners}: two learners claim the same "
                "parameters. Give each learner parameters of its own, or both fragments the same role"
            )


def _path(atom: Atom, leaf: Var, made_by: dict[Var, Node], known: dict[Atom, dict[str, str] | None]) -> dict[str, str] | None:
    """Role -> fragment of the learners between `leaf` and `atom`, along values of the leaf's type; None if none leads there."""
    if atom is leaf:
        return {}
    node = made_by.get(atom) if isinstance(atom, Var) else None
    if node is None or (atom.aval.shape, atom.aval.dtype) != (leaf.aval.shape, leaf.aval.dtype):  # type: ignore[attr-defined]
        return None
    if atom not in known:
        known[atom] = None
        found = [p for a in node.eqn.invars if (p := _path(a, leaf, made_by, known)) is not None]
        if found:
            merged: dict[str, str] = {}
            for path in found:
                merged |= path
            if is_fragment(node.eqn) and node.eqn.params["role"].startswith("learner:"):
                merged.setdefault(node.eqn.params["role"], node.eqn.params["name"])
            known[atom] = merged
    return known[atom]
