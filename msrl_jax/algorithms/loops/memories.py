"""Memories of off-policy actor-critics, learned from replayed sequences (Ni et al., 2022, arXiv 2110.05038).

The actor has one memory, and all critics together have another. Both keep what was observed, and both are stored with every
step. Losses are those of algorithms without a memory: a batch has as many steps as its windows have after the burn-in, and in
place of their observations the windows that lead to them.

In the shape descriptions, `S` denotes the length of a window, `L` is `trace_length`, `B` the number of windows in a batch, and
`N = B L` the number of steps to learn from.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax.algorithms.agent import Progress
from msrl_jax.algorithms.fields import check_unused
from msrl_jax.algorithms.loops.buffers import action_type, n_step_buffer, sequence_buffer
from msrl_jax.algorithms.loops.off_policy import Batch, Explore, Learner, Rule
from msrl_jax.algorithms.loops.windows import replay_values, successors
from msrl_jax.algorithms.networks.layers import Network, Torso, TwoTorsos, flatten, unflatten
from msrl_jax.algorithms.networks.recurrent import RecurrentNetwork, recurrent_network
from msrl_jax.envs import Environment, Space
from msrl_jax.envs.base import is_on_host
from msrl_jax.envs.masks import observation_type, unmasked, with_mask_of
from msrl_jax.envs.privileged import actor_part, with_privileged_of
from msrl_jax.fragments import fragment
from msrl_jax.fragments.counters import Counter
from msrl_jax.replay import NStep, Replay, Transition
from msrl_jax.replay.buffers import fold


class History(NamedTuple):
    """What a network with a memory sees in place of observations `[N, ...]`."""

    obs: Any  # the observations, for the critics that see more than a memory does, [N, ...]
    window: Transition  # the steps around them, [S, B, ...]; carries are by the names of networks
    last: jax.Array | None  # if they are successors, those of these steps after the burn-in, [L, B]


def check_memory(config: Any) -> None:
    """Raises ValueError if an algorithm with a memory is to learn from a data set too, or in hindsight."""
    name = type(config).__name__
    if config.core == "none":
        check_unused(config, ("burn_in", "trace_length"), "with core='none'")
    if config.core != "none" and config.hindsight:
        raise ValueError(
            f"{name}.hindsight={config.hindsight} replaces goals of single steps, but {name}.core learns from sequences, of "
            "which memories saw the old ones; use core='none', or leave hindsight out"
        )
    if config.core != "none" and config.data is not None:
        raise ValueError(
            f"{name}.core learns from sequences with what was remembered, but data have single steps; "
            "use core='none', or leave data out"
        )


def with_memory(name: str, observation_space: Space, config: Any, make: Callable[[Any], Network]) -> Network:
    """The network that `make` makes of a space of observations, or of torsos that follow a memory if the config has a core.

    With a memory, it takes `History`s, or the features that the memory makes of observations. After the memory comes a dense
    layer as wide as the last one before it; a critic's privileged state joins the features there.
    """
    if config.core == "none":
        return make(observation_space)
    made: list[Network] = []

    def make_heads(torsos: Torso | TwoTorsos) -> Network:
        layers = {"hidden_sizes": config.hidden_sizes[-1:], "layer_norm": config.layer_norm}
        if isinstance(torsos, TwoTorsos):
            torsos = torsos._replace(actor=torsos.actor.clone(**layers))
        else:
            torsos = torsos.clone(**layers)
        made.append(make(torsos))
        return Network(made[0].init, lambda params, seen: actor_part(unmasked(seen)))

    memory = recurrent_network(observation_space, make_heads, config)
    (heads,) = made

    def features(params: Any, history: History) -> jax.Array:
        window = history.window._replace(carry=history.window.carry[name])
        outputs, carries = replay_values(memory, params, window, config.burn_in)
        if history.last is None:
            return flatten(outputs[: config.trace_length])
        after = jax.tree.map(lambda x: x[config.burn_in :], window)
        return flatten(_at(successors(memory, params, after, outputs, carries), history.last))

    def apply(params: Any, obs: Any, *inputs: jax.Array) -> Any:
        if isinstance(history := unmasked(obs), History):
            obs = with_mask_of(obs, with_privileged_of(history.obs, features(params, history)))
        return heads.apply(params["heads"], obs, *inputs)

    return Network(lambda key, obs: memory.init(key), apply, memory)


def first_critic(critics: Network, params: Any) -> Any:
    """The parameters of the first of several critics, with the memory of all."""
    first = jax.tree.map(lambda x: x[:1], params["heads"] if critics.memory else params)
    return params | {"heads": first} if critics.memory else first


def remembered(
    config: Any, env: Environment, rule: Rule, explore: Explore, **networks: Network
) -> tuple[Replay, tuple[Rule, Explore]]:
    """The buffer, the rule and the exploration of networks `with_memory`, by their names in the parameters."""
    if config.core == "none":
        return n_step_buffer(env, config), (rule, explore)
    memories: dict[str, RecurrentNetwork] = {name: network.memory for name, network in networks.items()}

    def empty(batch_shape: tuple[int, ...]) -> Any:
        return {name: memory.initial_carry(batch_shape) for name, memory in memories.items()}

    def step(names: Iterable[str], params: Any, obs: Any, carry: Any) -> tuple[Any, Any]:
        """What the actor's memory makes of observations, and the carries, those of some networks after it."""
        stepped = {name: memories[name].step(params[name], obs, carry[name]) for name in names}
        return with_mask_of(obs, stepped["actor"][0]), carry | {name: after for name, (_, after) in stepped.items()}

    def act(params: Any, obs: Any, key: jax.Array | None, carry: Any) -> tuple[jax.Array, Any]:
        features, carry = step(["actor"], params, obs, carry)  # outside of training, critics remember nothing
        return rule.choose_action(params, features, key, ())[0], carry

    def explore_remembering(params: Any, obs: Any, keys: jax.Array, steps: Counter, carry: Any) -> tuple[jax.Array, Any]:
        features, carry = step(memories, params, obs, carry)
        return explore(params, features, keys, steps, ())[0], carry

    @fragment(role="learner")
    def histories(batch: Batch) -> Batch:
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

    def update(learner: Learner, batch: Batch, progress: Progress) -> Any:
        after, td_error, stats = rule.update(learner, histories(batch), progress)
        return after, unflatten(jnp.abs(td_error), config.trace_length).mean(0), stats

    one = observation_type(env), action_type(env.action_space), config, jax.eval_shape(lambda: empty(()))
    buffer = sequence_buffer(*one, may_be_absent=is_on_host(env))
    return buffer, (Rule(rule.init, update, act, lambda num_envs: empty((num_envs,))), explore_remembering)


def _at(x: jax.Array, step: jax.Array) -> jax.Array:
    """The values `[L, B, ...]` of `[T, B, ...]` at steps `[L, B]`."""
    return jax.vmap(lambda x, step: x[step], in_axes=1, out_axes=1)(x, step)
