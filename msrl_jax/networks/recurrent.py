"""Networks with or without a recurrent core, as pure functions.

In the shape descriptions, `T` denotes the length of an unroll, `E` the number of environments and `H` the size of the recurrent
state. A carry (the recurrent state) is a tuple of arrays `[..., H]`; without a core it is `()`. An episode starts with zeros.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import Box, Space
from msrl_jax.envs.privileged import PrivilegedObservation, with_privileged_of
from msrl_jax.envs.spaces import zeros
from msrl_jax.networks.core import Core, RecurrentFields
from msrl_jax.networks.torso import AsymmetricTorso, Torso, make_torsos
from msrl_jax.networks.unrolls import Carry, flatten, unflatten


class RecurrentNetwork(NamedTuple):
    """A recurrent network as pure functions of its parameters; its heads compute the outputs."""

    init: Callable[[jax.Array], Any]  # (key) -> params
    initial_carry: Callable[[tuple[int, ...]], Carry]  # (batch_shape) -> zeros
    # (params, obs [..., *observation_shape], carry [..., H]) -> (outputs [..., ...], carry)
    step: Callable[[Any, Any, Carry], tuple[Any, Carry]]
    # (params, obs [T, E, *observation_shape], is_first [T, E] bool, carry [E, H]) -> (outputs [T, E, ...], carries after every
    # step [T, E, H]); clears the carry before the first step of every episode
    unroll: Callable[[Any, Any, jax.Array, Carry], tuple[Any, Carry]]
    # (params, outputs) -> values; if `step` saw no privileged state, its outputs are features, passed with that state
    value: Callable[[Any, Any], Any] = lambda params, value: value


def recurrent_network(observation_space: Space, make_heads: Callable[[Any], Any], config: RecurrentFields) -> RecurrentNetwork:
    """Makes a network of a torso, the recurrent core and heads; without a core, carries are empty.

    A critic with a privileged state also sees the outputs of the core: without the actor's recurrent state, its values would be
    wrong (Baisero & Amato, 2022, arXiv 2105.11674).
    """
    torsos = make_torsos(observation_space, config)
    torso = torsos.actor if isinstance(torsos, AsymmetricTorso) else torsos
    if config.core is None:
        return _feed_forward(observation_space, make_heads(torso))
    if torso.is_whole:
        raise ValueError("network=CustomNetworks(...) has no place for a core; give a module of features")
    core: Core = config.core.make(torso.num_features)
    head_torso: Any = Torso(Box(-np.inf, np.inf, (core.num_outputs,)), (), config.activation)
    if isinstance(torsos, AsymmetricTorso):
        head_torso = AsymmetricTorso(head_torso, torsos.critic.clone(input_part="both"))
    heads = make_heads(head_torso)

    def init(key: jax.Array) -> dict[str, Any]:
        torso_key, core_key, heads_key = jax.random.split(key, 3)
        example = zeros(observation_space)
        return {
            "torso": torso.init(torso_key, example),
            "core": core.init(core_key, torso.num_features),
            "heads": heads.init(heads_key, with_privileged_of(example, jnp.zeros((1, core.num_outputs), jnp.float32))),
        }

    def features(params: Any, obs: jax.Array) -> jax.Array:
        return torso.apply(params["torso"], obs)  # pyright: ignore[reportReturnType]

    def step(params: Any, obs: jax.Array, carry: Carry) -> tuple[Any, Carry]:
        outputs, carry = core.step(params["core"], features(params, obs), carry)
        return heads.apply(params["heads"], with_privileged_of(obs, outputs)), carry

    def unroll(params: Any, obs: jax.Array, is_first: jax.Array, carry: Carry) -> tuple[Any, Carry]:
        # A convolution takes one batch dimension; in the order [E * T] it stays split over devices like the environments.
        inputs = unflatten(features(params, flatten(obs)), len(is_first)) if torso.is_batched else features(params, obs)
        outputs, carries = core.unroll(params["core"], inputs, is_first, carry)
        return heads.apply(params["heads"], with_privileged_of(obs, outputs)), carries

    def value(params: Any, features: Any) -> Any:
        return heads.value(params["heads"], features) if isinstance(features, PrivilegedObservation) else features

    return RecurrentNetwork(init, core.initial_carry, step, unroll, value)


def _feed_forward(space: Space, network: Any) -> RecurrentNetwork:
    """Wraps a network without a core in the interface of a recurrent one."""

    def unroll(params: Any, obs: Any, is_first: jax.Array, carry: Carry) -> tuple[Any, Carry]:
        return jax.tree.map(lambda x: unflatten(x, len(is_first)), network.apply(params, flatten(obs))), carry

    return RecurrentNetwork(
        init=lambda key: network.init(key, zeros(space)),
        initial_carry=lambda batch_shape: (),
        step=lambda params, obs, carry: (network.apply(params, obs), carry),
        unroll=unroll,
    )
