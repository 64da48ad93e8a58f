"""The recurrent cores GRU and LSTM, whose steps are sequential.

In the shape descriptions, `T` denotes the length of an unroll, `E` the number of environments, `I` the size of an input and `H`
the size of the recurrent state. A carry is a tuple of arrays `[..., H]`; the first is the output.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from msrl_jax.configs.fields import field
from msrl_jax.configs.options import option
from msrl_jax.kernels.networks import matmul
from msrl_jax.networks.core import Core, CoreKind
from msrl_jax.networks.unrolls import Carry, reset_carry

Gates = tuple[jax.Array, ...]
"""One array `[..., H]` for each gate."""


def per_gate(x: jax.Array, num_gates: int) -> Gates:
    """Splits `[..., G * H]` into gates."""
    # Use one array per gate: on a CPU, XLA does not vectorize a loop over slices of one array, and a step of the scan took
    # four times as long.
    return tuple(jnp.split(x, num_gates, axis=-1))


class Cell(NamedTuple):
    """One step of a recurrent network, without its matrix products."""

    biases: tuple[float, ...]  # initial bias of every gate
    num_arrays: int  # arrays in a carry
    # (from_input, from_carry, carry) -> carry, elementwise; `from_input` is the product of the input and its matrix plus the
    # bias, `from_carry` is the product of the last output and the recurrent matrix
    update: Callable[[Gates, Gates, Carry], Carry]


def _gru(x: Gates, u: Gates, carry: Carry) -> Carry:
    (h,) = carry
    reset, keep = jax.nn.sigmoid(x[0] + u[0]), jax.nn.sigmoid(x[1] + u[1])
    candidate = jnp.tanh(x[2] + reset * u[2])
    return (candidate + keep * (h - candidate),)


def _lstm(x: Gates, u: Gates, carry: Carry) -> Carry:
    _, c = carry
    write, keep, output = (jax.nn.sigmoid(a + b) for a, b in zip(x[:3], u[:3], strict=True))
    c = keep * c + write * jnp.tanh(x[3] + u[3])
    return output * jnp.tanh(c), c


@option(of=CoreKind)
class GRU:
    """A gated recurrent unit, whose gates depend on the last output (Cho et al., 2014, arXiv 1406.1078)."""

    size: int = field(default=64, doc="size of the recurrent state, `H`. Usual: 64 to 512.")

    def make(self, input_size: int) -> Core:
        """Makes the core; the reset gate follows the recurrent matrix, as in cuDNN: one product per step."""
        return _stepwise(Cell((0.0, 0.0, 0.0), 1, _gru), self.size)


@option(of=CoreKind)
class LSTM:
    """A long short-term memory, whose gates depend on the last output (Gers et al., 2000)."""

    size: int = field(default=64, doc="size of the recurrent state, `H`. Usual: 64 to 512.")

    def make(self, input_size: int) -> Core:
        """Makes the core; the forget gate starts open (Jozefowicz et al., 2015)."""
        return _stepwise(Cell((0.0, 1.0, 0.0, 0.0), 2, _lstm), self.size)


def _stepwise(cell: Cell, size: int) -> Core:
    """Makes a core whose steps are sequential; one matrix product handles the inputs of all steps."""
    num_gates = len(cell.biases)

    def init(key: jax.Array, input_size: int) -> dict[str, jax.Array]:
        input_key, *keys = jax.random.split(key, 1 + num_gates)
        orthogonal = nn.initializers.orthogonal(dtype=jnp.float32)
        return {
            "input": nn.initializers.lecun_normal(dtype=jnp.float32)(input_key, (input_size, num_gates * size)),
            "recurrent": jnp.concatenate([orthogonal(k, (size, size)) for k in keys], axis=-1),
            "bias": jnp.repeat(jnp.array(cell.biases, jnp.float32), size),
        }

    def initial_carry(batch_shape: tuple[int, ...]) -> Carry:
        return (jnp.zeros((*batch_shape, size), jnp.float32),) * cell.num_arrays

    def gates(params: Any, inputs: jax.Array) -> Gates:
        return per_gate(matmul(inputs, params["input"]) + params["bias"], num_gates)

    def step(params: Any, inputs: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        carry = cell.update(gates(params, inputs), per_gate(matmul(carry[0], params["recurrent"]), num_gates), carry)
        return carry[0], carry

    def unroll(params: Any, inputs: jax.Array, is_first: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        carries: Any = _scan(cell.update, params["recurrent"], gates(params, inputs), is_first, carry)
        return carries[0], carries

    return Core(init, initial_carry, step, unroll, size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(
    update: Callable[[Gates, Gates, Carry], Carry], kernel: jax.Array, x: Gates, is_first: jax.Array, carry: Carry
) -> Carry:
    """Returns the carries `[T, E, H]` after every step, from the gate inputs `[T, E, H]` and a recurrent matrix."""
    return _scan_forward(update, kernel, x, is_first, carry)[0]


def _scan_forward(update, kernel, x, is_first, carry):
    def step(carry, inputs):
        x, is_first = inputs
        carry = reset_carry(is_first, carry)
        product = carry[0] @ kernel  # all gates, concatenated
        carry = update(x, per_gate(product, len(x)), carry)
        return carry, (carry, product)

    carries, products = jax.lax.scan(step, carry, (x, is_first))[1]
    return carries, (kernel, x, is_first, carry, carries, products)


def _scan_backward(update, residuals, cotangents):
    kernel, x, is_first, carry, carries, products = residuals
    previous = tuple(jnp.concatenate([m[None], ms[:-1]]) for m, ms in zip(carry, carries, strict=True))
    previous = reset_carry(is_first, previous)
    # Only the cotangents of the carries depend on later steps, so only they need a scan. Before the scan, compute the
    # derivatives of every carry for all steps at once; a cell is elementwise, so the derivatives are arrays, not matrices.
    # After the scan, compute the gradients of the gates and the matrix; in the scan, every step would sum them over devices.
    _, pullback = jax.vjp(update, x, per_gate(products, len(x)), previous)
    ones, zeros = jnp.ones_like(previous[0]), jnp.zeros_like(previous[0])
    slopes = [pullback(tuple(ones if i == j else zeros for i in range(len(carry)))) for j in range(len(carry))]
    by_x, by_u, by_carry = zip(*slopes, strict=True)
    by_u = tuple(jnp.stack(gates, axis=-2) for gates in by_u)  # one array, so one multiplication per step

    def through_gates(cotangent: Carry, by_u: Gates) -> jax.Array:
        terms = (c[..., None, :] * slope for c, slope in zip(cotangent, by_u, strict=True))
        du = functools.reduce(jnp.add, terms)
        return du.reshape(*du.shape[:-2], -1)

    def step(later, inputs):
        is_first, cotangent, by_u, by_carry = inputs
        cotangent = tuple(map(jnp.add, later, cotangent))
        output, *states = _chain(cotangent, by_carry)
        output += jax.lax.optimization_barrier(through_gates(cotangent, by_u)) @ transposed
        return reset_carry(is_first, (output, *states)), cotangent

    # Without the barriers, XLA fuses transpose, chain rule and product for one row: a loop that took ten times as long.
    transposed = jax.lax.optimization_barrier(kernel.T)
    start = tuple(map(jnp.zeros_like, carry))
    dcarry, cotangents = jax.lax.scan(step, start, (is_first, cotangents, by_u, by_carry), reverse=True)
    du = through_gates(cotangents, by_u)
    (dkernel,) = jax.vjp(lambda kernel: matmul(previous[0], kernel), kernel)[1](du)
    return dkernel, _chain(cotangents, by_x), None, dcarry


def _chain(cotangents: Carry, slopes: tuple[Gates, ...]) -> Gates:
    """Applies the elementwise chain rule: combines the cotangents of carries with their derivatives by several arrays."""
    return tuple(functools.reduce(jnp.add, map(jnp.multiply, cotangents, terms)) for terms in zip(*slopes, strict=True))


_scan.defvjp(_scan_forward, _scan_backward)
