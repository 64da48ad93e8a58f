"""Applies a policy to devices and sizes, and rejects invalid policies, loops and JAX settings before compilation."""

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from msrl_jax._compat import Atom, Jaxpr, Var, aval, jaxprs_in
from msrl_jax.fragments.codecs import get
from msrl_jax.fragments.graph.marker import is_fragment
from msrl_jax.fragments.graph.nodes import Graph, Node, upstream
from msrl_jax.fragments.passes.instructions import Instruction, Run, walk
from msrl_jax.fragments.placement import AXES, Device, DistributionPolicy, Layout, Placement, device_names
from msrl_jax.fragments.support.checks import shown, suggestion


def check_devices(devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices as a tuple; raises an error if there are none, or if an entry is not a device or appears twice."""
    if isinstance(devices, np.ndarray):  # such as the devices of a mesh
        devices = devices.ravel().tolist()
    if not isinstance(devices, Sequence):
        raise TypeError(f"devices={shown(devices)} must be a sequence of devices, such as jax.devices()[:4]")
    if not devices:
        raise ValueError("devices is empty; pass at least one, such as jax.devices()[:1], or omit it to use all")
    if wrong := [device for device in devices if not hasattr(device, "process_index")]:
        raise TypeError(f"devices has {shown(wrong[0])}, which is not a device; use those of jax.devices()")
    twice = [device for i, device in enumerate(devices) if device in devices[:i]]
    if twice:
        raise ValueError(f"devices has {twice[0]} twice; pass every device once")
    return tuple(devices)


def interleaved(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Interleaves devices over processes: the first of each process, then the second of each, and so on.

    A policy then uses equally many devices of each process, so that parts exchange data within a process.
    """
    hands: dict[int, list[Device]] = {}
    for device in devices:
        hands.setdefault(device.process_index, []).append(device)
    turns = itertools.zip_longest(*hands.values())
    return tuple(device for turn in turns for device in turn if device is not None)


def _members_first(layout: Layout, sizes: Mapping[str, int]) -> Layout:
    """Splits only members, where divisible: members are independent, so no reduction spans devices."""

    def only_members(placement: Placement) -> Placement:
        rules = [rule for rule in placement.rules if rule[0] == "member"]
        if not rules or sizes.get("member", 1) % placement.mesh.shape[rules[0][1]]:
            return placement
        others = [rule for rule in placement.rules if rule[0] != "member"]
        return replace(placement, rules=(*rules, *others), separate=())

    return replace(layout, roles={role: only_members(placement) for role, placement in layout.roles.items()})


@dataclass(frozen=True)
class Fit:
    """A policy, with the devices and axis sizes that it splits."""

    policy: DistributionPolicy
    devices: tuple[Device, ...]
    leaves: Mapping[str, Sequence[tuple[str, int]]]  # logical axis -> the leaves of the state with it: path, size along it
    groups: Mapping[str, int] = field(default_factory=dict[str, int])  # number of adjacent entries that stay on one device

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each logical axis, in groups; the greatest common divisor if leaves differ."""
        return {a: math.gcd(*(size for _, size in leaves)) // self.groups.get(a, 1) for a, leaves in self.leaves.items()}

    @cached_property
    def layout(self) -> Layout:
        """The policy's layout, after checking its devices, groups and logical axes."""
        if not isinstance(self.policy, DistributionPolicy) or isinstance(self.policy, type):
            name = self.policy if isinstance(self.policy, str) else "GPUOnly"
            raise TypeError(
                f"policy={shown(self.policy)} is not a policy: it needs a method layout(devices, sizes), like "
                f"msrl_jax.policies.get({name!r})"
            )
        self._check_groups()
        layout = self.policy.layout(list(self.devices), self.sizes)
        if not isinstance(layout, Layout):
            raise TypeError(f"{shown(self.policy)}.layout(...) returned {shown(layout)}; return a msrl_jax.policies.Layout")
        layout = _members_first(layout, self.sizes)
        known = [*AXES, *(axis for placement in layout.placements for axis, _ in placement.rules)]
        for axis, leaves in self.leaves.items():
            if axis not in known:
                raise ValueError(
                    f"axes of {leaves[0][0]} name the logical axis {axis!r}, which no placement of {layout.policy} splits"
                    f"{suggestion(axis, known)}; the axes are {', '.join(dict.fromkeys(known))}"
                )
        for placement in layout.placements:
            self._check(placement, layout.policy)
        return layout

    @property
    def idle(self) -> tuple[Device, ...]:
        """The devices that the policy does not use."""
        return tuple(d for d in self.devices if d not in self.layout.devices)

    def _check_groups(self) -> None:
        if not isinstance(self.groups, Mapping):
            raise TypeError(f"groups={shown(self.groups)} must map logical axes to numbers, such as {{'env': 4}}")
        for axis, group in self.groups.items():
            if not isinstance(group, int | np.integer) or isinstance(group, bool) or group < 1:
                raise ValueError(f"groups[{axis!r}]={group!r} must be an integer of at least 1")
            if axis not in (known := [*AXES, *self.leaves]):
                raise ValueError(f"groups name the axis {axis!r}, which no leaf of the state has{suggestion(axis, known)}")
            for path, size in self.leaves.get(axis, ()):
                if size % group:
                    raise ValueError(
                        f"groups[{axis!r}]={group} does not divide the {size} entries of {path}; use a divisor of {size}"
                    )

    def _check(self, placement: Placement, policy: str) -> None:
        given = [rule for rule in placement.rules if rule[0] in self.leaves]
        # The first axis determines the split. Other axes stay whole unless they divide or belong to separate arrays.
        for axis, mesh_axis in (rule for rule in given if rule[0] in (given[0][0], *placement.separate)):
            ways, group = placement.mesh.shape[mesh_axis], self.groups.get(axis, 1)
            if self.sizes[axis] % ways:
                fit = [n for n in range(1, len(placement.devices) + 1) if self.sizes[axis] % n == 0]
                together = f" in groups of {group}, which stay on one device" if group > 1 else ""
                raise ValueError(
                    f"{self._indivisible(axis, ways * group)} cannot be split over the {ways} devices of placement "
                    f"{placement.name!r}{together}; use a multiple of {ways * group}, or give {placement.name!r} "
                    f"{' or '.join(map(str, fit))} devices in {policy}"
                )

    def _indivisible(self, axis: str, ways: int) -> str:
        """Describes the size of an axis that does not divide; leaves may have several sizes along one axis."""
        path, size = next(leaf for leaf in self.leaves[axis] if leaf[1] % ways)
        if len({size for _, size in self.leaves[axis]}) == 1:
            return {"env": f"num_envs={size}", "shard": f"shards={size} of the replay buffer"}.get(
                axis, f"the size of axis {axis!r}={size}"
            )
        return f"axis {axis!r} of {path}, which has size {size},"


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


def check_effects(effects: Iterable[Any]) -> None:
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
            "between programs; use MultiLearner, SingleLearnerCoarse, SingleLearnerFine, Environments or Central"
        )
    if jax.process_count() > 1:
        raise ValueError(f"the host calls {listed}, which works only in one process, and there are {jax.process_count()}")


