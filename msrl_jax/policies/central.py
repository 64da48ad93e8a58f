"""Central: workers compute gradients, a server holds parameters and optimizer state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msrl_jax.policies.base import BUFFERING, CodecChoice, Device, Layout, Placement, described, edges, take


@dataclass(frozen=True)
class Central:
    """Workers act and compute gradients; a server applies them to the parameters, which it alone keeps.

    Gradients go up and parameters come down with every minibatch: the parameter server. MSRL's DP-Central.

    Attributes:
      workers: how many devices act and compute gradients; None for the most that are left and divide the number of
        environments.
      shards: how many devices the server is split over; each keeps one part of every large tensor.
      gradient_codec: packs what goes up, such as "bfloat16"; None sends it as it is.
      parameter_codec: packs what comes down.
    """

    workers: int | None = None
    shards: int = 1
    gradient_codec: CodecChoice = None
    parameter_codec: CodecChoice = None

    def layout(self, devices: Sequence[Device], sizes: Mapping[str, int]) -> Layout:
        """Places the server on devices of its own."""
        parts = take(devices, {"workers": self.workers, "shards": self.shards}, sizes, self, BUFFERING)
        workers = Placement.over("workers", parts["workers"])
        server = Placement.over("server", parts["shards"], split=(), scatter=True)
        roles = {"env": workers, "actor": workers, "learner": workers, "server": server}
        codecs = edges("workers", "server", up=self.gradient_codec, down=self.parameter_codec)
        return Layout(roles, codecs=codecs, policy=described(self))
