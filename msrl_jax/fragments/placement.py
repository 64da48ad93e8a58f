"""Where fragments run: a placement is a named sub-mesh with rules for logical axes; a layout maps roles to placements."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from msrl_jax.fragments.codecs import Codec


class Device(Protocol):
    """The attributes of `jax.Device` that the compiler uses."""

    id: int
    platform: str  # such as "cpu", "gpu" or "tpu"
    process_index: int  # the number of the process that owns the device


def device_names(devices: Iterable[Device]) -> tuple[str, ...]:
    """Names of devices in plans and errors, such as `cpu:0`."""
    return tuple(f"{d.platform}:{d.id}" for d in devices)


AXES = ("env", "worker", "shard", "agent", "member")
"""The logical axes of the algorithms: environments, asynchronous workers, shards of replay buffers, agents, seeds."""

HOST = "host"
"""The role of host fragments. A policy need not list it."""

# A role that is not listed in a layout gets the placement of a role that it exchanges data with.
_FALLBACK = {
    "actor": ("env",),
    "env": ("actor",),
    "server": ("learner",),
    "buffer": ("learner",),
    "evaluator": ("actor", "env"),
}


@dataclass(frozen=True)
class Placement:
    """A named sub-mesh, with rules that map logical axes to its axes.

    Attributes:
      name: its name in plans and errors.
      mesh: the devices. Its axes are of type Auto: XLA's partitioner inserts the collectives.
      rules: pairs (logical axis, mesh axis); the first rule that matches a dimension wins. Axes without a rule stay whole.
      scatter: a mesh axis for arrays that no rule splits: they are split over it along their largest divisible dimension. None
        replicates them. A parameter server uses it to keep one shard of every tensor on each device.
      separate: logical axes of separate arrays, which must be divisible like the first axis of a state that has a rule.
    """

    name: str
    mesh: Mesh
    rules: tuple[tuple[str, str], ...] = (("env", "devices"),)
    scatter: str | None = None
    separate: tuple[str, ...] = ("worker", "shard")  # every worker has its own networks, every shard its own rows

    @classmethod
    def over(cls, name: str, devices: Sequence[Device], *, split: Sequence[str] = AXES, scatter: bool = False) -> "Placement":
        """Makes a placement on a one-dimensional mesh with the axis "devices".

        Args:
          name: its name in plans and errors.
          devices: the devices, in order; those of one process become adjacent.
          split: the logical axes to split over the devices; an array with several of them is split along the first.
          scatter: whether to split arrays without these axes along their largest dimension instead of replicating them.

        Returns:
          The placement.

        Raises:
          ValueError: if no device is given.
        """
        if not len(devices):
            raise ValueError(f"placement {name!r} has no devices; its policy needs more devices than it got")
        devices = sorted(devices, key=lambda d: d.process_index)
        rules = tuple((logical, "devices") for logical in split)
        mesh = Mesh(np.asarray(devices, dtype=object), ("devices",))
        return cls(name, mesh, rules, "devices" if scatter else None)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of the mesh, in order."""
        return tuple(self.mesh.devices.flat)

    def split(self, axis: str) -> int:
        """Returns the number of devices over which the rules split a logical axis."""
        return next((self.mesh.shape[m] for logical, m in self.rules if logical == axis), 1)

    def sharding(self, logical: PartitionSpec, shape: Sequence[int]) -> NamedSharding:
        """Returns the sharding of an array: split where a rule applies and the dimension is divisible, otherwise whole.

        `logical` has a logical axis name (or a tuple of candidates, or None) for each leading dimension.
        """
        names = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in logical]
        spec: list[str | None] = [None] * len(names)
        for axis, mesh_axis in self.rules:
            for d, (candidates, size) in enumerate(zip(names, shape, strict=False)):
                ways = self.mesh.shape[mesh_axis]
                fits = ways > 1 and size % ways == 0
                if axis in candidates and spec[d] is None and mesh_axis not in spec and fits:
                    spec[d] = mesh_axis
        if self.scatter is not None and self.scatter not in spec:
            ways = self.mesh.shape[self.scatter]
            spec += [None] * (len(shape) - len(spec))
            free = [d for d, size in enumerate(shape) if spec[d] is None and size >= ways and size % ways == 0]
            if free and ways > 1:
                spec[max(free, key=lambda d: shape[d])] = self.scatter
        while spec and spec[-1] is None:
            spec.pop()
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def logical(self, sharding: NamedSharding) -> PartitionSpec:
        """Returns the logical axes (as tuples of candidates) of a sharding on this mesh; the inverse of the rules."""
        spec = []
        for entry in sharding.spec:
            axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
            spec.append(tuple(a for a, m in self.rules if m in axes) or None)
        return PartitionSpec(*spec)

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(device_names(self.devices))}]"


