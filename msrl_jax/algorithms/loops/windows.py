"""Networks with a memory along windows of replayed steps, from the carries that are stored with the steps.

In the shape descriptions, `S` denotes the length of a window, `T` its length without the burn-in, `B` the batch size and `H`
the size of the recurrent state. Teams of agents have dimensions of agents after `B`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.algorithms.kernels import truncated_values
from msrl_jax.algorithms.networks.layers import Carry, first_steps
from msrl_jax.algorithms.networks.recurrent import RecurrentNetwork
from msrl_jax.replay import Transition


def replay_values(network: RecurrentNetwork, params: Any, window: Transition, burn_in: int) -> tuple[jax.Array, Carry]:
    """Outputs `[T, B, ...]` and carries `[T, B, H]` along windows `[S, B, ...]`, after `burn_in` steps to refresh the carry."""
    is_first = first_steps(window.terminated | window.truncated)
    carry = tuple(x[0] for x in window.carry)
    if burn_in:
        before = jax.tree.map(lambda x: x[:burn_in], window.obs)
        _, carries = network.unroll(*jax.lax.stop_gradient((params, before, is_first[:burn_in], carry)))
        carry = tuple(x[-1] for x in carries)
    after = jax.tree.map(lambda x: x[burn_in:], window.obs)
    return network.unroll(params, after, is_first[burn_in:], carry)


def successors(network: RecurrentNetwork, params: Any, window: Transition, values: jax.Array, carries: Carry) -> jax.Array:
    """Outputs `[T, B, ...]` for the true successors of steps; where an episode is truncated, that is not the next step."""
    value = lambda params, final: network.step(params, *final)[0]  # noqa: E731
    last = truncated_values(value, params, (window.next_obs, carries), window.truncated, and_last=True)
    within = ~window.truncated.reshape(window.truncated.shape + (1,) * (values.ndim - 2))
    return jnp.concatenate([jnp.where(within[:-1], values[1:], last[:-1]), last[-1:]])
