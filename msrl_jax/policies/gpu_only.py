"""GPUOnly: the whole training loop is one program over all devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msrl_jax.policies.base import BUFFERING, Device, Layout, Placement, described, take


@dataclass(frozen=True)
class GPUOnly:
    """Everything on one mesh; environments are split over it, and gradients are all-reduced inside the program.

    The architecture of Anakin, WarpDrive and PureJaxRL (which uses one device). MSRL's DP-GPUOnly.

    Attributes:
      num_devices: number of devices; None for the largest number that divides the number of environments, or of
        members.
    """

    num_devices: int | None = None

    def layout(self, devices: Sequence[Device], sizes: Mapping[str, int]) -> Layout:
        """Places all roles on one mesh."""
        (used,) = take(devices, {"num_devices": self.num_devices}, sizes, self, BUFFERING).values()
        all_devices = Placement.over("all", used)
        return Layout(dict.fromkeys(("env", "actor", "learner", "server"), all_devices), policy=described(self))
