"""The interface of recurrent cores."""

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
