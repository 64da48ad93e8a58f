"""PPO for several agents: independent (IPPO) and with a centralized critic (MAPPO), feed-forward or recurrent.

IPPO: de Witt et al., 2020, arXiv 2011.09533. MAPPO: Yu et al., 2022, arXiv 2103.01955. The loop over environments is in
`loops/teams.py`.

In the shape descriptions, `T` is `unroll_length`, `E` is `num_envs`, `A` the number of agents of the team, `S` the length of a
global state, `M` is `num_minibatches` and `B` the number of rows of one network. A minibatch of feed-forward networks holds
`T / M` time steps of all environments; one of recurrent networks holds one environment from every group of `M` adjacent ones.
A shuffle therefore moves no data between devices. With `share_parameters`, the agents of an environment are rows of one
network; without it, every agent has its own network, gradient and optimizer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from msrl_jax.agents.agent import Agent, Metrics, Progress, learning_rate_at, split_keys
from msrl_jax.agents.optimizers import make_optimizer
from msrl_jax.algorithms.ppo import ppo_loss
from msrl_jax.configs.config import (
    ALL_ACTIONS,
    Activation,
    NetworkKind,
    Normalization,
    OptimizerKind,
    Tunable,
    TunableOrNone,
    config,
    field,
    tunable,
    variant,
)
from msrl_jax.envs import MultiAgentEnvironment, VectorizedAgents
from msrl_jax.envs.spaces import is_continuous
from msrl_jax.fragments import fragment
from msrl_jax.kernels.networks import global_norm
from msrl_jax.kernels.time import truncated_values
from msrl_jax.loops.divergence import apply_gradients, current_rate_metric, no_divergence, update_divergence
from msrl_jax.loops.minibatches import check_minibatches, gather_carry, gather_minibatch, has_core, shuffle
from msrl_jax.loops.teams import Experience, Now, Team, agent_of
from msrl_jax.loops.trajectory import next_values
from msrl_jax.networks.actor_critic import actor_critic, values
from msrl_jax.networks.agent_ids import with_ids, with_ids_space
from msrl_jax.networks.centralized import centralized_actor_critic
from msrl_jax.networks.core import CoreKind
from msrl_jax.networks.policy_heads import check_policy_space
from msrl_jax.networks.unrolls import reset_carry
from msrl_jax.returns.advantages import gae
from msrl_jax.returns.means import standardize
from msrl_jax.returns.value_scale import ValueScale, value_scale


class TeamLearner(NamedTuple):
    """The state of a team except its parameters."""

    opt_state: optax.OptState  # one for each network
    key: jax.Array  # of the learner, for shuffling
    actor_keys: jax.Array  # keys for sampling actions, one per agent, [E, A]
    value_scale: ValueScale | tuple[()]  # the running scale of each critic's targets, if values are normalized


class TeamBatch(NamedTuple):
    """The data of an iteration's updates of one network; leaves are `[T, E, ...]`, or `[T, E, A, ...]` if agents share it."""

    inputs: Any  # inputs of the network
    is_first: jax.Array  # whether an observation is the first of an episode
    action: jax.Array  # before `action_transform`
    log_prob: jax.Array  # when the actions were taken
    advantage: jax.Array
    old_value: jax.Array  # before the updates
    target: jax.Array  # of the values
    valid: jax.Array | None  # which steps count; all if None


