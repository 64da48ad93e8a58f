"""How a policy fits devices and sizes: what cannot be split is refused, and devices that stay idle are reported."""

import dataclasses
import itertools
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from msrl_jax.fragments.placement import Device, DistributionPolicy, Layout, Placement


@dataclass(frozen=True)
class Fit:
    """A policy's layout, and what it was made from.

    Attributes:
      policy: the distribution policy.
      devices: the devices that it was given.
      leaves: logical axis -> the leaves of the state that carry it: path, and size along the axis.
    """

    policy: DistributionPolicy
    devices: tuple[Device, ...]
    leaves: Mapping[str, Sequence[tuple[str, int]]]

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each logical axis: the greatest common divisor where leaves differ, as groups of environments do."""
        return {axis: math.gcd(*(size for _, size in leaves)) for axis, leaves in self.leaves.items()}

    def layout(self) -> Layout:
        """The policy's layout.

        Returns:
          The layout.

        Raises:
          ValueError: if the devices do not fit the policy, or a logical axis cannot be split over those of a placement.
        """
        layout = self.policy.layout(list(self.devices), self.sizes)
        for placement in layout.placements:
            self._check(placement, layout.policy)
        return layout

    def idle(self) -> tuple[Device, ...]:
        """The devices that the policy does not use."""
        used = self.layout().devices
        return tuple(d for d in self.devices if d not in used)

    def warn_of_idle(self) -> str | None:
        """What to say of devices that stay idle, and how to use them; None if there are none."""
        idle, total = self.idle(), len(self.devices)
        if not idle:
            return None
        envs = f" with num_envs={self._num_envs()}" if self._num_envs() else ""
        names = ", ".join(f"{d.platform}:{d.id}" for d in idle)
        stay = "stay" if len(idle) > 1 else "stays"
        fact = f"{len(idle)} of {total} devices {stay} idle ({names}): {self.layout().policy} uses {total - len(idle)}{envs}"
        ways = [*self._sizes_that_fill(), *self._policies_that_fill()]
        return f"{fact}. {' or '.join(ways)} would use all {total}" if ways else fact

    def _num_envs(self) -> int:
        """The number of environments, if all that belongs to them is of that size; else 0."""
        return self.sizes["env"] if len({size for _, size in self.leaves.get("env", ())}) == 1 else 0

    def _fills(self) -> bool:
        try:
            return not self.idle()
        except Exception:  # a policy may refuse what it does not expect in any way
            return False

    def _sizes_that_fill(self) -> list[str]:
        """The nearest numbers of environments, below and above, with which no device is idle."""
        now = self._num_envs()
        reach = len(self.devices) if now else 0  # some multiple of any number of them is no farther
        found = []
        for numbers in (range(now - 1, max(now - reach, 1) - 1, -1), range(now + 1, now + reach + 1)):
            fitting = (n for n in numbers if dataclasses.replace(self, leaves={**self.leaves, "env": [("", n)]})._fills())
            found += [f"num_envs={n}" for n in itertools.islice(fitting, 1)]
        return found

    def _policies_that_fill(self) -> list[str]:
        """The policy with another number of devices somewhere, and if need be all others its own choice."""
        if not dataclasses.is_dataclass(self.policy) or isinstance(self.policy, type):
            return []
        hints = typing.get_type_hints(type(self.policy))
        numbers = {name: hint for name, hint in hints.items() if hint in (int, int | None)}
        free = {name: None for name, hint in numbers.items() if hint == int | None}
        found = []
        for others in ({}, free):
            for name in numbers:
                fits = (self._with(others | {name: n}) for n in range(1, len(self.devices) + 1))
                filling = (fit.layout().policy for fit in fits if fit is not None and fit._fills())
                found += itertools.islice(filling, 1)
            if found:
                break
        return found

    def _with(self, changes: Mapping[str, int | None]) -> "Fit | None":
        try:
            return dataclasses.replace(self, policy=dataclasses.replace(cast(Any, self.policy), **changes))
        except Exception:
            return None

    def _check(self, placement: Placement, policy: str) -> None:
        split: set[str] = set()
        for axis, mesh_axis in placement.rules:
            if axis not in self.leaves or mesh_axis in split:
                continue
            split.add(mesh_axis)
            ways = placement.mesh.shape[mesh_axis]
            if self.sizes[axis] % ways:
                fit = [n for n in range(1, len(placement.devices) + 1) if self.sizes[axis] % n == 0]
                raise ValueError(
                    f"{self._indivisible(axis, ways)} cannot be split over the {ways} devices of placement {placement.name!r}; "
                    f"use a multiple of {ways}, or give {placement.name!r} {' or '.join(map(str, fit))} devices in {policy}"
                )

    def _indivisible(self, axis: str, ways: int) -> str:
        """What to call the size of an axis that does not divide: leaves may have it in several, as batches and groups do."""
        path, size = next(leaf for leaf in self.leaves[axis] if leaf[1] % ways)
        if len({size for _, size in self.leaves[axis]}) == 1:
            return f"num_envs={size}" if axis == "env" else f"the size of axis {axis!r}={size}"
        return f"axis {axis!r} of {path}, which is of size {size},"
