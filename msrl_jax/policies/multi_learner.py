"""MultiLearner: every device acts and learns, in two programs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msrl_jax.policies.base import Device, Layout, Placement, described, fitting


@dataclass(frozen=True)
class MultiLearner:
    """An acting program and a learning program on every device; only gradients cross, as an all-reduce.

    The architecture of DD-PPO and of RLlib's multi-GPU learners. MSRL's DP-MultiLearner.

    Attributes:
      num_devices: how many devices to use; None for the most that divide the number of environments.
    """

    num_devices: int | None = None

    def layout(self, devices: Sequence[Device], sizes: Mapping[str, int]) -> Layout:
        """Places actors and learners side by side on one mesh."""
        count = fitting(len(devices), sizes) if self.num_devices is None else self.num_devices
        if not 1 <= count <= len(devices):
            raise ValueError(f"{described(self)}: there are {len(devices)} devices; ask for 1 to {len(devices)}")
        actors = Placement.over("actors", devices[:count])
        learners = Placement.over("learners", devices[:count])
        roles = {"env": actors, "actor": actors, "learner": learners, "server": learners}
        return Layout(roles, policy=described(self))
