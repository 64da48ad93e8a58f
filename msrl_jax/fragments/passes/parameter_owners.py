"""Checks that only one learner updates each leaf of the state."""

import functools
import operator
from collections.abc import Mapping

from msrl_jax._compat import Atom, Var, aval
from msrl_jax.fragments.graph.marker import is_fragment
from msrl_jax.fragments.graph.nodes import Graph, Node, upstream


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
        owners = _owners(producers, out, leaf)
        if len(owners) > 1:
            names = " and ".join(f"fragment {name!r} (role {role!r})" for role, name in owners.items())
            raise ValueError(
                f"{graph.labels.get(leaf, 'a leaf of the state')} is updated by {names}: two learners claim the same "
                "parameters. Give each learner parameters of its own, or both fragments the same role"
            )


def _owners(producers: Mapping[Var, Node], out: Atom, leaf: Var) -> dict[str, str]:
    """The learners between `leaf` and `out`, role -> fragment, along values of the leaf's type."""
    kind = aval(leaf).shape, aval(leaf).dtype
    alike = lambda var, _: (aval(var).shape, aval(var).dtype) == kind  # noqa: E731
    paths: dict[Atom, dict[str, str]] = {leaf: {}}  # of the variables to which a path leads
    for node in upstream(producers, [out], alike):
        before = [paths[a] for a in node.eqn.invars if isinstance(a, Var) and a in paths]
        if before:
            merged = functools.reduce(operator.or_, before)
            if is_fragment(node.eqn) and node.eqn.params["role"].startswith("learner:"):
                merged = merged | {node.eqn.params["role"]: node.eqn.params["name"]} | merged
            paths.update(dict.fromkeys((v for v in node.eqn.outvars if alike(v, node)), merged))
    return paths.get(out, {}) if isinstance(out, Var) else {}
