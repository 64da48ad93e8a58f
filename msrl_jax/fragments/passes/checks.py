"""Checks between the passes: what is wrong with a loop, a policy or JAX's settings is refused before anything compiles."""

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from msrl_jax._compat import Atom, Jaxpr, Var, aval, jaxprs_in
from msrl_jax._spelling import suggestion
from msrl_jax.codecs import get
from msrl_jax.fragments.graph.marker import is_fragment
from msrl_jax.fragments.graph.nodes import Graph, Node, upstream
from msrl_jax.fragments.passes.instructions import Instruction, Run, walk
from msrl_jax.fragments.placement import Layout


def check_jit_is_on() -> None:
    """Raises RuntimeError under `jax.disable_jit`."""
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        raise RuntimeError(
            "jax.disable_jit is on, but a program consists of compiled code. Leave the context, or call the iteration itself "
            "to debug it line by line"
        )


def check_no_mesh_is_set() -> None:
    """Raises RuntimeError inside of `jax.set_mesh`."""
    if not (mesh := jax.sharding.get_abstract_mesh()).empty:
        raise RuntimeError(
            f"jax.set_mesh has set {mesh}, but training and its programs have meshes of their own, those of the policy. "
            "Leave the context; the policy and the devices that it is given say where a program runs"
        )


def check_effects(effects: Iterable[Any]) -> None:
    """Refuses callbacks to the host that several processes would have to keep in order; JAX cannot do that."""
    ordered = [effect for effect in effects if type(effect).__name__.startswith("Ordered")]
    if ordered and jax.process_count() > 1:
        names = ", ".join(sorted(map(str, ordered)))
        raise ValueError(
            f"the iteration has ordered callbacks to the host ({names}), which JAX cannot keep in order in "
            f"{jax.process_count()} processes; use ordered=False, or a single process"
        )


def check_host_calls(names: Sequence[str], layout: Layout) -> None:
    """Refuses calls of the host if a layout makes one program of everything, or several processes run."""
    if not names:
        return
    listed = ", ".join(map(repr, names))
    if len(layout.placements) == 1:
        raise ValueError(
            f"{layout.policy or 'the policy'} makes one program of the whole training loop, but the host has to call {listed} "
            "between programs; use MultiLearner, SingleLearnerCoarse, SingleLearnerFine, Environments or Central"
        )
    if jax.process_count() > 1:
        raise ValueError(f"the host calls {listed}, which works in one process only, and there are {jax.process_count()}")


def check_owners(graph: Graph) -> None:
    """Refuses two learners that update the same leaf of the state.

    The suffix of the role distinguishes learners, as in `"learner:critic"`. If a leaf passed through fragments of two learners
    within an iteration, each would undo the other's update. (Bodies of loops are not checked.)
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


def check_codecs(layout: Layout) -> None:
    """Refuses codecs that are unknown, or declared between placements that do not exist."""
    names = [p.name for p in layout.placements]
    for edge in layout.codecs:
        get(edge.codec)
        for name in (edge.source, edge.destination):
            if name not in names:
                raise ValueError(
                    f"{layout.policy} declares a codec from {edge.source!r} to {edge.destination!r}, but has no placement "
                    f"{name!r}: it has {', '.join(names)}"
                )


def check_codec_names(graph: Graph, layout: Layout) -> None:
    """Refuses codecs for values with a text in their names that no value has."""
    names = sorted({label for label in graph.labels.values() if label})
    for edge in layout.codecs:
        if not any(edge.only in name for name in names):
            near = suggestion(edge.only, names)
            raise ValueError(
                f"{layout.policy} packs values named {edge.only!r} from {edge.source!r} to {edge.destination!r}, but the "
                f"iteration has no such value{near}. program.explain() shows the names"
            )


def check_meshes(instructions: Sequence[Instruction]) -> None:
    """Refuses meshes inside of fragments whose devices are not those of the fragment's placement, in order."""
    for run in (i for i, _ in walk(instructions) if isinstance(i, Run)):
        own = run.placement.devices
        for name, mesh in _meshes(run.jaxpr.jaxpr):
            devices = tuple(mesh.devices.flat)
            if devices != own:
                raise ValueError(
                    f"{run.name!r} has a `{name}` over a mesh of its own, {_names(devices)}, but the policy places it at "
                    f"{run.placement}. Make the mesh of these devices in this order, leave the split to the placement (declare "
                    "it with `axes`), or choose a policy whose placement has the devices of the mesh"
                )


def _names(devices: Iterable[Any]) -> str:
    return f"[{', '.join(f'{d.platform}:{d.id}' for d in devices)}]"


def _meshes(jaxpr: Jaxpr) -> Iterator[tuple[str, Mesh]]:
    for eqn in (e for inner in jaxprs_in(jaxpr) for e in inner.eqns):
        params = [v for k, v in eqn.params.items() if k != "ctx_mesh"]  # the mesh that was set around a call
        for leaf in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Mesh | NamedSharding)):
            mesh = leaf.mesh if isinstance(leaf, NamedSharding) else leaf
            if isinstance(mesh, Mesh) and not mesh.empty:
                yield eqn.primitive.name, mesh