@config("ippo", multi_agent=True, actions=ALL_ACTIONS)
class IPPO:
    """PPO for several agents, which share a network or have their own; each learns from its own observations and rewards."""

    num_envs: int = field(default=64, doc="environments stepped in parallel, `E`. Usual: 8 to 4096.")
    unroll_length: int = field(default=32, doc="steps of every environment per iteration, `T`. Usual: 16 to 256.")
    num_epochs: int = field(default=4, doc="passes over the batch per iteration. Usual: 3 to 10.")
    num_minibatches: int = field(default=4, doc="updates per pass, a divisor of `T`, or with a core of `E`. Usual: 4 to 32.")
    learning_rate: Tunable = tunable(default=1e-3, adaptive=True, above=0, doc="step size of updates. Usual: 1e-4 to 1e-3.")
    anneal_learning_rate: bool = field(default=False, doc="whether the learning rate falls linearly to 0. Usual: True.")
    optimizer: OptimizerKind = field(default="adam", doc='a name, or a transformation of optax. Usual: "adam".')
    max_grad_norm: TunableOrNone = tunable(default=0.5, above=0, doc="gradients are clipped to this global norm. Usual: 0.5.")
    discount: Tunable = tunable(default=0.99, low=0, high=1, doc="discount factor per step. Usual: 0.99.")
    gae_lambda: Tunable = tunable(default=0.95, low=0, high=1, doc="lambda of advantages: 0 bias, 1 variance. Usual: 0.95.")
    normalize_advantage: Normalization = field(default="minibatch", doc='how to standardize advantages. Usual: "minibatch".')
    clip_ratio: Tunable = tunable(default=0.2, above=0, doc="clip of the probability ratio around 1. Usual: 0.1 to 0.3.")
    clip_value: TunableOrNone = tunable(default=None, above=0, doc="clip of the critic's change, in its units. Usual: None.")
    target_kl: TunableOrNone = tunable(
        default=None, above=0, doc="KL (nats) above which the rest of an iteration changes nothing. Usual: None, 0.01 to 0.03."
    )
    entropy_coef: Tunable = tunable(default=0.01, low=0, doc="weight of the entropy bonus. Usual: 0 to 0.01.")
    value_coef: Tunable = tunable(default=0.5, low=0, doc="weight of the value loss, half the squared error. Usual: 0.5 to 1.")
    hidden_sizes: tuple[int, ...] = field(default=(64, 64), doc="widths of dense layers. Usual: (64, 64).")
    activation: Activation = field(default="tanh", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "tanh".')
    network: NetworkKind = field(default="auto", doc='a name, or a module; "auto" convolves images. Usual: "auto".')
    layer_norm: bool = field(default=False, doc="whether hidden dense layers are normalized (LayerNorm). Usual: False.")
    shared_torso: bool = field(default=False, doc="whether policy and value share a torso. Usual: False; images: True.")
    core: CoreKind | Any | None = field(default=None, doc='recurrent layer. Usual: None, or "gru".')
    share_parameters: bool = field(default=True, doc="whether agents share one network. Usual: True for one kind of agents.")
    agent_ids: bool = field(default=False, doc="whether a shared network sees which agent it acts for. Usual: False.")
    central_critic: bool = field(default=False, doc="whether the critic sees the global state. Usual: as the algorithm says.")
    normalize_values: bool = field(default=False, doc="whether critics learn values over their RMS. Usual: False.")

    def check(self) -> None:
        """Raises ValueError unless `num_minibatches` divides the number of shuffled items: time steps or environments."""
        check_minibatches(self)

    def build(self, env: MultiAgentEnvironment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space or a size does not fit."""
        return agent_of(self, env)

    def build_team(self, venv: VectorizedAgents, num_agents: int) -> Team:
        """Builds a team of `num_agents` agents of an environment; raises what `build` raises."""
        shared = self.share_parameters
        identify = shared and num_agents > 1
        network = _make_network(venv, num_agents, self)
        optimizer = make_optimizer(self, epsilon=1e-5)
        dims = 3 if shared else 2  # leading dimensions of one network's batch

        def per_network(function: Callable[..., Any], in_axes: Any, out_axes: Any = 0) -> Callable[..., Any]:
            """Maps a function over the networks of all agents, or applies it to the shared network."""
            return function if shared else jax.vmap(function, in_axes=in_axes, out_axes=out_axes)

        def init(params_key: jax.Array, actor_key: jax.Array, learner_key: jax.Array) -> tuple[Any, TeamLearner]:
            keys = params_key if shared else jax.random.split(params_key, num_agents)
            # Sequentially, because a batched QR decomposition of orthogonal initializers is slow.
            params = network.init(keys) if shared else jax.lax.map(network.init, keys)
            opt_state = optimizer.init(params) if shared else jax.vmap(optimizer.init)(params)
            actor_keys = jax.random.split(actor_key, self.num_envs * num_agents).reshape(self.num_envs, num_agents)
            scale = value_scale(*() if shared else (num_agents,)) if self.normalize_values else ()
            return params, TeamLearner(opt_state, learner_key, actor_keys, scale)

        def inputs_of(obs: Any, state: jax.Array) -> Any:
            """Returns the network inputs: observations `[..., A, ...]`, also states `[..., S]` for a centralized critic."""
            if identify and self.agent_ids:
                obs = with_ids(obs, num_agents, venv.observation_space)
            if not self.central_critic:
                return obs
            if identify:  # the shared critic has one row per agent
                state = jnp.broadcast_to(state[..., None, :], (*state.shape[:-1], num_agents, state.shape[-1]))
                state = with_ids(state, num_agents)
            elif shared:
                state = state[..., None, :]
            return obs, state

        # Returns the axis of agents in the inputs of a network. All networks receive the same states.
        def agents_at(axis: int) -> Any:
            return (axis, None) if self.central_critic else axis

        @fragment(role="actor")
        def draw_keys(keys):
            return jax.vmap(lambda keys: split_keys(keys, self.unroll_length), in_axes=1, out_axes=(1, 2))(keys)

        def begin(params: Any, team_state: TeamLearner, progress: Progress) -> tuple[Any, TeamLearner, jax.Array]:
            actor_keys, keys = draw_keys(team_state.actor_keys)
            return params, team_state._replace(actor_keys=actor_keys), keys

        functions = {name: getattr(network, name) for name in ("act", "value_input", "value")}  # applied to rows of agents
        team = network._replace(**{n: per_network(call, (0, agents_at(1), 1), 1) for n, call in functions.items()})

        @fragment(role="actor")
        def choose(params, now, carry, keys):
            policy, value_input, carry = team.act(params, inputs_of(now.obs, now.state), reset_carry(now.is_first, carry))
            action = policy.sample(keys)
            return action, policy.log_prob(action), value_input, carry

        def act(params: Any, now: Now, carry: Any, keys: jax.Array) -> tuple[jax.Array, Any, Any]:
            action, log_prob, value_input, carry = choose(params, now, carry, keys)
            return action, (log_prob, value_input, carry), carry

        # Actors compute what critics need of the last observations, so that the learner does not need the carries after them.
        @fragment(role="actor")
        def bootstrap(params, final_obs, final_state, carries, truncated):
            def value_input(params: Any, final: Any) -> jax.Array:
                obs, state, carry = final
                return team.value_input(params, inputs_of(obs, state), carry)

            return truncated_values(value_input, params, (final_obs, final_state, carries), truncated, and_last=True)

        @fragment(role="learner")
        def estimate_advantages(params, experience, value_inputs, bootstrap_value, scale):
            t, value = experience, values(team, params, inputs_of(experience.obs, experience.state), value_inputs)
            if scale:
                value, bootstrap_value = value * scale.divisor, bootstrap_value * scale.divisor
            truncated = jnp.broadcast_to(t.truncated[..., None], t.terminated.shape)
            next_value = next_values(value, bootstrap_value[-1], bootstrap_value, truncated)
            advantage = gae(
                t.reward, value, next_value, t.terminated, truncated, discount=self.discount, gae_lambda=self.gae_lambda
            )
            target = value + advantage
            if scale:
                scale = scale.updated(target, t.valid)
                value, target = value / scale.divisor, target / scale.divisor
            return value, advantage, target, scale

        @fragment(role="learner")
        def gradients(params, batch, carry, index):
            batch, carry = gather_minibatch(self, batch, index, dims), gather_carry(self, carry, index, dims)
            advantage = (
                standardize(batch.advantage, batch.valid) if self.normalize_advantage == "minibatch" else batch.advantage
            )

            def loss(params):
                policy, value, _ = network.unroll(params, batch.inputs, batch.is_first, carry)
                return ppo_loss(self, policy, value, batch, advantage, batch.old_value, batch.target)

            return jax.grad(loss, has_aux=True)(params)

        @fragment(role="server")
        def apply_update(params, opt_state, grads, learning_rate, divergence):
            learner = apply_gradients(self, optimizer, params, opt_state, grads, learning_rate, divergence)
            return *learner, global_norm(grads)

        def train_network(params, opt_state, batch, carry, minibatches, learning_rate):
            """Makes all updates of one network; returns its parameters, its optimizer state and the mean statistics."""
            if self.normalize_advantage == "batch":
                batch = batch._replace(advantage=standardize(batch.advantage, batch.valid))

            def update(learner, index):
                params, opt_state, divergence = learner
                grads, metrics = gradients(params, batch, carry, index)
                divergence = update_divergence(self, divergence, metrics["approx_kl"])
                params, opt_state, grad_norm = apply_update(params, opt_state, grads, learning_rate, divergence)
                return (params, opt_state, divergence), metrics | {"grad_norm": grad_norm}

            learner, metrics = jax.lax.scan(update, (params, opt_state, no_divergence(self)), minibatches)
            params, opt_state, _ = learner
            return params, opt_state, jax.tree.map(jnp.mean, metrics)

        @fragment(role="learner")
        def update_networks(params, opt_state, progress, key, scale, experience, carry, value_inputs, bootstrap_value):
            t = experience
            value, advantage, target, scale = estimate_advantages(params, t, value_inputs, bootstrap_value, scale)
            is_first = jnp.broadcast_to(t.is_first[..., None], t.terminated.shape)
            valid = t.valid if venv.num_agents > 1 else None  # for a single agent, the episode ends when the agent leaves
            batch = TeamBatch(inputs_of(t.obs, t.state), is_first, t.action, t.extras[0], advantage, value, target, valid)
            learning_rate = learning_rate_at(self, progress)
            key, minibatches = shuffle(key, self)
            agents = TeamBatch(agents_at(2), *[2] * 7)  # type: ignore[arg-type]
            train = per_network(train_network, in_axes=(0, 0, agents, 1, None, None))
            params, opt_state, stats = train(params, opt_state, batch, carry, minibatches, learning_rate)
            metrics = jax.tree.map(jnp.mean, stats) | current_rate_metric(self, learning_rate, opt_state)
            return params, opt_state, key, scale, metrics

        def learn(
            params: Any, team_state: TeamLearner, experience: Experience, now: Now, carry: Any, progress: Progress
        ) -> tuple[Any, TeamLearner, Metrics]:
            t = experience
            _, value_inputs, carries = t.extras
            bootstrap_value = bootstrap(params, t.final_obs, t.final_state, carries, t.truncated)
            # Data that only the actors need stays with them.
            t = t._replace(extras=t.extras[:1], final_obs=(), final_state=())
            params, opt_state, key, scale, metrics = update_networks(
                params,
                team_state.opt_state,
                progress,
                team_state.key,
                team_state.value_scale,
                t,
                carry,
                value_inputs,
                bootstrap_value,
            )
            return params, TeamLearner(opt_state, key, team_state.actor_keys, scale), metrics

        def policy_of(params: Any, obs: Any, carry: Any) -> tuple[Any, Any]:
            """Returns distributions over actions `[E, A]` for acting outside of training, and the carry."""
            num_envs = jax.tree.leaves(obs)[0].shape[0]
            state = jnp.zeros((num_envs, venv.state_size), jnp.float32)  # only values depend on it
            policy, _, carry = team.act(params, inputs_of(obs, state), carry)
            return policy, carry

        def choose_action(
            params: Any, team_state: TeamLearner, obs: Any, key: jax.Array | None, carry: Any
        ) -> tuple[jax.Array, Any]:
            policy, carry = policy_of(params, obs, carry)
            num_envs = jax.tree.leaves(obs)[0].shape[0]
            if key is None:
                return policy.mode(), carry
            return policy.sample(jax.random.split(key, num_envs * num_agents).reshape(num_envs, num_agents)), carry

        def probabilities(params: Any, team_state: TeamLearner, obs: Any) -> jax.Array:
            return policy_of(params, obs, network.initial_carry(()))[0].probabilities()

        agent, env = P() if shared else P("agent"), P("env") if shared else P("env", "agent")
        return Team(
            init=init,
            axes=(agent, TeamLearner(agent, P(), env, agent if self.normalize_values else ())),  # type: ignore[arg-type]
            begin=begin,
            act=act,
            learn=learn,
            choose_action=choose_action,
            initial_carry=lambda num_envs: network.initial_carry((num_envs, num_agents)),
            updates_per_iteration=self.num_epochs * self.num_minibatches,
            probabilities=None if has_core(self) or is_continuous(check_policy_space(venv.action_space)) else probabilities,
            env_group=self.num_minibatches if has_core(self) else 1,
            agent_axes=env,
        )


MAPPO = variant(
    IPPO,
    "MAPPO",
    "mappo",
    "PPO for several agents with a critic that sees the global state and which agent it values.",
    central_critic=True,
)


def _make_network(venv: VectorizedAgents, num_agents: int, config: IPPO) -> Any:
    """Makes the network of one agent or of all; a centralized critic takes pairs of observations and states `[..., S]`."""
    identify = config.share_parameters and num_agents > 1
    space, actions = venv.observation_space, venv.action_space
    if identify and config.agent_ids:
        space = with_ids_space(space, num_agents)
    if config.central_critic:
        return centralized_actor_critic(space, actions, venv.state_size + (num_agents if identify else 0), config)
    return actor_critic(config, space, actions)
