"""The interface of networks of any library."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Network(NamedTuple):
    """A network as pure functions of its parameters, from any network library."""

    init: Callable[..., Any]  # (key, *inputs) -> params
    apply: Callable[..., Any]  # (params, *inputs) -> outputs, arrays or distributions
    core: Any = None  # the `RecurrentNetwork` before it, if any


class CustomNetworks(NamedTuple):
    """Complete networks with their output layers, instead of a torso to which the algorithm adds heads.

    Attributes:
      actor: maps observations `[B, ...]` to the policy's parameters `[B, N]`: logits, means, or means and log scales.
      critic: maps observations, and continuous actions `[B, D]` if any, to `[B, N]`: one value, or one per discrete action.
      value: maps observations to values `[B, 1]`, for algorithms with critics and a value function.
    """

    actor: Any = None
    critic: Any = None
    value: Any = None
