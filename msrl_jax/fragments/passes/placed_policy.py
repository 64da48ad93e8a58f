"""A policy applied to devices and sizes: the layout, once everything fits."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from msrl_jax.fragments.placement import AXES, Device, DistributionPolicy, Layout, Placement
from msrl_jax.fragments.support.checks import shown, suggestion


def check_devices(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Returns the devices as a tuple; raises an error if there are none, or if an entry is not a device or appears twice."""
    if isinstance(devices, np.ndarray):  # such as the devices of a mesh
        devices = devices.ravel().tolist()
    if not isinstance(devices, Sequence):
        raise TypeError(f"devices={shown(devices)} must be a sequence of devices, such as jax.devices()[:4]")
    if not devices:
        raise ValueError("devices is empty; pass at least one, such as jax.devices()[:1], or omit it to use all")
    if invalid := [device for device in devices if not hasattr(device, "process_index")]:
        raise TypeError(f"devices has {shown(invalid[0])}, which is not a device; use those of jax.devices()")
    if duplicates := [device for i, device in enumerate(devices) if device in devices[:i]]:
        raise ValueError(f"devices has {duplicates[0]} twice; pass every device once")
    return tuple(devices)


def round_robin_by_process(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Interleaves devices over processes: the first of each process, then the second of each, and so on.

    A policy then uses equally many devices of each process, so that parts exchange data within a process.
    """
    devices_by_process: dict[int, list[Device]] = {}
    for device in devices:
        devices_by_process.setdefault(device.process_index, []).append(device)
    rounds = itertools.zip_longest(*devices_by_process.values())
    return tuple(device for devices_of_round in rounds for device in devices_of_round if device is not None)


def _members_first(layout: Layout, sizes: Mapping[str, int]) -> Layout:
    """Splits only members, where divisible: members are independent, so no reduction spans devices."""

    def split_only_members(placement: Placement) -> Placement:
        rules = [rule for rule in placement.rules if rule[0] == "member"]
        if not rules or sizes.get("member", 1) % placement.mesh.shape[rules[0][1]]:
            return placement
        other_rules = [rule for rule in placement.rules if rule[0] != "member"]
        return replace(placement, rules=(*rules, *other_rules), separate=())

    return replace(layout, roles={role: split_only_members(placement) for role, placement in layout.roles.items()})


@dataclass(frozen=True)
class PlacedPolicy:
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
        axes = [*AXES, *(axis for placement in layout.placements for axis, _ in placement.rules)]
        for axis, leaves in self.leaves.items():
            if axis not in axes:
                raise ValueError(
                    f"axes of {leaves[0][0]} name the logical axis {axis!r}, which no placement of {layout.policy} splits"
                    f"{suggestion(axis, axes)}; the axes are {', '.join(dict.fromkeys(axes))}"
                )
        for placement in layout.placements:
            self._check_divides(placement, layout.policy)
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
            if axis not in (axes := [*AXES, *self.leaves]):
                raise ValueError(f"groups name the axis {axis!r}, which no leaf of the state has{suggestion(axis, axes)}")
            for path, size in self.leaves.get(axis, ()):
                if size % group:
                    raise ValueError(
                        f"groups[{axis!r}]={group} does not divide the {size} entries of {path}; use a divisor of {size}"
                    )

    def _check_divides(self, placement: Placement, policy: str) -> None:
        rules = [rule for rule in placement.rules if rule[0] in self.leaves]
        # The first axis determines the split. Other axes stay whole unless they divide or belong to separate arrays.
        for axis, mesh_axis in (rule for rule in rules if rule[0] in (rules[0][0], *placement.separate)):
            ways, group = placement.mesh.shape[mesh_axis], self.groups.get(axis, 1)
            if self.sizes[axis] % ways:
                fit = [n for n in range(1, len(placement.devices) + 1) if self.sizes[axis] % n == 0]
                in_groups = f" in groups of {group}, which stay on one device" if group > 1 else ""
                raise ValueError(
                    f"{self._describe_indivisible(axis, ways * group)} cannot be split over the {ways} devices of placement "
                    f"{placement.name!r}{in_groups}; use a multiple of {ways * group}, or give {placement.name!r} "
                    f"{' or '.join(map(str, fit))} devices in {policy}"
                )

    def _describe_indivisible(self, axis: str, ways: int) -> str:
        """Describes the size of an axis that does not divide; leaves may have several sizes along one axis."""
        path, size = next(leaf for leaf in self.leaves[axis] if leaf[1] % ways)
        if len({size for _, size in self.leaves[axis]}) == 1:
            return {"env": f"num_envs={size}", "shard": f"shards={size} of the replay buffer"}.get(
                axis, f"the size of axis {axis!r}={size}"
            )
        return f"axis {axis!r} of {path}, which has size {size},"
