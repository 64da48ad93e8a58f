"""Central: workers compute gradients, a server holds parameters and optimizer state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msrl_jax.policies.base import BUFFERING, CodecChoice, Device, Layout, Placement, check_codecs, described, edges, take


@dataclass(frozen=True)
class Central:
    """Workers act and compute gradients; a server keeps the parameters and applies the gradients.

    With every minibatch the server receives gradients and sends parameters, as a parameter server. MSRL's DP-Central.

    Attributes:
      workers: number of devices that act and compute gradients; None for the largest remaining number that divides the
        number of environments.
      shards: number of devices of the server; each keeps one part of every large tensor.
      gradient_codec: codec for gradients, such as "bfloat16"; None for no codec.
      parameter_codec: codec for parameters.
    """

    workers: int | None = None
    shards: int = 1
    gradient_codec: CodecChoice = None
    parameter_codec: CodecChoice = None

    def __post_init__(self):
        check_codecs(self, "gradient_codec", "parameter_codec")

    def layout(self, devices: Sequence[Device], sizes: Mapping[str, int]) -> Layout:
        """Places the server on separate devices."""
        parts = take(devices, {"workers": self.workers, "shards": self.shards}, sizes, self, BUFFERING)
        workers = Placement.over("workers", parts["workers"])
        server = Placement.over("server", parts["shards"], split=(), scatter=True)
        roles = {"env": workers, "actor": workers, "learner": workers, "server": server}
        codecs = edges("workers", "server", up=self.gradient_codec, down=self.parameter_codec)
        return Layout(roles, codecs=codecs, policy=described(self))