def check_owners(graph: Graph) -> None:
    """Rejects two learners that update the same leaf of the state.

    The suffix of a role distinguishes learners, as in `"learner:critic"`. If a leaf passed through fragments of two learners in
    one iteration, each would undo the other's update. (Bodies of loops are not checked.)
    """
    region = graph.region
    producers = region.producers
    for leaf, out in zip(region.carry, region.next_carry, strict=True):
        owners = _owners(producers, out, leaf)
        if len(owners) > 1:
            names = " and ".join(f"fragment {name!r} (role {role!r})" for role, name in owners.items())
            raise ValueError(
                f"{graph.labels.get(leaf, 'a leaf of the state')} is updated by {names}: two learners claim the same "
                "parameters. Give each learner its own parameters, or both fragments the same role"
            )


def _owners(producers: Mapping[Var, Node], out: Atom, leaf: Var) -> dict[str, str]:
    """The learners between `leaf` and `out`, role -> fragment, along values of the leaf's type."""
    kind = aval(leaf).shape, aval(leaf).dtype
    alike = lambda var, _: (aval(var).shape, aval(var).dtype) == kind  # noqa: E731
    paths: dict[Atom, dict[str, str]] = {leaf: {}}  # for the variables that a path leads to
    for node in upstream(producers, [out], alike):
        before = [paths[a] for a in node.eqn.invars if isinstance(a, Var) and a in paths]
        if before:
            merged = functools.reduce(operator.or_, before)
            if is_fragment(node.eqn) and node.eqn.params["role"].startswith("learner:"):
                merged = merged | {node.eqn.params["role"]: node.eqn.params["name"]} | merged
            paths.update(dict.fromkeys((v for v in node.eqn.outvars if alike(v, node)), merged))
    return paths.get(out, {}) if isinstance(out, Var) else {}


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
            near = suggestion(edge.only, names)
            raise ValueError(
                f"{layout.policy} packs values named {edge.only!r} from {edge.source!r} to {edge.destination!r}, but the "
                f"iteration has no such value{near}. program.explain() shows the names"
            )


def check_meshes(instructions: Sequence[Instruction]) -> None:
    """Rejects meshes inside fragments whose devices are not those of the fragment's placement, in order."""
    for run in (i for i, _ in walk(instructions) if isinstance(i, Run)):
        own = run.placement.devices
        for name, mesh in _meshes(run.jaxpr.jaxpr):
            devices = tuple(mesh.devices.flat)
            if devices != own:
                raise ValueError(
                    f"{run.name!r} has a `{name}` over its own mesh, [{', '.join(device_names(devices))}], but the policy "
                    f"places it at {run.placement}. Use these devices in this order for the mesh, leave the split to the "
                    "placement (declare it with `axes`), or choose a policy whose placement has the devices of the mesh"
                )


def _meshes(jaxpr: Jaxpr) -> Iterator[tuple[str, Mesh]]:
    for eqn in (e for inner in jaxprs_in(jaxpr) for e in inner.eqns):
        params = [v for k, v in eqn.params.items() if k != "ctx_mesh"]  # the mesh that was set in the calling context
        for leaf in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Mesh | NamedSharding)):
            mesh = leaf.mesh if isinstance(leaf, NamedSharding) else leaf
            if isinstance(mesh, Mesh) and not mesh.empty:
                yield eqn.primitive.name, mesh
