"""GPUOnly: the whole training loop is one program over all devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msrl_jax.policies.base import Device, Layout, Placement, described, fitting


@dataclass(frozen=True)
class GPUOnly:
    """Everything on one mesh; environments are split over it, and gradients are all-reduced inside the program.

    The architecture of Anakin, WarpDrive and PureJaxRL (the latter at one device). MSRL's DP-GPUOnly.

    Attributes:
      num_devices: how many devices to use; None for the most that divide the number of environments.
    """

    num_devices: int | None = None

    def layout(self, devices: Sequence[Device], sizes: Mapping[str, int]) -> Layout:
        """Places all roles on one mesh."""
        count = fitting(len(devices), sizes) if self.num_devices is None else self.num_devices
        if not 1 <= count <= len(devices):
            raise ValueError(f"{described(self)}: there are {len(devices)} devices; ask for 1 to {len(devices)}")
        all_devices = Placement.over("all", devices[:count])
        return Layout(dict.fromkeys(("env", "actor", "learner", "server"), all_devices), policy=described(self))
