"""Off-policy actor-critics with a recurrent core, which learn from replayed windows of steps (Ni et al., 2022, 2110.05038).

The actor has one core, and all critics share another one. The losses are those of algorithms without a core: the steps of a
batch are the steps of its windows after the burn-in, and the windows that lead to these steps replace their observations.

In the shape descriptions, `S` denotes the length of a window, `L` is `trace_length`, `B` the number of windows in a batch,
`N = B L` the number of steps to learn from, and `H` the size of a carry.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax.configs.checking import check_unused
from msrl_jax.envs import Environment, Space
from msrl_jax.envs.actions import action_type
from msrl_jax.envs.base import is_on_host
from msrl_jax.envs.masks import observation_type, unmasked, with_mask_of
from msrl_jax.envs.privileged import actor_obs, with_privileged_of
from msrl_jax.loops.buffers import n_step_buffer
from msrl_jax.loops.replay import Batch
from msrl_jax.loops.sequences import replay_values, sequence_buffer, successors
from msrl_jax.networks.network import Network
from msrl_jax.networks.recurrent import recurrent_network
from msrl_jax.networks.torso import AsymmetricTorso, Torso
from msrl_jax.networks.unrolls import flatten, unflatten
from msrl_jax.replay import NStep, ReplayBuffer, Transition
from msrl_jax.replay.buffers import fold


def replay_buffer(env: Environment, config: Any, carry: Any) -> ReplayBuffer:
    """Makes an `n_step_buffer`, or with a core a `sequence_buffer`, which also stores `carry`, given for one environment."""
    if config.core == "none":
        return n_step_buffer(env, config)
    return sequence_buffer(observation_type(env), action_type(env.action_space), config, carry, may_be_absent=is_on_host(env))


class History(NamedTuple):
    """The input of a network with a core, instead of observations `[N, ...]`."""

    obs: Any  # the observations, for critics with privileged state, [N, ...]
    window: Transition  # the windows around them, [S, B, ...]; carries are keyed by network name
    last: jax.Array | None  # for successors: the steps after the burn-in that precede them, [L, B]


def check_core(config: Any) -> None:
    """Raises ValueError if a config combines a core with a data set or with HER."""
    name = type(config).__name__
    if config.core == "none":
        check_unused(config, ("burn_in", "trace_length"), "with core='none'")
    if config.core != "none" and config.hindsight:
        raise ValueError(
            f"{name}.hindsight={config.hindsight} replaces goals of single steps, but {name}.core learns from sequences, whose "
            "carries come from the old ones; use core='none', or leave hindsight out"
        )
    if config.core != "none" and config.data is not None:
        raise ValueError(
            f"{name}.core learns from sequences with the carries of the actors, but data have single steps; "
            "use core='none', or leave data out"
        )


def with_core(name: str, observation_space: Space, config: Any, make: Callable[[Any], Network]) -> Network:
    """Makes a network with `make`, from a space of observations, or from torsos after a core if the config has one.

    With a core, the network takes `History`s, or the features that the core computes. A dense layer with the width of the last
    one before the core follows the core; a critic's privileged state joins the features there.
    """
    if config.core == "none":
        return make(observation_space)
    made: list[Network] = []

    def make_heads(torsos: Torso | AsymmetricTorso) -> Network:
        layers = {"hidden_sizes": config.hidden_sizes[-1:], "layer_norm": config.layer_norm}
        if isinstance(torsos, AsymmetricTorso):
            torsos = torsos._replace(actor=torsos.actor.clone(**layers))
        else:
            torsos = torsos.clone(**layers)
        made.append(make(torsos))
        return Network(made[0].init, lambda params, seen: actor_obs(unmasked(seen)))

    core = recurrent_network(observation_space, make_heads, config)
    (heads,) = made

    def features(params: Any, history: History) -> jax.Array:
        window = history.window._replace(carry=history.window.carry[name])
        outputs, carries = replay_values(core, params, window, config.burn_in)
        if history.last is None:
            return flatten(outputs[: config.trace_length])
        after = jax.tree.map(lambda x: x[config.burn_in :], window)
        return flatten(_at(successors(core, params, after, outputs, carries), history.last))

    def apply(params: Any, obs: Any, *inputs: jax.Array) -> Any:
        if isinstance(history := unmasked(obs), History):
            obs = with_mask_of(obs, with_privileged_of(history.obs, features(params, history)))
        return heads.apply(params["heads"], obs, *inputs)

    return Network(lambda key, obs: core.init(key), apply, core)


def first_critic(critics: Network, params: Any) -> Any:
    """Returns the parameters of the first critic, with the core that all critics share."""
    first = jax.tree.map(lambda x: x[:1], params["heads"] if critics.core else params)
    return params | {"heads": first} if critics.core else first


def initial_carry(networks: Mapping[str, Network], batch_shape: tuple[int, ...]) -> Any:
    """Returns the initial carries of networks by name, zeros `[..., H]`; `()` if they have no core."""
    return {name: network.core.initial_carry(batch_shape) for name, network in networks.items() if network.core} or ()


def step_cores(networks: Mapping[str, Network], params: Any, obs: Any, carry: Any) -> tuple[Any, Any]:
    """Steps the cores of networks; returns the features of the actor's core, and the new carries of these networks."""
    if not carry:
        return obs, carry
    stepped = {name: network.core.step(params[name], obs, carry[name]) for name, network in networks.items()}
    return with_mask_of(obs, stepped["actor"][0]), carry | {name: after for name, (_, after) in stepped.items()}


def single_steps(config: Any, batch: Batch) -> Batch:
    """Returns a batch of single steps `[N, ...]`, made from windows if the config has a core."""
    if config.core == "none":
        return batch
    window: Transition = batch.experience
    after, length = jax.tree.map(lambda x: x[config.burn_in :], window), config.trace_length
    sums = (after.reward, after.terminated, after.truncated)
    sums = (jnp.stack([x[n : n + length] for n in range(config.replay.n_step)]) for x in sums)
    reward, last, discount = fold(*sums, discount=config.discount)
    last += jnp.arange(length)[:, None]

    def history(obs: Any, last: jax.Array | None) -> Any:
        obs = flatten(obs)
        return with_mask_of(obs, History(unmasked(obs), window, last))

    obs, action = jax.tree.map(lambda x: x[:length], (after.obs, after.action))
    next_obs = jax.tree.map(lambda x: _at(x, last), after.next_obs)
    steps = NStep(history(obs, None), *flatten((action, reward, discount)), history(next_obs, last))
    return batch._replace(experience=steps, weight=flatten(jnp.broadcast_to(batch.weight, reward.shape)))


def window_error(config: Any, td_error: jax.Array) -> jax.Array:
    """Returns the TD errors of buffer items `[B]`: with a core, the mean absolute error of each window's steps `[N]`."""
    return td_error if config.core == "none" else unflatten(jnp.abs(td_error), config.trace_length).mean(0)


def _at(x: jax.Array, step: jax.Array) -> jax.Array:
    """Gathers values `[L, B, ...]` from `[T, B, ...]` at steps `[L, B]`."""
    return jax.vmap(lambda x, step: x[step], in_axes=1, out_axes=1)(x, step)
