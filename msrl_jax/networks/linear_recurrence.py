"""Recurrences that are linear in their state, so that their steps can run in parallel; and cores that use them.

In the shape descriptions, `T` denotes the length of an unroll, `E` the number of environments, `I` the size of an input and `H`
the size of the recurrent state.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from msrl_jax.configs.fields import field
from msrl_jax.configs.options import option
from msrl_jax.kernels.networks import matmul
from msrl_jax.networks.cells import Gates, per_gate
from msrl_jax.networks.core import Core, CoreKind
from msrl_jax.networks.unrolls import Carry, reset_carry

LONGEST_MEMORY = 128
"""How many steps the slowest unit of a new minGRU remembers, about twice the usual length of an unroll."""


@option(of=CoreKind)
class MinGRU:
    """A GRU whose gates depend only on inputs, a linear recurrence (Feng et al., 2024, arXiv 2410.01201)."""

    size: int = field(default=64, doc="size of the recurrent state, `H`. Usual: 64 to 512.")

    def make(self, input_size: int) -> Core:
        """Makes the core."""
        return _min_gru(self.size)


def _min_gru(size: int) -> Core:
    def init(key: jax.Array, input_size: int) -> dict[str, jax.Array]:
        # Initialize units with evenly spaced memory lengths (Tallec and Ollivier, 2018, arXiv 1804.11188). With all gates half
        # open, PPO needed three to five times more steps to learn a chain of 15.
        keep = jnp.log(jnp.linspace(1, LONGEST_MEMORY - 1, size, dtype=jnp.float32))
        return {
            "input": nn.initializers.lecun_normal(dtype=jnp.float32)(key, (input_size, 2 * size)),
            "bias": jnp.concatenate([keep, jnp.zeros(size, jnp.float32)]),
        }

    def gates(params: Any, inputs: jax.Array) -> Gates:
        keep, candidate = per_gate(matmul(inputs, params["input"]) + params["bias"], 2)
        keep = jax.nn.sigmoid(keep)
        return keep, (1 - keep) * candidate

    def step(params: Any, inputs: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        keep, write = gates(params, inputs)
        h = keep * carry[0] + write
        return h, (h,)

    def unroll(params: Any, inputs: jax.Array, is_first: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        keep, write = gates(params, inputs)
        (keep,) = reset_carry(is_first, (keep,))  # keep nothing of the previous episode
        h = linear_recurrence(keep, write, carry[0])
        return h, (h,)

    return Core(init, lambda batch_shape: (jnp.zeros((*batch_shape, size), jnp.float32),), step, unroll, size)


@option(of=CoreKind)
class LRU:
    """A linear recurrence of complex numbers, each with its own rotation and decay (arXiv 2303.06349).

    As in the paper, a gated unit with a skip connection computes the outputs. Initially, a unit decays by 0.1% to 10% per step
    and rotates by at most 18 degrees.
    """

    size: int = field(default=64, doc="size of the recurrent state, `H`. Usual: 64 to 512.")

    def make(self, input_size: int) -> Core:
        """Makes the core."""
        return _lru(self.size)


def _lru(size: int) -> Core:
    def init(key: jax.Array, input_size: int) -> dict[str, jax.Array]:
        radius_key, phase_key, *keys = jax.random.split(key, 6)
        lecun = nn.initializers.lecun_normal(dtype=jnp.float32)
        square = jax.random.uniform(radius_key, (size,), minval=0.9**2, maxval=0.999**2, dtype=jnp.float32)
        return {
            "log_rate": jnp.log(-0.5 * jnp.log(square)),
            "log_phase": jnp.log(jax.random.uniform(phase_key, (size,), minval=1e-3, maxval=math.pi / 10, dtype=jnp.float32)),
            "log_gain": 0.5 * jnp.log(1 - square),  # for noise inputs, states have the variance of the inputs
            "input": lecun(keys[0], (input_size, 2 * size)),
            "output": lecun(keys[1], (2 * size, size)),
            "gate": lecun(keys[2], (size, size)),
            "skip": lecun(keys[3], (input_size, size)),
        }

    def decay(params: Any) -> jax.Array:
        return jnp.exp(jax.lax.complex(-jnp.exp(params["log_rate"]), jnp.exp(params["log_phase"])))

    def scaled_inputs(params: Any, inputs: jax.Array) -> jax.Array:
        real, imaginary = per_gate(matmul(inputs, params["input"]), 2)
        values = jax.lax.complex(real, imaginary)
        return values * jnp.exp(params["log_gain"]).astype(values.dtype)

    def outputs(params: Any, inputs: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        x = nn.gelu(matmul(jnp.concatenate(carry, -1), params["output"]))
        return x * jax.nn.sigmoid(matmul(x, params["gate"])) + matmul(inputs, params["skip"]), carry

    def step(params: Any, inputs: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        h = decay(params) * jax.lax.complex(*carry) + scaled_inputs(params, inputs)
        return outputs(params, inputs, (h.real, h.imag))

    def unroll(params: Any, inputs: jax.Array, is_first: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        (keep,) = reset_carry(is_first, (jnp.broadcast_to(decay(params), (*is_first.shape, size)),))
        h = linear_recurrence(keep, scaled_inputs(params, inputs), jax.lax.complex(*carry))
        return outputs(params, inputs, (h.real, h.imag))

    return Core(init, lambda batch_shape: (jnp.zeros((*batch_shape, size), jnp.float32),) * 2, step, unroll, size)


ScanFunction = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""`(decay [T, ...], inputs [T, ...], start [...]) -> h [T, ...]`."""


