"""Recurrent networks: GRU and LSTM cores, an actor-critic and action values that remember.

In the shape descriptions, `T` denotes the length of an unroll, `E` the number of environments, `I` the size of an input
and `H` that of the memory. A memory is a tuple of arrays `[..., H]`, of which the first is the core's output; it is
zeros when an episode begins.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from msrl_jax.algorithms.loops.acting import flatten, unflatten
from msrl_jax.algorithms.networks.actor_critic import actor_critic, make_torso
from msrl_jax.algorithms.networks.layers import matmul
from msrl_jax.algorithms.networks.q_network import q_network
from msrl_jax.envs import Box, Discrete, Space

Memory = tuple[jax.Array, ...]
Gates = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One step of a recurrent network, without its matrices.

    Attributes:
      biases: what the bias of every gate starts from.
      num_arrays: how many arrays a memory has.
      update: `(from_input, from_memory, memory) -> memory`, elementwise: what the input matrix makes of the input, one
        array per gate and biases included, and what the recurrent matrix makes of the output before.
    """

    biases: tuple[float, ...]
    num_arrays: int
    update: Callable[[Gates, Gates, Memory], Memory]


def _gru(x: Gates, u: Gates, memory: Memory) -> Memory:
    (h,) = memory
    reset, keep = jax.nn.sigmoid(x[0] + u[0]), jax.nn.sigmoid(x[1] + u[1])
    candidate = jnp.tanh(x[2] + reset * u[2])
    return (candidate + keep * (h - candidate),)


def _lstm(x: Gates, u: Gates, memory: Memory) -> Memory:
    _, c = memory
    write, keep, read = (jax.nn.sigmoid(a + b) for a, b in zip(x[:3], u[:3], strict=True))
    c = keep * c + write * jnp.tanh(x[3] + u[3])
    return read * jnp.tanh(c), c


CELLS: dict[str, Cell] = {
    # Cho et al., 2014, arXiv 1406.1078, with the reset gate after the recurrent matrix, as in cuDNN: one product a step.
    "gru": Cell((0.0, 0.0, 0.0), 1, _gru),
    # Gers et al., 2000; the forget gate starts open (Jozefowicz et al., 2015).
    "lstm": Cell((0.0, 1.0, 0.0, 0.0), 2, _lstm),
}


@dataclasses.dataclass(frozen=True)
class Core:
    """A recurrent layer as pure functions of its parameters.

    Attributes:
      init: `(key, input_size) -> params`.
      initial_memory: `(batch_shape) -> memory`, the one that an episode begins with.
      step: `(params, inputs [..., I], memory [..., H]) -> memory`.
      unroll: `(params, inputs [T, E, I], begins [T, E] bool, memory [E, H]) -> memories after every step [T, E, H]`; the
        memory is cleared before every step with which an episode begins.
    """

    init: Callable[[jax.Array, int], Any]
    initial_memory: Callable[[tuple[int, ...]], Memory]
    step: Callable[[Any, jax.Array, Memory], Memory]
    unroll: Callable[[Any, jax.Array, jax.Array, Memory], Memory]


def recurrent_core(name: str, size: int) -> Core:
    """Makes a recurrent layer.

    Args:
      name: a key of `CELLS`.
      size: size of its memory, `H`.

    Returns:
      The layer: input matrices start as LeCun's normal, every gate's recurrent matrix orthogonal.
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

    def initial_memory(batch_shape: tuple[int, ...]) -> Memory:
        return (jnp.zeros((*batch_shape, size)),) * cell.num_arrays

    def gates(params: Any, inputs: jax.Array) -> Gates:
        return _per_gate(matmul(inputs, params["input"]) + params["bias"], num_gates)

    def step(params: Any, inputs: jax.Array, memory: Memory) -> Memory:
        return cell.update(gates(params, inputs), _per_gate(matmul(memory[0], params["recurrent"]), num_gates), memory)

    def unroll(params: Any, inputs: jax.Array, begins: jax.Array, memory: Memory) -> Memory:
        x = tuple(unflatten(gate, len(inputs)) for gate in gates(params, flatten(inputs)))
        return _scan(cell.update, params["recurrent"], x, begins, memory)

    return Core(init, initial_memory, step, unroll)


def forget(begins: jax.Array, memory: Memory) -> Memory:
    """Clears the memory where an episode begins: `begins` `[...]` bool, memory `[..., H]`."""
    return tuple(jnp.where(begins[..., None], 0.0, m) for m in memory)


def _per_gate(x: jax.Array, num_gates: int) -> Gates:
    # XLA's CPU code for a loop over the elements of several slices of one array is not vectorized: a step of a scan
    # over gates in one array took four times as long as one over an array per gate.
    return tuple(jnp.split(x, num_gates, axis=-1))


def _plain_scan(
    update: Callable[[Gates, Gates, Memory], Memory], kernel: jax.Array, x: Gates, begins: jax.Array, memory: Memory
) -> Memory:
    """The memories `[T, E, H]` after every step, from gates' inputs `[T, E, H]` and a recurrent matrix."""

    def step(memory, inputs):
        x, begins = inputs
        memory = forget(begins, memory)
        memory = update(x, _per_gate(memory[0] @ kernel, len(x)), memory)
        return memory, memory

    return jax.lax.scan(step, memory, (x, begins))[1]


