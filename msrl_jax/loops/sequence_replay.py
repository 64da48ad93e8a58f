"""Replays sequences of steps to networks with a recurrent core, with the carries of the acting networks (R2D2, QMIX).

A network unrolls over a window of steps from the carry that is stored with the first step. In the shape descriptions, `S`
denotes the length of a window, `T` its length without the burn-in, `B` the number of windows in a batch and `H` the size of a
carry. Teams of agents have dimensions of agents after `B`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.kernels.time import truncated_values
from msrl_jax.loops.replay_buffers import window_buffer
from msrl_jax.networks.recurrent import RecurrentNetwork
from msrl_jax.networks.unrolls import Carry, first_steps
from msrl_jax.replay import ReplayBuffer, Sample, Transition


def sequence_buffer(obs: Any, action: Any, config: Any, carry: Any, *, may_be_invalid: bool = False) -> ReplayBuffer:
    """Makes the buffer of windows of steps, each with the carry of the acting network; shapes are those of one environment."""
    length = config.burn_in + config.trace_length + config.replay.n_step - 1
    buffer = window_buffer(
        obs,
        action,
        config,
        config.batch_size,
        config.replay.shards,
        carry,
        may_be_invalid=may_be_invalid,
        length=length,
        stride=max(config.trace_length // 2, 1),
        length_is="burn_in + trace_length + n_step - 1 are",
    )
    if length > 1:
        return buffer

    # Windows of one step lack the dimension of time.
    def sample(*args: Any) -> Sample:
        sample = buffer.sample(*args)
        return sample._replace(experience=jax.tree.map(lambda x: x[None], sample.experience))

    return dataclasses.replace(buffer, sample=sample)


def replay_values(network: RecurrentNetwork, params: Any, window: Transition, burn_in: int) -> tuple[jax.Array, Carry]:
    """Returns outputs `[T, B, ...]` and carries `[T, B, H]` of windows `[S, B, ...]`, after `burn_in` steps for the carry."""
    is_first = first_steps(window.terminated | window.truncated)
    carry = tuple(x[0] for x in window.carry)
    if burn_in:
        burn_in_obs = jax.tree.map(lambda x: x[:burn_in], window.obs)
        _, carries = network.unroll(*jax.lax.stop_gradient((params, burn_in_obs, is_first[:burn_in], carry)))
        carry = tuple(x[-1] for x in carries)
    obs = jax.tree.map(lambda x: x[burn_in:], window.obs)
    return network.unroll(params, obs, is_first[burn_in:], carry)


def successors(network: RecurrentNetwork, params: Any, window: Transition, values: jax.Array, carries: Carry) -> jax.Array:
    """Returns outputs `[T, B, ...]` for the true successors of steps, which differ from the next steps at truncations."""
    value = lambda params, final: network.step(params, *final)[0]
    last = truncated_values(value, params, (window.next_obs, carries), window.truncated, and_last=True)
    continues = ~window.truncated.reshape(window.truncated.shape + (1,) * (values.ndim - 2))
    return jnp.concatenate([jnp.where(continues[:-1], values[1:], last[:-1]), last[-1:]])
