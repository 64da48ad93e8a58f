"""Recurrent networks: GRU and LSTM cores, and an actor-critic and action values on top of them.

In the shape descriptions, `T` denotes the length of an unroll, `E` the number of environments, `I` the size of an input
and `H` the size of the recurrent state. A carry (the recurrent state) is a tuple of arrays `[..., H]`; the first array is the
output of the core. An episode starts with zeros.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from msrl_jax.algorithms.configs.network import RecurrentConfig
from msrl_jax.algorithms.loops.acting import flatten, unflatten
from msrl_jax.algorithms.networks.actor_critic import linear_actor_critic, make_torso
from msrl_jax.algorithms.networks.layers import matmul
from msrl_jax.algorithms.networks.q_network import q_network_on_features
from msrl_jax.envs import Box, Discrete, Space

Carry = tuple[jax.Array, ...]
"""The recurrent state: arrays `[..., H]`."""
Gates = tuple[jax.Array, ...]
"""One array `[..., H]` for each gate."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One step of a recurrent network, without its matrices.

    Attributes:
      biases: initial bias of every gate.
      num_arrays: number of arrays in a carry.
      update: `(from_input, from_carry, carry) -> carry`, elementwise. `from_input` is the product of the input and its
        matrix, plus the bias; `from_carry` is the product of the last output and the recurrent matrix.
    """

    biases: tuple[float, ...]
    num_arrays: int
    update: Callable[[Gates, Gates, Carry], Carry]


def _gru(x: Gates, u: Gates, carry: Carry) -> Carry:
    (h,) = carry
    reset, keep = jax.nn.sigmoid(x[0] + u[0]), jax.nn.sigmoid(x[1] + u[1])
    candidate = jnp.tanh(x[2] + reset * u[2])
    return (candidate + keep * (h - candidate),)


def _lstm(x: Gates, u: Gates, carry: Carry) -> Carry:
    _, c = carry
    write, keep, read = (jax.nn.sigmoid(a + b) for a, b in zip(x[:3], u[:3], strict=True))
    c = keep * c + write * jnp.tanh(x[3] + u[3])
    return read * jnp.tanh(c), c


CELLS: dict[str, Cell] = {
    # Cho et al., 2014, arXiv 1406.1078, with the reset gate after the recurrent matrix, as in cuDNN: one product per step.
    "gru": Cell((0.0, 0.0, 0.0), 1, _gru),
    # Gers et al., 2000; the forget gate starts open (Jozefowicz et al., 2015).
    "lstm": Cell((0.0, 1.0, 0.0, 0.0), 2, _lstm),
}


@dataclasses.dataclass(frozen=True)
class Core:
    """A recurrent layer as pure functions of its parameters.

    Attributes:
      init: `(key, input_size) -> params`.
      initial_carry: `(batch_shape) -> carry`, zeros.
      step: `(params, inputs [..., I], carry [..., H]) -> carry`.
      unroll: `(params, inputs [T, E, I], is_first [T, E] bool, carry [E, H]) -> carries after every step [T, E, H]`; the
        carry is cleared before the first step of every episode.
    """

    init: Callable[[jax.Array, int], Any]
    initial_carry: Callable[[tuple[int, ...]], Carry]
    step: Callable[[Any, jax.Array, Carry], Carry]
    unroll: Callable[[Any, jax.Array, jax.Array, Carry], Carry]


def recurrent_core(name: str, size: int) -> Core:
    """Makes a recurrent layer.

    Args:
      name: a key of `CELLS`.
      size: size of the carry, `H`.

    Returns:
      The layer. Input matrices start from LeCun's normal distribution; the recurrent matrix of every gate starts orthogonal.
    """
    cell = CELLS[name]
    num_gates = len(cell.biases)

    def init(key: jax.Array, input_size: int) -> dict[str, jax.Array]:
        input_key, *keys = jax.random.split(key, 1 + num_gates)
        orthogonal = nn.initializers.orthogonal()
        return {
            "input": nn.initializers.lecun_normal()(input_key, (input_size, num_gates * size)),
            "recurrent": jnp.concatenate([orthogonal(k, (size, size)) for k in keys], axis=-1),
            "bias": jnp.repeat(jnp.array(cell.biases, jnp.float32), size),
        }

    def initial_carry(batch_shape: tuple[int, ...]) -> Carry:
        return (jnp.zeros((*batch_shape, size)),) * cell.num_arrays

    def gates(params: Any, inputs: jax.Array) -> Gates:
        return _per_gate(matmul(inputs, params["input"]) + params["bias"], num_gates)

    def step(params: Any, inputs: jax.Array, carry: Carry) -> Carry:
        return cell.update(gates(params, inputs), _per_gate(matmul(carry[0], params["recurrent"]), num_gates), carry)

    def unroll(params: Any, inputs: jax.Array, is_first: jax.Array, carry: Carry) -> Carry:
        x = tuple(unflatten(gate, len(inputs)) for gate in gates(params, flatten(inputs)))
        return _scan(cell.update, params["recurrent"], x, is_first, carry)

    return Core(init, initial_carry, step, unroll)


def forget(is_first: jax.Array, carry: Carry) -> Carry:
    """Clears a carry `[..., H]` where an observation is the first of an episode, `is_first` `[...]` bool."""
    return tuple(jnp.where(is_first[..., None], 0.0, array) for array in carry)


def _per_gate(x: jax.Array, num_gates: int) -> Gates:
    # One array per gate: on a CPU, XLA does not vectorize a loop over slices of one array, and a step of the scan took four
    # times as long.
    return tuple(jnp.split(x, num_gates, axis=-1))


def _plain_scan(
    update: Callable[[Gates, Gates, Carry], Carry], kernel: jax.Array, x: Gates, is_first: jax.Array, carry: Carry
) -> Carry:
    """The carries `[T, E, H]` after every step, from the inputs of the gates `[T, E, H]` and a recurrent matrix."""

    def step(carry, inputs):
        x, is_first = inputs
        carry = forget(is_first, carry)
        carry = update(x, _per_gate(carry[0] @ kernel, len(x)), carry)
        return carry, carry

    return jax.lax.scan(step, carry, (x, is_first))[1]


_scan = jax.custom_vjp(_plain_scan, nondiff_argnums=(0,))


def _scan_forward(update, kernel, x, is_first, carry):
    carries = _scan(update, kernel, x, is_first, carry)
    return carries, (kernel, x, is_first, carry, carries)


def _scan_backward(update, residuals, cotangents):
    kernel, x, is_first, carry, carries = residuals
    before = tuple(jnp.concatenate([m[None], ms[:-1]]) for m, ms in zip(carry, carries, strict=True))
    before = forget(is_first, before)
    # Only the cotangents of the carries depend on later steps, so only they need a scan. Before the scan, compute the gates
    # and the derivatives of every carry for all steps at once; a cell is elementwise, so the derivatives are arrays, not
    # matrices. After the scan, compute the gradients of gates and matrix; in the scan, every step would sum them over devices.
    _, pullback = jax.vjp(update, x, _per_gate(before[0] @ kernel, len(x)), before)
    ones, zeros = jnp.ones_like(before[0]), jnp.zeros_like(before[0])
    slopes = [pullback(tuple(ones if i == j else zeros for i in range(len(carry)))) for j in range(len(carry))]
    by_x, by_u, by_carry = zip(*slopes, strict=True)

    def step(later, inputs):
        is_first, cotangent, by_u, by_carry = inputs
        cotangent = tuple(map(jnp.add, later, cotangent))
        output, *rest = _chain(cotangent, by_carry)
        output += jnp.concatenate(_chain(cotangent, by_u), axis=-1) @ kernel.T
        return forget(is_first, (output, *rest)), cotangent

    start = tuple(map(jnp.zeros_like, carry))
    dcarry, cotangents = jax.lax.scan(step, start, (is_first, cotangents, by_u, by_carry), reverse=True)
    du = jnp.concatenate(_chain(cotangents, by_u), axis=-1)
    (dkernel,) = jax.vjp(lambda kernel: matmul(flatten(before[0]), kernel), kernel)[1](flatten(du))
    return dkernel, _chain(cotangents, by_x), None, dcarry


def _chain(cotangents: Carry, slopes: tuple[Gates, ...]) -> Gates:
    """The elementwise chain rule: combines the cotangents of the carries with their derivatives by each of several arrays."""
    return tuple(functools.reduce(jnp.add, map(jnp.multiply, cotangents, by)) for by in zip(*slopes, strict=True))


_scan.defvjp(_scan_forward, _scan_backward)


class Heads(Protocol):
    """A network from features to outputs, such as an `ActorCritic` or a `QNetwork`."""

    @property
    def init(self) -> Callable[[jax.Array, jax.Array], Any]:
        """`(key, features [..., H]) -> params`."""
        ...

    @property
    def apply(self) -> Callable[[Any, jax.Array], Any]:
        """`(params, features [..., H]) -> outputs [..., ...]`."""
        ...


@dataclasses.dataclass(frozen=True)
class RecurrentNetwork:
    """A recurrent network as pure functions of its parameters; its heads compute the outputs.

    Attributes:
      init: `(key) -> params`.
      initial_carry: `(batch_shape) -> carry`, zeros.
      step: `(params, obs [..., *observation_shape], carry [..., H]) -> (outputs [..., ...], carry)`.
      unroll: `(params, obs [T, E, *observation_shape], is_first [T, E] bool, carry [E, H]) -> (outputs [T, E, ...], carries
        after every step [T, E, H])`; the carry is cleared before the first step of every episode.
    """

    init: Callable[[jax.Array], Any]
    initial_carry: Callable[[tuple[int, ...]], Carry]
    step: Callable[[Any, jax.Array, Carry], tuple[Any, Carry]]
    unroll: Callable[[Any, jax.Array, jax.Array, Carry], tuple[Any, Carry]]


def recurrent_network(
    observation_space: Space, make_heads: Callable[[Box], Heads], config: RecurrentConfig
) -> RecurrentNetwork:
    """Makes a network of a torso, a recurrent core, and heads.

    Args:
      observation_space: a `Box`; of images `[H, W, C]` if the network convolves.
      make_heads: makes the heads for the space of the core's outputs.
      config: sizes of the torso and the core.

    Returns:
      The network.

    Raises:
      TypeError: if the space is of another kind.
      ValueError: if the network convolves and the observations are not images of at least 3x3.
    """
    torso = make_torso(
        observation_space, hidden_sizes=config.hidden_sizes, activation=config.activation, network=config.network
    )
    core = recurrent_core(config.core, config.memory_size)
    heads = make_heads(Box(-np.inf, np.inf, (config.memory_size,)))

    def init(key: jax.Array) -> dict[str, Any]:
        torso_key, core_key, heads_key = jax.random.split(key, 3)
        return {
            "torso": torso.init(torso_key, jnp.zeros(torso.observation_shape)[None]),
            "core": core.init(core_key, config.hidden_sizes[-1]),
            "heads": heads.init(heads_key, jnp.zeros((1, config.memory_size))),
        }

    def features(params: Any, obs: jax.Array) -> jax.Array:
        return torso.apply(params["torso"], obs)  # pyright: ignore[reportReturnType]

    def step(params: Any, obs: jax.Array, carry: Carry) -> tuple[Any, Carry]:
        carry = core.step(params["core"], features(params, obs), carry)
        return heads.apply(params["heads"], carry[0]), carry

    def unroll(params: Any, obs: jax.Array, is_first: jax.Array, carry: Carry) -> tuple[Any, Carry]:
        # Rows in the order [E * T] stay split over devices like the environments; rows in the order [T * E] would not.
        inputs = unflatten(features(params, flatten(obs)), len(obs))
        carries = core.unroll(params["core"], inputs, is_first, carry)
        outputs = heads.apply(params["heads"], flatten(carries[0]))
        return jax.tree.map(lambda x: unflatten(x, len(obs)), outputs), carries

    return RecurrentNetwork(init, core.initial_carry, step, unroll)


def recurrent_actor_critic(observation_space: Space, action_space: Space, config: RecurrentConfig) -> RecurrentNetwork:
    """Makes a recurrent policy and value function: linear heads on a recurrent core.

    Args:
      observation_space: a `Box`; of images `[H, W, C]` if the network convolves.
      action_space: `Discrete`, or a `Box` of floats.
      config: sizes of the torso and the core.

    Returns:
      The network. Its outputs are distributions over actions, as in `actor_critic`, and values `[...]`.

    Raises:
      TypeError: if a space is of another kind.
      ValueError: if the network convolves and the observations are not images of at least 3x3.
    """
    return recurrent_network(observation_space, lambda features: linear_actor_critic(features, action_space), config)


def recurrent_q_network(
    observation_space: Space, action_space: Discrete, config: RecurrentConfig, *, dueling: bool
) -> RecurrentNetwork:
    """Makes recurrent action values: a linear head on a recurrent core, or two streams of one dense layer each.

    Args:
      observation_space: a `Box`; of images `[H, W, C]` if the network convolves.
      action_space: its size is `A`.
      config: sizes of the torso and the core; streams are as wide as the last dense layer.
      dueling: whether there are separate streams for values and for advantages.

    Returns:
      The network: its outputs are values `[..., A]`.

    Raises:
      TypeError: if the space of observations is of another kind.
      ValueError: if the network convolves and the observations are not images of at least 3x3.
    """

    def make_heads(features: Box) -> Heads:
        sizes = config.hidden_sizes[-1:] if dueling else ()
        heads = q_network_on_features(features, action_space, hidden_sizes=sizes, activation=config.activation, dueling=dueling)
        return dataclasses.replace(heads, apply=lambda params, x: heads.apply(params, x)[..., 0])

    return recurrent_network(observation_space, make_heads, config)
