"""What the off-policy actor-critics share: networks, buffer and the checks of their configs.

In the shape descriptions, `B` denotes the batch size, `C` the number of critics, `N` the number of choices and `D` the
length of an action. A vector of continuous actions is in [-1, 1] everywhere but in the environment.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from msrl_jax import replay
from msrl_jax.algorithms.configs import checks as check
from msrl_jax.algorithms.networks.actor_critic import Torso, make_torso
from msrl_jax.algorithms.networks.distributions import Categorical, Normal, TanhNormal
from msrl_jax.algorithms.networks.layers import dense
from msrl_jax.envs import Box, Discrete, Space, VectorEnvironment


def check_config(config: Any) -> None:
    """Raises ValueError on a field, common to the off-policy actor-critics, whose value cannot work."""
    check.check_common(config)
    check.check_integers(config, 1, "num_updates", "batch_size", "capacity", "learning_starts", "n_step", "shards")
    check.check_numbers(config, "tau", above=0.0, high=1.0)


def check_bounded(name: str, space: Space) -> None:
    """Raises TypeError or ValueError unless a space of actions is a `Box` of floats with finite bounds."""
    if isinstance(space, Discrete):
        raise TypeError(f"{name} acts in a bounded Box, not in {space}; use sac, ppo or a DQN for choices")
    if not isinstance(space, Box) or not jnp.issubdtype(space.dtype, jnp.floating):
        raise TypeError(f"{name} acts in a bounded Box of floats, not in {space}; wrap the environment to take one")
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise ValueError(
            f"{name} needs finite bounds of every component of an action, but the space is {space}; give its action_space "
            f"finite low and high, or use ppo"
        )


def make_buffer(venv: VectorEnvironment, action: jax.ShapeDtypeStruct, config: Any) -> replay.Replay:
    """Makes the buffer of uniformly drawn n-step transitions.

    Args:
      venv: the vector environment.
      action: shape and dtype of one action as the algorithm makes it.
      config: with the fields of `check_config` and `storage`.

    Returns:
      The buffer.

    Raises:
      ValueError: if its sizes do not fit each other, or a codec does not fit the observations.
    """
    space = venv.observation_space
    assert isinstance(space, Box)
    obs, number, flag = (jax.ShapeDtypeStruct(*x) for x in ((space.shape, space.dtype), ((), jnp.float32), ((), jnp.bool_)))
    storage = None if config.storage is None else {"obs": config.storage, "next_obs": config.storage}
    return replay.uniform(
        replay.Transition(obs, action, number, flag, flag, obs), capacity=config.capacity, num_envs=config.num_envs,
        unroll_length=config.unroll_length, batch_size=config.batch_size, length=config.n_step, discount=config.discount,
        min_size=config.learning_starts, shards=config.shards, storage=storage,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Network:
    """A network as pure functions of its parameters.

    Attributes:
      init: `(key, *inputs) -> params`.
      apply: `(params, *inputs) -> outputs`.
    """

    init: Callable[..., Any]
    apply: Callable[..., jax.Array]


class _Head(nn.Module):
    """A torso and a linear layer."""

    torso: Torso
    num_outputs: int
    scale: float

    @nn.compact
    def __call__(self, *inputs: jax.Array) -> jax.Array:
        """Maps the torso's inputs to `[..., num_outputs]`."""
        return dense(self.num_outputs, self.scale)(self.torso(*inputs))


def make_actor(observation_space: Space, num_outputs: int, config: Any) -> Network:
    """Makes the network of a policy, whose outputs start near 0.

    Args:
      observation_space: a `Box`.
      num_outputs: how many numbers describe what to do.
      config: with the fields `hidden_sizes`, `activation` and `network`.

    Returns:
      The network, `(params, obs [..., *observation_shape]) -> [..., num_outputs]`.

    Raises:
      TypeError: if the space is of another kind.
      ValueError: if the network convolves and the observations are no images of at least 3x3.
    """
    module = _Head(_torso(observation_space, config), num_outputs, 0.01)
    return Network(module.init, cast(Any, module.apply))


@dataclasses.dataclass(frozen=True)
class Policy:
    """A distribution over actions as pure functions of parameters.

    Attributes:
      init: `(key, obs [..., *observation_shape]) -> params`.
      apply: `(params, obs) -> distribution`.
    """

    init: Callable[[jax.Array, jax.Array], Any]
    apply: Callable[[Any, jax.Array], Categorical | TanhNormal]

    def choose_action(self, params: Any, obs: jax.Array, key: jax.Array | None) -> jax.Array:
        """Actions for observations `[E, ...]`: drawn, or the most probable ones if `key` is None."""
        policy = self.apply(params, obs)
        return policy.mode() if key is None else policy.sample(jax.random.split(key, obs.shape[0]))


