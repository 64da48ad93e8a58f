"""The interface of recurrent cores, and of the options that make them."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from msrl_jax.fragments.support.checks import name_of
from msrl_jax.networks.torso import NetworkFields
from msrl_jax.networks.unrolls import Carry


class Core(NamedTuple):
    """A recurrent layer as pure functions of its parameters, with `I` inputs and `F` outputs."""

    init: Callable[[jax.Array, int], Any]  # (key, input_size) -> params
    initial_carry: Callable[[tuple[int, ...]], Carry]  # (batch_shape) -> zeros
    # (params, inputs [..., I], carry [..., H]) -> (outputs [..., F], carry)
    step: Callable[[Any, jax.Array, Carry], tuple[jax.Array, Carry]]
    # (params, inputs [T, E, I], is_first [T, E] bool, carry [E, H]) -> (outputs [T, E, F], carries after every step
    # [T, E, H]); clears the carry before the first step of every episode
    unroll: Callable[[Any, jax.Array, jax.Array, Carry], tuple[jax.Array, Carry]]
    num_outputs: int  # `F`


class CoreKind(Protocol):
    """The options for the recurrent core of networks."""

    def make(self, input_size: int) -> Core:
        """Makes the core for inputs of a size `I`."""
        ...


class RecurrentFields(NetworkFields, Protocol):
    """What makes a network with or without a recurrent core."""

    @property
    def core(self) -> Any:
        """A recurrent core, or None."""
        ...


def core_of(config: RecurrentFields) -> Any:
    """Returns the `ResolvedCore` of a config; raises ValueError if `algorithms.build` has not made it yet."""
    if not hasattr(config.core, "network"):
        raise ValueError(f"core={name_of(config.core)} is made by msrl_jax.algorithms.build(config, env)")
    return config.core
