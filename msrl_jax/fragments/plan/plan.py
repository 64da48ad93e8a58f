"""The plan of a compiled training loop: plain data that prints as a text table."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from msrl_jax.fragments.plan.cost import FragmentPlan
from msrl_jax.fragments.plan.hlo import Collective
from msrl_jax.fragments.plan.kernels import Launches
from msrl_jax.fragments.plan.picture import plan_svg
from msrl_jax.fragments.plan.text import table_of


@dataclass(frozen=True)
class ProgramPlan:
    """A program: `runs` per iteration; memory in bytes per device; the collectives that XLA inserted.

    If `collectives_known` is False, there may be more collectives, because the program's text could not be parsed completely.
    `launches` are those on accelerators; CPUs have none.
    """

    name: str
    placement: str
    runs: int
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    donated_bytes: int
    collectives: tuple[Collective, ...]
    collectives_known: bool = True
    launches: tuple[Launches, ...] = ()

    @property
    def memory_bytes(self) -> int:
        """Bytes that the program needs on each device while it runs."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes - self.donated_bytes

    @property
    def collective_bytes(self) -> int:
        """Bytes of the results of its collectives on each device, per iteration."""
        return sum(c.nbytes * c.times for c in self.collectives) * self.runs


@dataclass(frozen=True)
class Crossing:
    """A value that crosses placements."""

    value: str  # the path of a state's leaf, or of a fragment's result
    dtype: str  # its dtype, unpacked
    shape: tuple[int, ...]  # its shape, unpacked
    source: str  # the sending placement
    destination: str  # the receiving placement
    nbytes: int  # bytes received by all devices of the destination together
    times: int  # transfers per iteration
    codec: str  # name of the codec that packs it; empty if there is none
    unpacked_bytes: int  # bytes without the codec


@dataclass(frozen=True)
class HostCallPlan:
    """A host fragment: `calls` per iteration, with the bytes of its results."""

    name: str
    calls: int
    result_bytes: int


@dataclass(frozen=True)
class LoopPlan:
    """A loop controlled by the host: dispatched programs and transfers per training iteration."""

    fragments: tuple[str, ...]
    length: int
    programs: int
    transfers: int


@dataclass(frozen=True)
class RegisterPlan:
    """A delayed parameter of actors: the placement keeps its last `age` values, `nbytes` in total per device."""

    value: str
    placement: str
    nbytes: int
    age: int


@dataclass(frozen=True)
class Plan:
    """The fragments, programs, transfers and placements of a training iteration.

    Attributes:
      policy: the distribution policy.
      placements: name -> devices.
      idle: devices that the policy does not use.
      staleness: number of iterations by which actors' parameters lag behind.
      fused: whether a whole run of iterations is one program.
      fragments: the fragments, each followed by the fragments nested in it.
      programs: the XLA programs.
      crossings: the values that cross placements, one entry per array.
      loops: the loops controlled by the host.
      warnings: warnings about expensive or fragile parts, with remedies.
      host_calls: the host fragments.
      registers: the parameters that a policy with staleness delays.
      least_seconds: for placements on known accelerators, a predicted lower bound on the time of an iteration.
    """

    policy: str
    placements: dict[str, tuple[str, ...]]
    idle: tuple[str, ...]
    staleness: int
    fused: bool
    fragments: tuple[FragmentPlan, ...]
    programs: tuple[ProgramPlan, ...]
    crossings: tuple[Crossing, ...]
    loops: tuple[LoopPlan, ...]
    warnings: tuple[str, ...]
    host_calls: tuple[HostCallPlan, ...] = ()
    roofline_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    registers: tuple[RegisterPlan, ...] = ()

    @property
    def launches(self) -> dict[str, int]:
        """The launches of each device of a placement per iteration: kernels, library calls, copies and collectives.

        Omits placements on CPUs, where launches are not counted.
        """
        counts = [(p.placement, p.runs * x.times * x.count) for p in self.programs for x in p.launches]
        totals = {name: sum(n for placement, n in counts if placement == name) for name in self.placements}
        return {name: number for name, number in totals.items() if number}

    @property
    def bytes_crossing(self) -> int:
        """Bytes that cross placements per iteration."""
        return sum(c.nbytes * c.times for c in self.crossings)

    @property
    def unpacked_bytes_crossing(self) -> int:
        """Bytes that would cross placements per iteration without codecs."""
        return sum(c.unpacked_bytes * c.times for c in self.crossings)

    @property
    def dispatches(self) -> int:
        """Programs that the host dispatches per iteration."""
        return sum(p.runs for p in self.programs)

    @property
    def bytes_arriving(self) -> dict[str, int]:
        """Bytes received by each device of a placement per iteration."""
        return {
            name: sum(c.nbytes * c.times for c in self.crossings if c.destination == name) // len(devices)
            for name, devices in self.placements.items()
        }

    @property
    def bytes_of_collectives(self) -> dict[str, int]:
        """Bytes of the results of collectives on each device of a placement per iteration."""
        return {name: sum(p.collective_bytes for p in self.programs if p.placement == name) for name in self.placements}

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that the largest program needs on each device of a placement."""
        return {
            name: max((p.memory_bytes for p in self.programs if p.placement == name), default=0) for name in self.placements
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain Python data for JSON."""
        totals = (
            *("bytes_crossing", "unpacked_bytes_crossing", "dispatches", "bytes_arriving", "bytes_of_collectives"),
            *("memory", "launches"),
        )
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in totals}

    def __str__(self) -> str:
        """Returns the plan as tables that fit the terminal; arrays of one subtree with the same transfers share a row."""
        return table_of(self)

    def svg(self) -> str:
        """Returns the plan as an `<svg>` element: placements are lanes, programs are boxes, transfers are arrows."""
        return plan_svg(self)

    def _repr_html_(self) -> str:
        """Returns the picture, for notebooks."""
        return plan_svg(self)