_scan = jax.custom_vjp(_plain_scan, nondiff_argnums=(0,))


def _scan_forward(update, kernel, x, begins, memory):
    memories = _scan(update, kernel, x, begins, memory)
    return memories, (kernel, x, begins, memory, memories)


def _scan_backward(update, residuals, cotangents):
    kernel, x, begins, memory, memories = residuals
    before = tuple(jnp.concatenate([m[None], ms[:-1]]) for m, ms in zip(memory, memories, strict=True))
    before = forget(begins, before)
    # Only the cotangents of the memories depend on later steps. The rest is computed for all steps at once: before the
    # scan the gates and the derivatives of every memory (a cell is elementwise, so these are arrays, no matrices), after
    # it the gradients of gates and matrix (which would otherwise be summed, over devices too, in every step).
    _, pullback = jax.vjp(update, x, _per_gate(before[0] @ kernel, len(x)), before)
    ones, zeros = jnp.ones_like(before[0]), jnp.zeros_like(before[0])
    slopes = [pullback(tuple(ones if i == j else zeros for i in range(len(memory)))) for j in range(len(memory))]
    by_x, by_u, by_memory = zip(*slopes, strict=True)

    def step(carry, inputs):
        begins, cotangent, by_u, by_memory = inputs
        cotangent = tuple(map(jnp.add, carry, cotangent))
        output, *rest = _chain(cotangent, by_memory)
        output += jnp.concatenate(_chain(cotangent, by_u), axis=-1) @ kernel.T
        return forget(begins, (output, *rest)), cotangent

    start = tuple(map(jnp.zeros_like, memory))
    dmemory, cotangents = jax.lax.scan(step, start, (begins, cotangents, by_u, by_memory), reverse=True)
    du = jnp.concatenate(_chain(cotangents, by_u), axis=-1)
    (dkernel,) = jax.vjp(lambda kernel: matmul(flatten(before[0]), kernel), kernel)[1](flatten(du))
    return dkernel, _chain(cotangents, by_x), None, dmemory


def _chain(cotangents: Memory, slopes: tuple[Gates, ...]) -> Gates:
    """The chain rule, elementwise: from the cotangent of every memory and its derivatives by each of several arrays."""
    return tuple(functools.reduce(jnp.add, map(jnp.multiply, cotangents, by)) for by in zip(*slopes, strict=True))


_scan.defvjp(_scan_forward, _scan_backward)


class Heads(Protocol):
    """What computes outputs from the features of an observation, such as an `ActorCritic` or a `QNetwork`."""

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
    """A network with a memory as pure functions of its parameters; outputs are those of its heads.

    Attributes:
      init: `(key) -> params`.
      initial_memory: `(batch_shape) -> memory`, the one that an episode begins with.
      step: `(params, obs [..., *observation_shape], memory [..., H]) -> (outputs [..., ...], memory)`.
      unroll: `(params, obs [T, E, *observation_shape], begins [T, E] bool, memory [E, H]) -> (outputs [T, E, ...], memories
        after every step [T, E, H])`; the memory is cleared before every step with which an episode begins.
    """

    init: Callable[[jax.Array], Any]
    initial_memory: Callable[[tuple[int, ...]], Memory]
    step: Callable[[Any, jax.Array, Memory], tuple[Any, Memory]]
    unroll: Callable[[Any, jax.Array, jax.Array, Memory], tuple[Any, Memory]]


