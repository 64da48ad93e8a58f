"""Fields that describe the networks."""

import dataclasses
from typing import Literal

from msrl_jax.algorithms.configs.base import Config
from msrl_jax.algorithms.configs.checks import check_integers, check_sizes

Activation = Literal["tanh", "relu", "elu", "gelu", "silu"]
Network = Literal["auto", "mlp", "cnn"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkConfig(Config):
    """Dense layers, after a convolution if observations are images.

    Attributes:
      hidden_sizes: widths of the dense layers. Usual: (64, 64), or (128,) after a convolution.
      activation: "tanh", "relu", "elu", "gelu" or "silu". Usual: "tanh", or "relu" after a convolution.
      network: "mlp" for dense layers only, "cnn" for convolutions first, or "auto", which is "cnn" for observations with
        three dimensions. Usual: "auto".
    """

    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: Activation = "tanh"
    network: Network = "auto"

    def check(self) -> None:
        """Raises ValueError unless the sizes are positive integers."""
        check_sizes(self, "hidden_sizes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorCriticConfig(NetworkConfig):
    """A network with a policy and a value function.

    Attributes:
      shared_torso: whether policy and value share all but their last layers. Usual: False, or True for images.
    """

    shared_torso: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig(NetworkConfig):
    """A network with a recurrent core between its dense layers and its heads.

    Attributes:
      core: "gru", "lstm", or "min_gru", whose gates do not wait for the step before: the fastest. Usual: "gru".
      memory_size: size of the recurrent state, `H`. Usual: 64 to 512.
      hidden_sizes: widths of the dense layers before the core. Usual: (64,), or (128,) after a convolution.
    """

    core: Literal["gru", "lstm", "min_gru"] = "gru"
    memory_size: int = 64
    hidden_sizes: tuple[int, ...] = (64,)

    def check(self) -> None:
        """Raises ValueError unless the size of the recurrent state is a positive integer."""
        check_integers(self, 1, "memory_size")