def one_per_mesh(placements: Iterable[Placement]) -> list[Placement]:
    """Returns the first placement of each mesh."""
    return list({p.mesh: p for p in reversed(list(placements))}.values())[::-1]


@dataclass(frozen=True)
class Edge:
    """A codec for values that are sent from one placement to another.

    Attributes:
      source: name of the sending placement.
      destination: name of the receiving placement.
      codec: a codec, or its name.
      only: packs only values whose label contains this text (`program.explain()` shows the labels); all if empty.
    """

    source: str
    destination: str
    codec: str | Codec
    only: str = ""


def check_staleness(staleness: int) -> None:
    """Raises ValueError unless the staleness is an integer of at least 0."""
    if not isinstance(staleness, int) or isinstance(staleness, bool) or staleness < 0:
        raise ValueError(f"staleness={staleness!r} must be an integer of at least 0 (iterations)")


@dataclass(frozen=True)
class Layout:
    """The decisions of a distribution policy: a placement for each role, the staleness of actors, and codecs.

    Attributes:
      roles: role -> placement. A role that is not listed gets the placement of its neighbor: "env" and "actor" of each
        other, "server" and "buffer" of "learner", "evaluator" of "actor". A role may have a suffix, such as
        "learner:critic": it gets the placement listed for it, otherwise that of "learner". The role "host" is on a CPU device
        of this process by default.
      staleness: number of iterations by which the parameters of actors lag behind those of a synchronous run.
      codecs: codecs for values that cross placements; the first that accepts an array is used.
      policy: the policy's name in plans and errors.
    """

    roles: Mapping[str, Placement]
    staleness: int = 0
    codecs: tuple[Edge, ...] = ()
    policy: str = field(default="", compare=False)

    def __post_init__(self):
        check_staleness(self.staleness)

    def placement(self, role: str, fragment: str = "") -> Placement:
        """Returns the placement of a role, for a fragment or, if it has no name, for values that no fragment computes.

        Raises ValueError if the layout has none.
        """
        general = role.partition(":")[0]
        neighbors = _FALLBACK.get(general, ())
        for candidate in (role, general, *neighbors):
            if candidate in self.roles:
                return self.roles[candidate]
        if general == HOST:
            return host_placement()
        if not fragment:
            raise ValueError(
                f"policy {self.policy or 'layout'} places {sorted(self.roles)}, but values that no fragment computes are with "
                f"the role {role!r}; add it to the policy's layout"
            )
        raise ValueError(
            f"fragment {fragment!r} has role {role!r}, for which policy {self.policy or 'layout'} has no placement; "
            f"it places {sorted(self.roles)}. Mark the fragment with one of these, optionally with a custom suffix "
            f"({f'{min(self.roles, default=HOST)}:{general}'!r}), or add {role!r} to the policy's layout"
        )

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The distinct placements, in the order of the roles."""
        return tuple(dict.fromkeys(self.roles.values()))

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices in use, without duplicates."""
        return tuple(dict.fromkeys(d for p in self.placements for d in p.devices))


def host_placement() -> Placement:
    """Returns the placement of arguments and results of host fragments: a CPU device of this process."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise RuntimeError(
            f"host fragments need a CPU device for their arrays ({error}); add it to JAX_PLATFORMS, as in 'cuda,cpu'"
        ) from None
    return Placement.over(HOST, [device], split=())


@runtime_checkable
class DistributionPolicy(Protocol):
    """Decides where the fragments of a training loop run: any object with this method."""

    def layout(self, devices: Sequence[Device], sizes: Mapping[str, int]) -> Layout:
        """Places the roles.

        Args:
          devices: the available devices, in order.
          sizes: the size of every logical axis of the training state, such as `{"env": 64}`.

        Returns:
          The layout.

        Raises:
          ValueError: if the policy does not support these devices or sizes.
        """
        ...