def recurrent_network(
    observation_space: Space,
    make_heads: Callable[[Box], Heads],
    *,
    hidden_sizes: tuple[int, ...],
    activation: str,
    network: str,
    core: str,
    memory_size: int,
) -> RecurrentNetwork:
    """Makes a network of a torso, a recurrent core, and heads.

    Args:
      observation_space: a `Box`; of images `[H, W, C]` if the network convolves.
      make_heads: makes the heads for the space of the core's outputs.
      hidden_sizes: widths of the dense layers of the torso.
      activation: a key of `ACTIVATIONS`.
      network: "mlp", "cnn", or "auto", which convolves observations of three dimensions.
      core: a key of `CELLS`.
      memory_size: size of the memory, `H`.

    Returns:
      The network.

    Raises:
      TypeError: if the space is of another kind.
      ValueError: if the network convolves and the observations are no images of at least 3x3.
    """
    torso = make_torso(observation_space, hidden_sizes=hidden_sizes, activation=activation, network=network)
    layer = recurrent_core(core, memory_size)
    heads = make_heads(Box(-np.inf, np.inf, (memory_size,)))

    def init(key: jax.Array) -> dict[str, Any]:
        torso_key, core_key, heads_key = jax.random.split(key, 3)
        return {
            "torso": torso.init(torso_key, jnp.zeros(torso.observation_shape)[None]),
            "core": layer.init(core_key, hidden_sizes[-1]),
            "heads": heads.init(heads_key, jnp.zeros((1, memory_size))),
        }

    def features(params: Any, obs: jax.Array) -> jax.Array:
        return torso.apply(params["torso"], obs)  # pyright: ignore[reportReturnType]

    def step(params: Any, obs: jax.Array, memory: Memory) -> tuple[Any, Memory]:
        memory = layer.step(params["core"], features(params, obs), memory)
        return heads.apply(params["heads"], memory[0]), memory

    def unroll(params: Any, obs: jax.Array, begins: jax.Array, memory: Memory) -> tuple[Any, Memory]:
        # Rows of [E * T] keep the gradients of the matrices where the environments are; rows of [T * E] would not.
        inputs = unflatten(features(params, flatten(obs)), len(obs))
        memories = layer.unroll(params["core"], inputs, begins, memory)
        outputs = heads.apply(params["heads"], flatten(memories[0]))
        return jax.tree.map(lambda x: unflatten(x, len(obs)), outputs), memories

    return RecurrentNetwork(init, layer.initial_memory, step, unroll)


def recurrent_actor_critic(observation_space: Space, action_space: Space, config: Any) -> RecurrentNetwork:
    """Makes a policy and a value function with a memory: linear heads on a recurrent core.

    Args:
      observation_space: a `Box`; of images `[H, W, C]` if the network convolves.
      action_space: `Discrete`, or a `Box` of floats.
      config: with the fields `hidden_sizes`, `activation`, `network`, `core` and `memory_size`.

    Returns:
      The network: its outputs are distributions over actions, as those of `actor_critic`, and values `[...]`.

    Raises:
      TypeError: if a space is of another kind.
      ValueError: if the network convolves and the observations are no images of at least 3x3.
    """

    def make_heads(features: Box) -> Heads:
        return actor_critic(
            features, action_space, hidden_sizes=(), activation=config.activation, network="mlp", shared_torso=True
        )

    return _of_config(observation_space, make_heads, config)


def recurrent_q_network(observation_space: Space, action_space: Discrete, config: Any) -> RecurrentNetwork:
    """Makes action values with a memory: a linear head on a recurrent core, or two streams of one dense layer each.

    Args:
      observation_space: a `Box`; of images `[H, W, C]` if the network convolves.
      action_space: its size is `A`.
      config: with the fields `hidden_sizes`, `activation`, `network`, `core`, `memory_size` and `dueling`; streams are as wide
        as the last dense layer.

    Returns:
      The network: its outputs are values `[..., A]`.

    Raises:
      TypeError: if the space of observations is of another kind.
      ValueError: if the network convolves and the observations are no images of at least 3x3.
    """

    def make_heads(features: Box) -> Heads:
        heads = q_network(
            features, action_space, hidden_sizes=config.hidden_sizes[-1:] if config.dueling else (),
            activation=config.activation, network="mlp", dueling=config.dueling,
        )  # fmt: skip
        return dataclasses.replace(heads, apply=lambda params, x: heads.apply(params, x)[..., 0])

    return _of_config(observation_space, make_heads, config)


def _of_config(observation_space: Space, make_heads: Callable[[Box], Heads], config: Any) -> RecurrentNetwork:
    return recurrent_network(
        observation_space, make_heads, hidden_sizes=config.hidden_sizes, activation=config.activation,
        network=config.network, core=config.core, memory_size=config.memory_size,
    )  # fmt: skip
