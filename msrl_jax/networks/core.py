"""The interface of recurrent cores, and the core of a config."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

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


def core_of(config: Any) -> Any:
    """Returns the `RecurrentCore` of a config; raises ValueError if `algorithms.build` has not made it yet."""
    if isinstance(config.core, str):
        raise ValueError(f"core={config.core!r} is made by msrl_jax.algorithms.build(config, env)")
    return config.core
