"""Refuses settings of JAX, iterations and policies that cannot work, before anything compiles."""

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

import jax
from jax.sharding import Mesh, NamedSharding

from msrl_jax._compat import Atom, Jaxpr, JaxprEqn, Var, aval, equations_in
from msrl_jax.fragments.codecs import get
from msrl_jax.fragments.graph.marker import is_fragment
from msrl_jax.fragments.graph.nodes import Graph, Node
from msrl_jax.fragments.passes.instructions import Instruction, RunProgram, walk
from msrl_jax.fragments.placement import Layout, device_names
from msrl_jax.fragments.support.checks import suggestion


def check_settings() -> None:
    """Raises RuntimeError under settings of JAX that do not go with programs."""
    check_jit_is_on()
    check_no_mesh_is_set()


def check_graph(graph: Graph, effects: Iterable[object], layout: Layout) -> None:
    """Refuses an iteration that does not fit the layout, or that several processes or learners cannot share."""
    check_effects(effects)
    check_host_calls(graph.host_calls, layout)
    check_disjoint_learners(graph)
    check_codecs(graph, layout)


def check_jit_is_on() -> None:
    """Raises RuntimeError under `jax.disable_jit`."""
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        raise RuntimeError(
            "jax.disable_jit is on, but a program consists of compiled code. Leave the context, or call the iteration itself "
            "to debug it line by line"
        )


def check_no_mesh_is_set() -> None:
    """Raises RuntimeError inside `jax.set_mesh`."""
    if not (mesh := jax.sharding.get_abstract_mesh()).empty:
        raise RuntimeError(
            f"jax.set_mesh has set {mesh}, but training and its programs use their own meshes, those of the policy. "
            "Leave the context; the policy and its devices determine where a program runs"
        )


def check_effects(effects: Iterable[object]) -> None:
    """Rejects ordered host callbacks with several processes, which JAX cannot keep in order."""
    ordered = [effect for effect in effects if type(effect).__name__.startswith("Ordered")]
    if ordered and jax.process_count() > 1:
        names = ", ".join(sorted(map(str, ordered)))
        raise ValueError(
            f"the iteration has ordered callbacks to the host ({names}), which JAX cannot keep in order in "
            f"{jax.process_count()} processes; use ordered=False, or a single process"
        )


def check_host_calls(names: Sequence[str], layout: Layout) -> None:
    """Rejects host calls if a layout has a single program, or if there are several processes."""
    if not names:
        return
    listed = ", ".join(map(repr, names))
    if len(layout.placements) == 1:
        raise ValueError(
            f"{layout.policy or 'the policy'} makes one program of the whole training loop, but the host has to call {listed} "
            "between programs; use a policy with several placements, such as MultiLearner"
        )
    if jax.process_count() > 1:
        raise ValueError(f"the host calls {listed}, which works only in one process, and there are {jax.process_count()}")


def check_disjoint_learners(graph: Graph) -> None:
    """Refuses two learners that update the same leaf of the state.

    The suffix of the role distinguishes learners, as in `"learner:critic"`. If a leaf passed through fragments of two learners
    within an iteration, each would undo the other's update. (Bodies of loops are not checked.)
    """
    region = graph.region
    owners: list[dict[str, str]] = [{} for _ in region.carry]  # role -> fragment
    from_leaves = _propagate(
        {leaf: 1 << i for i, leaf in enumerate(region.carry)}, region.nodes, lambda eqn: (eqn.invars, eqn.outvars)
    )
    ends: dict[Var, int] = defaultdict(int)
    for i, out in enumerate(region.next_carry):
        if isinstance(out, Var):
            ends[out] |= 1 << i
    to_ends = _propagate(ends, region.nodes[::-1], lambda eqn: (eqn.outvars, eqn.invars))
    for node in region.nodes:
        if is_fragment(node.eqn) and (role := node.eqn.params["role"]).startswith("learner:"):
            before, after = _merge_by_type(node.eqn.invars, from_leaves), _merge_by_type(node.eqn.outvars, to_ends)
            updated = functools.reduce(operator.or_, (before[kind] & after[kind] for kind in before), 0)
            for i in range(updated.bit_length()):
                if updated >> i & 1:
                    owners[i].setdefault(role, node.eqn.params["name"])
    for leaf, fragments_by_role in zip(region.carry, owners, strict=True):
        if len(fragments_by_role) > 1:
            names = " and ".join(f"fragment {name!r} (role {role!r})" for role, name in fragments_by_role.items())
            raise ValueError(
                f"{graph.labels.get(leaf, 'a leaf of the state')} is updated by {names}: two learners update the same "
                "parameters. Give each learner its own parameters, or both fragments the same role"
            )


