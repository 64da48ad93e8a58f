"""Applies a policy to devices and sizes, and refuses bad policies, loops and settings of JAX before anything compiles."""

import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from msrl_jax._compat import Atom, Jaxpr, JaxprEqn, Var, aval, jaxprs_in
from msrl_jax.fragments.codecs import get
from msrl_jax.fragments.graph.marker import is_fragment
from msrl_jax.fragments.graph.nodes import Graph, Node
from msrl_jax.fragments.passes.instructions import Instruction, Run, walk
from msrl_jax.fragments.placement import AXES, Device, DistributionPolicy, Layout, Placement, device_names
from msrl_jax.fragments.support.checks import shown, suggestion


def check_devices(devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices as a tuple, if there are some, each is a device and appears once."""
    if isinstance(devices, np.ndarray):  # such as those of a mesh
        devices = devices.ravel().tolist()
    if not isinstance(devices, Sequence):
        raise TypeError(f"devices={shown(devices)} must be a sequence of devices, such as jax.devices()[:4]")
    if not devices:
        raise ValueError("devices is empty; give at least one, such as jax.devices()[:1], or leave it out for all")
    if wrong := [device for device in devices if not hasattr(device, "process_index")]:
        raise TypeError(f"devices holds {shown(wrong[0])}, which is no device; give those of jax.devices()")
    twice = [device for i, device in enumerate(devices) if device in devices[:i]]
    if twice:
        raise ValueError(f"devices names {twice[0]} twice; name every device once")
    return tuple(devices)


def interleaved(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Interleaves devices over processes: the first of each process, then the second of each, and so on.

    A policy then takes equally many devices from each process, so that parts exchange data within a process.
    """
    hands: dict[int, list[Device]] = {}
    for device in devices:
        hands.setdefault(device.process_index, []).append(device)
    turns = itertools.zip_longest(*hands.values())
    return tuple(device for turn in turns for device in turn if device is not None)


def _members_first(layout: Layout, sizes: Mapping[str, int]) -> Layout:
    """Splits members, where they divide, and nothing else: members are independent, so no sum crosses devices."""

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
    groups: Mapping[str, int] = field(default_factory=dict[str, int])  # how many adjacent entries of it stay on one device

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each logical axis, in groups; the greatest common divisor where leaves differ."""
        return {a: math.gcd(*(size for _, size in leaves)) // self.groups.get(a, 1) for a, leaves in self.leaves.items()}

    @cached_property
    def layout(self) -> Layout:
        """The policy's layout, if its devices, groups and logical axes fit."""
        if not isinstance(self.policy, DistributionPolicy) or isinstance(self.policy, type):
            name = self.policy if isinstance(self.policy, str) else "GPUOnly"
            raise TypeError(
                f"policy={shown(self.policy)} is no policy: it needs a method layout(devices, sizes), as that of "
                f"msrl_jax.policies.get({name!r}) has"
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
        # The work is divided over the first axis. Others that do not divide stay whole, unless they are of separate arrays.
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
        """Names the size of an axis that does not divide; leaves may have several sizes along one axis."""
        path, size = next(leaf for leaf in self.leaves[axis] if leaf[1] % ways)
        if len({size for _, size in self.leaves[axis]}) == 1:
            return {"env": f"num_envs={size}", "shard": f"shards={size} of the replay buffer"}.get(
                axis, f"the size of axis {axis!r}={size}"
            )
        return f"axis {axis!r} of {path}, which is of size {size},"


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
    owners: list[dict[str, str]] = [{} for _ in region.carry]  # role -> fragment
    from_leaves = _reached(
        {leaf: 1 << i for i, leaf in enumerate(region.carry)}, region.nodes, lambda eqn: (eqn.invars, eqn.outvars)
    )
    ends: dict[Var, int] = defaultdict(int)
    for i, out in enumerate(region.next_carry):
        if isinstance(out, Var):
            ends[out] |= 1 << i
    to_ends = _reached(ends, region.nodes[::-1], lambda eqn: (eqn.outvars, eqn.invars))
    for node in region.nodes:
        if is_fragment(node.eqn) and (role := node.eqn.params["role"]).startswith("learner:"):
            before, after = _by_type(node.eqn.invars, from_leaves), _by_type(node.eqn.outvars, to_ends)
            updated = functools.reduce(operator.or_, (before[kind] & after[kind] for kind in before), 0)
            for i in range(updated.bit_length()):
                if updated >> i & 1:
                    owners[i].setdefault(role, node.eqn.params["name"])
    for leaf, found in zip(region.carry, owners, strict=True):
        if len(found) > 1:
            names = " and ".join(f"fragment {name!r} (role {role!r})" for role, name in found.items())
            raise ValueError(
                f"{graph.labels.get(leaf, 'a leaf of the state')} is updated by {names}: two learners claim the same "
                "parameters. Give each learner parameters of its own, or both fragments the same role"
            )


def _reached(
    starts: Mapping[Var, int], nodes: Iterable[Node], ends_of: Callable[[JaxprEqn], tuple[Sequence[Atom], Sequence[Atom]]]
) -> dict[Var, int]:
    """The starts from which a path of values of one type leads to each variable, as bits of an integer."""
    reached = defaultdict(int, starts)
    for node in nodes:
        entries, exits = ends_of(node.eqn)
        by_type = _by_type(entries, reached)
        for var in exits:
            if isinstance(var, Var):
                reached[var] |= by_type[_type(var)]
    return reached


def _by_type(atoms: Iterable[Atom], bits: Mapping[Var, int]) -> dict[Any, int]:
    found: dict[Any, int] = defaultdict(int)
    for atom in atoms:
        if isinstance(atom, Var):
            found[_type(atom)] |= bits.get(atom, 0)
    return found


def _type(var: Var) -> Any:
    return aval(var).shape, aval(var).dtype


def check_codecs(graph: Graph, layout: Layout) -> None:
    """Refuses codecs that are unknown, between placements that do not exist, or for values with a text that no name has."""
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
    """Refuses meshes inside of fragments whose devices are not those of the fragment's placement, in order."""
    for run in (i for i, _ in walk(instructions) if isinstance(i, Run)):
        own = run.placement.devices
        for name, mesh in _meshes(run.jaxpr.jaxpr):
            devices = tuple(mesh.devices.flat)
            if devices != own:
                raise ValueError(
                    f"{run.name!r} has a `{name}` over a mesh of its own, [{', '.join(device_names(devices))}], but the policy "
                    f"places it at {run.placement}. Make the mesh of these devices in this order, leave the split to the "
                    "placement (declare it with `axes`), or choose a policy whose placement has the devices of the mesh"
                )


def _meshes(jaxpr: Jaxpr) -> Iterator[tuple[str, Mesh]]:
    for eqn in (e for inner in jaxprs_in(jaxpr) for e in inner.eqns):
        params = [v for k, v in eqn.params.items() if k != "ctx_mesh"]  # the mesh that was set around a call
        for leaf in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Mesh | NamedSharding)):
            mesh = leaf.mesh if isinstance(leaf, NamedSharding) else leaf
            if isinstance(mesh, Mesh) and not mesh.empty:
                yield eqn.primitive.name, mesh
