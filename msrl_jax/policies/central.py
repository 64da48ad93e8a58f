"""Central: workers compute gradients, a server holds parameters and optimiser state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msrl_jax.policies.base import Device, Layout, Placement, take


@dataclass(frozen=True)
class Central:
    """Workers act and compute gradients; a server applies them to the parameters, which it alone keeps.

    Gradients go up and parameters come down with every minibatch: the parameter server. MSRL's DP-Central.

    Attributes:
      workers: how many devices act and compute gradients; None for the most that are left and divide the number of
        environments.
      shards: how many devices the server is split over; each keeps one part of every large tensor.
    """

    workers: int | None = None
    shards: int = 1

    def layout(self, devices: Sequence[Device], sizes: Mapping[str, int]) -> Layout:
        """Places the server on devices of its own."""
        parts = take(devices, {"workers": self.workers, "shards": self.shards}, sizes, self)
        workers = Placement.over("workers", parts["workers"])
        server = Placement.over("server", parts["shards"], split=(), scatter=True)
        return Layout({"env": workers, "actor": workers, "learner": workers, "server": server}, policy=str(self))