def _propagate(
    starts: Mapping[Var, int], nodes: Iterable[Node], ends_of: Callable[[JaxprEqn], tuple[Sequence[Atom], Sequence[Atom]]]
) -> dict[Var, int]:
    """Returns the starts from which a path of values of one type leads to each variable, as bits of an integer."""
    bits = defaultdict(int, starts)
    for node in nodes:
        entries, exits = ends_of(node.eqn)
        by_type = _merge_by_type(entries, bits)
        for var in exits:
            if isinstance(var, Var):
                bits[var] |= by_type[_shape_and_dtype(var)]
    return bits


def _merge_by_type(atoms: Iterable[Atom], bits: Mapping[Var, int]) -> dict[Hashable, int]:
    bits_by_type: dict[Hashable, int] = defaultdict(int)
    for atom in atoms:
        if isinstance(atom, Var):
            bits_by_type[_shape_and_dtype(atom)] |= bits.get(atom, 0)
    return bits_by_type


def _shape_and_dtype(var: Var) -> Hashable:
    return aval(var).shape, aval(var).dtype


def check_codecs(graph: Graph, layout: Layout) -> None:
    """Rejects codecs that are unknown, that are between unknown placements, or whose `only` matches no name."""
    placements = [p.name for p in layout.placements]
    names = sorted({label for label in graph.labels.values() if label})
    for edge in layout.codecs:
        get(edge.codec)
        for name in (edge.source, edge.destination):
            if name not in placements:
                raise ValueError(
                    f"{layout.policy} declares a codec from {edge.source!r} to {edge.destination!r}, but has no placement "
                    f"{name!r}: it has {', '.join(placements)}"
                )
        if not any(edge.only in name for name in names):
            raise ValueError(
                f"{layout.policy} packs values named {edge.only!r} from {edge.source!r} to {edge.destination!r}, but the "
                f"iteration has no such value{suggestion(edge.only, names)}. program.explain() shows the names"
            )


def check_meshes(instructions: Sequence[Instruction]) -> None:
    """Rejects meshes inside fragments whose devices are not those of the fragment's placement, in order."""
    for run in (i for i, _ in walk(instructions) if isinstance(i, RunProgram)):
        placement_devices = run.placement.devices
        for name, mesh in _find_meshes(run.jaxpr.jaxpr):
            devices = tuple(mesh.devices.flat)
            if devices != placement_devices:
                raise ValueError(
                    f"{run.name!r} has a `{name}` over its own mesh, [{', '.join(device_names(devices))}], but the policy "
                    f"places it at {run.placement}. Use these devices in this order for the mesh, leave the split to the "
                    "placement (declare it with `axes`), or choose a policy whose placement has the devices of the mesh"
                )


def _find_meshes(jaxpr: Jaxpr) -> Iterator[tuple[str, Mesh]]:
    for eqn in equations_in(jaxpr):
        params = [v for k, v in eqn.params.items() if k != "ctx_mesh"]  # the mesh that was set in the calling context
        for leaf in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Mesh | NamedSharding)):
            mesh = leaf.mesh if isinstance(leaf, NamedSharding) else leaf
            if isinstance(mesh, Mesh) and not mesh.empty:
                yield eqn.primitive.name, mesh