def step_by_step(decay: jax.Array, inputs: jax.Array, start: jax.Array) -> jax.Array:
    """Computes the recurrence in a loop of `T` steps."""

    def step(h, step_inputs):
        decay, x = step_inputs
        h = decay * h + x
        return h, h

    return jax.lax.scan(step, start, (decay, inputs))[1]


def associative(decay: jax.Array, inputs: jax.Array, start: jax.Array) -> jax.Array:
    """Computes the recurrence in about `2 * log2(T)` parallel steps (Blelloch, 1990)."""

    def join(early, late):
        return early[0] * late[0], late[0] * early[1] + late[1]

    inputs = inputs.at[0].add(decay[0] * start)
    return jax.lax.associative_scan(join, (decay, inputs))[1]


def by_platform(decay: jax.Array, inputs: jax.Array, start: jax.Array) -> jax.Array:
    """Computes the recurrence in the fastest way: step by step on a CPU, in parallel elsewhere."""
    # On a CPU core, a parallel scan is more work without more parallelism: the loop took 0.6 times as long, and compiled in a
    # third of the time.
    return jax.lax.platform_dependent(decay, inputs, start, cpu=step_by_step, default=associative)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def recurrence(scan: ScanFunction, decay: jax.Array, inputs: jax.Array, start: jax.Array) -> jax.Array:
    """Computes the recurrence with a scan; its gradient is a recurrence with the same scan."""
    return scan(decay, inputs, start)


def _forward(scan, decay, inputs, start):
    h = scan(decay, inputs, start)
    return h, (decay, start, h)


def _backward(scan, residuals, cotangents):
    # The cotangents of the inputs are a linear recurrence from the last step to the first, with the decay of the next step.
    # If JAX differentiated a parallel scan, the scan would store all its partial results.
    decay, start, h = residuals
    decay_after = jnp.concatenate([decay[1:], jnp.zeros_like(decay[:1])])
    dinputs = scan(decay_after[::-1], cotangents[::-1], jnp.zeros_like(start))[::-1]
    previous = jnp.concatenate([start[None], h[:-1]])
    return dinputs * previous, dinputs, decay[0] * dinputs[0]


recurrence.defvjp(_forward, _backward)


def linear_recurrence(decay: jax.Array, inputs: jax.Array, start: jax.Array) -> jax.Array:
    """Computes `h[t] = decay[t] * h[t - 1] + inputs[t]` `[T, ...]` with `h[-1] = start` `[...]`, elementwise."""
    return recurrence(by_platform, decay, inputs, start)
