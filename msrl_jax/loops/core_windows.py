"""Off-policy actor-critics with a recurrent core, which learn from replayed windows of steps (Ni et al., 2022, 2110.05038).

The actor has one core, and all critics share another one. The losses are those of algorithms without a core: the steps of a
batch are the steps of its windows after the burn-in, and the windows that lead to these steps replace their observations.

In the shape descriptions, `S` denotes the length of a window, `L` is `trace_length`, `B` the number of windows in a batch,
`N = B L` the number of steps to learn from, and `H` the size of a carry.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax.envs import Environment, Space
from msrl_jax.envs.actions import action_type
from msrl_jax.envs.base import is_on_host
from msrl_jax.envs.masks import observation_type, unmasked, with_mask_of
from msrl_jax.envs.privileged import actor_obs, with_privileged_of
from msrl_jax.loops.off_policy import Batch
from msrl_jax.loops.sequence_replay import replay_values, sequence_buffer, successors
from msrl_jax.loops.windows import WindowFields, Windows
from msrl_jax.networks.core import Core, RecurrentFields
from msrl_jax.networks.network import Network
from msrl_jax.networks.recurrent import RecurrentNetwork, recurrent_network
from msrl_jax.networks.torso import AsymmetricTorso, Torso
from msrl_jax.networks.unrolls import flatten, unflatten
from msrl_jax.replay import NStep, ReplayBuffer, Transition
from msrl_jax.replay.buffers import fold


@dataclasses.dataclass(frozen=True)
class ResolvedCore:
    """The core of a config when algorithms are built: it brings their code for cores, which they do not import."""

    make: Callable[[int], Core]  # from the size of the inputs

    def network(self, observation_space: Space, make_heads: Callable[[Any], Any], config: RecurrentFields) -> RecurrentNetwork:
        """Makes a recurrent network."""
        return recurrent_network(observation_space, make_heads, config)

    def windows(self, config: WindowFields) -> "CoreWindows":
        """Returns the windows of an off-policy config."""
        return CoreWindows(config)


class History(NamedTuple):
    """The input of a network with a core, instead of observations `[N, ...]`."""

    obs: Any  # the observations, for critics with privileged state, [N, ...]
    window: Transition  # the windows around them, [S, B, ...]; carries are keyed by network name
    last: jax.Array | None  # for successors: the steps after the burn-in that precede them, [L, B]


class CoreWindows(Windows):
    """The windows of networks with recurrent cores: sequences of steps."""

    def __init__(self, config: WindowFields) -> None:
        super().__init__(config)
        self.cores: dict[str, RecurrentNetwork] = {}

    def network(self, name: str, space: Space, make: Callable[[Any], Network]) -> Network:
        """Makes a network with `make`, from the torsos after a core.

        The network takes `History`s, or the features that the core computes. A dense layer with the width of the last one
        before the core follows the core; a critic's privileged state joins the features there.
        """
        config, heads_made = self.config, list[Network]()

        def make_heads(torsos: Torso | AsymmetricTorso) -> Network:
            layers = {"hidden_sizes": config.hidden_sizes[-1:], "layer_norm": config.layer_norm}
            if isinstance(torsos, AsymmetricTorso):
                torsos = torsos._replace(actor=torsos.actor.clone(**layers))
            else:
                torsos = torsos.clone(**layers)
            heads_made.append(make(torsos))
            return Network(heads_made[0].init, lambda params, inputs: actor_obs(unmasked(inputs)))

        self.cores[name] = core = recurrent_network(space, make_heads, config)
        (heads,) = heads_made

        def features(params: Any, history: History) -> jax.Array:
            window = history.window._replace(carry=history.window.carry[name])
            outputs, carries = replay_values(core, params, window, config.burn_in)
            if history.last is None:
                return flatten(outputs[: config.trace_length])
            trace = jax.tree.map(lambda x: x[config.burn_in :], window)
            return flatten(_gather_steps(successors(core, params, trace, outputs, carries), history.last))

        def apply(params: Any, obs: Any, *inputs: Any) -> Any:
            if isinstance(history := unmasked(obs), History):
                obs = with_mask_of(obs, with_privileged_of(history.obs, features(params, history)))
            return heads.apply(params["heads"], obs, *inputs)

        return Network(lambda key, obs: core.init(key), apply)

    def buffer(self, env: Environment) -> ReplayBuffer:
        """Makes the buffer, which also stores the carries; the networks must be made before."""
        carry = jax.eval_shape(lambda: self._zeros(()))
        return sequence_buffer(
            observation_type(env), action_type(env.action_space), self.config, carry, may_be_invalid=is_on_host(env)
        )

    def initial_carry(self, num_envs: int) -> Any:
        """Returns the recurrent states at the start of episodes, zeros `[E, H]`, by network."""
        return self._zeros((num_envs,))

    def _zeros(self, batch_shape: tuple[int, ...]) -> dict[str, Any]:
        return {name: core.initial_carry(batch_shape) for name, core in self.cores.items()}

    def step(self, params: Mapping[str, Any], obs: Any, carry: Any) -> tuple[Any, Any]:
        """Steps the cores; returns the features of the actor's core, and the next carry. Without critics, leaves theirs."""
        results = {n: core.step(params[n], obs, carry[n]) for n, core in self.cores.items() if n in params}
        return with_mask_of(obs, results["actor"][0]), carry | {name: new_carry for name, (_, new_carry) in results.items()}

    def steps(self, batch: Batch) -> Batch:
        """Returns the steps `[N, ...]` of windows `[S, B, ...]` after the burn-in."""
        window: Transition = batch.experience
        length = self.config.trace_length
        trace = jax.tree.map(lambda x: x[self.config.burn_in :], window)
        sums = (trace.reward, trace.terminated, trace.truncated)
        sums = (jnp.stack([x[n : n + length] for n in range(self.config.replay.n_step)]) for x in sums)
        reward, last, discount = fold(*sums, discount=self.config.discount)
        last += jnp.arange(length)[:, None]

        def history(obs: Any, last: jax.Array | None) -> Any:
            obs = flatten(obs)
            return with_mask_of(obs, History(unmasked(obs), window, last))

        obs, action = jax.tree.map(lambda x: x[:length], (trace.obs, trace.action))
        next_obs = jax.tree.map(lambda x: _gather_steps(x, last), trace.next_obs)
        steps = NStep(history(obs, None), *flatten((action, reward, discount)), history(next_obs, last))
        return batch._replace(experience=steps, weight=flatten(jnp.broadcast_to(batch.weight, reward.shape)))

    def errors(self, td_error: jax.Array) -> jax.Array:
        """Returns the mean absolute TD error of each window `[B]`."""
        return unflatten(jnp.abs(td_error), self.config.trace_length).mean(0)

    def first_critic(self, params: Any) -> Any:
        """Returns the parameters of the first critic, with the core that all critics share."""
        return params | {"heads": super().first_critic(params["heads"])}


def _gather_steps(x: jax.Array, step: jax.Array) -> jax.Array:
    """Gathers values `[L, B, ...]` from `[T, B, ...]` at steps `[L, B]`."""
    return jax.vmap(lambda x, step: x[step], in_axes=1, out_axes=1)(x, step)