def make_policy(observation_space: Space, action_space: Space, config: Any) -> Policy:
    """Makes a stochastic policy: over choices, or over vectors in [-1, 1] with a deviation that depends on the observation.

    Args:
      observation_space: a `Box`.
      action_space: `Discrete`, or a `Box`.
      config: with the fields `hidden_sizes`, `activation` and `network`.

    Returns:
      The policy, of one network.

    Raises:
      TypeError: if the space of observations is of another kind.
      ValueError: if the network convolves and the observations are no images of at least 3x3.
    """
    size: int = math.prod(action_space.shape)  # pyright: ignore[reportAssignmentType]
    network = make_actor(observation_space, action_space.n if isinstance(action_space, Discrete) else 2 * size, config)

    def apply(params: Any, obs: jax.Array) -> Categorical | TanhNormal:
        outputs = network.apply(params, obs)
        if isinstance(action_space, Discrete):
            return Categorical(outputs)
        loc, log_scale = jnp.split(outputs, 2, axis=-1)
        return TanhNormal(Normal(loc, jnp.clip(log_scale, -20.0, 2.0)))

    return Policy(network.init, apply)


def make_critics(observation_space: Space, action_space: Space, num_critics: int, config: Any) -> Network:
    """Makes critics that differ in their initial parameters only; one batched product computes a layer of all.

    Args:
      observation_space: a `Box`.
      action_space: `Discrete`, or a `Box`.
      num_critics: how many, `C`.
      config: with the fields `hidden_sizes`, `activation` and `network`.

    Returns:
      The network: `(params, obs [B, ...]) -> values [C, B, N]` of all choices, or `(params, obs, action [B, D]) ->
      values [C, B]`.

    Raises:
      TypeError: if the space of observations is of another kind.
      ValueError: if the network convolves and the observations are no images of at least 3x3.
    """
    discrete = isinstance(action_space, Discrete)
    module = _Head(_torso(observation_space, config), action_space.n if discrete else 1, 1.0)

    def init(key: jax.Array, *inputs: jax.Array) -> Any:
        return jax.lax.map(lambda k: module.init(k, *inputs), jax.random.split(key, num_critics))

    def apply(params: Any, *inputs: jax.Array) -> jax.Array:
        values = jax.vmap(lambda p: cast(jax.Array, module.apply(p, *inputs)))(params)
        return values if discrete else values[..., 0]

    return Network(init, apply)


def make_value(observation_space: Space, config: Any) -> Network:
    """Makes the network of a policy's values.

    Args:
      observation_space: a `Box`.
      config: with the fields `hidden_sizes`, `activation` and `network`.

    Returns:
      The network: `(params, obs [..., *observation_shape]) -> values [...]`.

    Raises:
      TypeError: if the space is of another kind.
      ValueError: if the network convolves and the observations are no images of at least 3x3.
    """
    module = _Head(_torso(observation_space, config), 1, 1.0)
    return Network(module.init, lambda params, obs: cast(jax.Array, module.apply(params, obs))[..., 0])


def _torso(observation_space: Space, config: Any) -> Torso:
    return make_torso(
        observation_space, hidden_sizes=config.hidden_sizes, activation=config.activation, network=config.network
    )


def action_type(space: Space) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one action as these algorithms make it: a choice, or a vector `[D]` in [-1, 1]."""
    discrete = isinstance(space, Discrete)
    return jax.ShapeDtypeStruct(() if discrete else (math.prod(space.shape),), jnp.int32 if discrete else jnp.float32)


def init_critics(critics: Network, key: jax.Array, space: Space, obs: jax.Array) -> Any:
    """Parameters of critics for observations `[B, ...]` and actions of a space."""
    action = action_type(space)
    return critics.init(key, *((obs,) if isinstance(space, Discrete) else (obs, jnp.zeros((len(obs), *action.shape)))))


def taken_value(critics: Network, params: Any, obs: jax.Array, action: jax.Array) -> jax.Array:
    """The values `[C, B]` that critics give to actions `[B]` or `[B, D]`."""
    if jnp.issubdtype(action.dtype, jnp.integer):
        return jnp.take_along_axis(critics.apply(params, obs), action[None, :, None], axis=-1)[..., 0]
    return critics.apply(params, obs, action)


def uniform_actions(keys: jax.Array, space: Space) -> jax.Array:
    """Draws uniform actions.

    Args:
      keys: one per action. `[E]`
      space: a `Box`, or `Discrete`.

    Returns:
      Actions in [-1, 1] `[E, D]`, or choices `[E]` int32.
    """
    if isinstance(space, Discrete):
        return jax.vmap(lambda key: jax.random.randint(key, (), 0, space.n))(keys)
    assert isinstance(space, Box)
    size = math.prod(space.shape)
    return jax.vmap(lambda key: jax.random.uniform(key, (size,), minval=-1.0, maxval=1.0))(keys)
