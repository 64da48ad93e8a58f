"""MultiLearner: every device acts and learns, in two programs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msrl_jax.policies.base import BUFFERING, Device, Layout, Placement, described, take


@dataclass(frozen=True)
class MultiLearner:
    """An acting program and a learning program on every device; only gradients cross, as an all-reduce.

    The architecture of DD-PPO and of RLlib's multi-GPU learners. MSRL's DP-MultiLearner.

    Attributes:
      num_devices: number of devices; None for the largest number that divides the number of environments, or of
        members.
    """

    num_devices: int | None = None

    def layout(self, devices: Sequence[Device], sizes: Mapping[str, int]) -> Layout:
        """Places actors and learners side by side on one mesh."""
        (used,) = take(devices, {"num_devices": self.num_devices}, sizes, self, BUFFERING).values()
        actors, learners = Placement.over("actors", used), Placement.over("learners", used)
        roles = {"env": actors, "actor": actors, "learner": learners, "server": learners}
        return Layout(roles, policy=described(self))
