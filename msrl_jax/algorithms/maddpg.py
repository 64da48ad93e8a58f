"""MADDPG: actors with their own observations, critics with all observations and actions (Lowe et al., 2017).

"Multi-Agent Actor-Critic for Mixed Cooperative-Competitive Environments", arXiv 1706.02275. Every agent has its own rewards and
episode end, so agents may cooperate or compete. Discrete actions are drawn from the policy, and the gradient flows through
the straight-through Gumbel-softmax (Jang et al., 2017, arXiv 1611.01144), as in EPyMARL (Papoudakis et al., 2021, arXiv
2006.07869); the paper's environments take relaxed actions instead. Continuous actions are deterministic with Gaussian noise.

The team acts as one agent with joint observations and joint actions; the loop over environments is in `loops/teams.py`. The
critics see the actions of the agent's team. One update takes all gradients at the same parameters, so that devices exchange
gradients once; the paper updates the critics first.

In the shape descriptions, `E` is `num_envs`, `B` is `batch_size`, `A` the number of agents, `S` the length of a global state
and `D` the number of discrete actions or the length of a continuous one.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from msrl_jax.agents.action_spaces import check_discrete_or_bounded
from msrl_jax.agents.agent import Agent, Metrics, Progress, learning_rate_at, split_keys, steps_before
from msrl_jax.agents.optimizers import for_each_network, make_optimizer
from msrl_jax.configs.config import Activation, NetworkKind, OptimizerKind, Tunable, TunableOrNone, config, field, tunable
from msrl_jax.configs.replay_options import Replay
from msrl_jax.envs import Box, Discrete, MultiAgentEnvironment, TeamView, VectorizedAgents
from msrl_jax.envs.actions import action_type, uniform_actions
from msrl_jax.envs.masks import only_legal
from msrl_jax.envs.spaces import zeros
from msrl_jax.fragments import fragment
from msrl_jax.fragments.counters import at_least
from msrl_jax.loops.off_policy import (
    Learner,
    OffPolicyState,
    apply_if,
    draw,
    initial_state,
    learn_from,
    move_target,
    state_axes,
)
from msrl_jax.loops.replay_buffers import window_buffer
from msrl_jax.loops.teams import Experience, Now, Team, agent_of
from msrl_jax.losses.values import value_loss
from msrl_jax.networks.agent_ids import with_ids, with_ids_space
from msrl_jax.networks.distributions import Categorical, choose
from msrl_jax.networks.heads import linear_network, make_actor
from msrl_jax.replay import Transition
from msrl_jax.returns.means import mean


@config("maddpg", multi_agent=True, actions=("discrete", "bounded"))
class MADDPG:
    """Actors that see their own observations, critics that see everything; for discrete actions and bounded floats."""

    num_envs: int = field(default=32, doc="environments stepped in parallel, `E`. Usual: 1 to 256.")
    unroll_length: int = field(default=4, doc="steps of every environment per iteration, `T`. Usual: 1 to 40.")
    discount: Tunable = tunable(default=0.9, low=0, high=1, doc="discount factor per step. Usual: 0.9 for 25 steps, or 0.99.")
    num_updates: int = field(default=8, doc="updates per iteration, `K`. Usual: 1/8 to 1 per environment step.")
    batch_size: int = field(default=256, doc="transitions per update, `B`. Usual: 32 to 512.")
    replay: Replay = field(default=Replay(100_000, learning_starts=4000), doc="the buffer. Usual: 1e4 to 1e6 steps.")
    learning_rate: Tunable = tunable(default=0.001, above=0, doc="step size of updates. Usual: 5e-4 (EPyMARL) to 1e-2 (paper).")
    anneal_learning_rate: bool = field(default=False, doc="whether the learning rate falls linearly to 0. Usual: True.")
    optimizer: OptimizerKind = field(default="adam", doc='a name, or a transformation of optax. Usual: "adam".')
    max_grad_norm: TunableOrNone = tunable(default=0.5, above=0, doc="largest norm of each network's gradients. Usual: 0.5.")
    tau: Tunable = tunable(default=0.01, above=0, high=1, doc="target update rate (Polyak). Usual: 0.001 to 0.05.")
    hidden_sizes: tuple[int, ...] = field(default=(64, 64), doc="widths of dense layers. Usual: (64, 64).")
    activation: Activation = field(default="relu", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".')
    network: NetworkKind = field(default="auto", doc='a name, or a module; "auto" convolves images. Usual: "auto".')
    layer_norm: bool = field(default=False, doc="whether hidden dense layers are normalized (LayerNorm). Usual: False.")
    temperature: Tunable = tunable(default=1.0, above=0, doc="softmax temperature of discrete actions. Usual: 0.5 to 1.")
    output_penalty: Tunable = tunable(default=1e-3, low=0, doc="weight of the actors' mean squared outputs. Usual: 1e-3, or 0.")
    exploration_noise: Tunable = tunable(default=0.1, low=0, doc="deviation of the noise on actions in [-1, 1]. Usual: 0.1.")
    share_parameters: bool = field(default=False, doc="whether agents share actor and critic. Usual: False (the paper).")
    agent_ids: bool = field(default=True, doc="whether a shared actor sees which agent it acts for. Usual: True.")

    def build(self, env: MultiAgentEnvironment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space or a size does not fit."""
        return agent_of(self, env)

    def build_team(self, venv: VectorizedAgents, num_agents: int) -> Team:
        """Builds a team of `num_agents` agents of an environment; raises what `build` raises."""
        space, shared = check_discrete_or_bounded(type(self).__name__, venv.action_space), self.share_parameters
        view, discrete = TeamView(venv, num_agents), isinstance(space, Discrete)
        size = space.n if isinstance(space, Discrete) else math.prod(space.shape)
        identify = shared and num_agents > 1
        adds_ids = identify and self.agent_ids
        obs_space = with_ids_space(view.observation_space, num_agents) if adds_ids else view.observation_space
        states = Box(-np.inf, np.inf, (view.state_size + num_agents * identify,))
        actor = make_actor(obs_space, size, self)
        critic = linear_network("critic", states, self, num_outputs=1, scale=1.0)
        agent_action = action_type(view.action_space)
        action = jax.ShapeDtypeStruct((num_agents, *agent_action.shape), agent_action.dtype)
        buffer = window_buffer(
            view.observation_type,
            action,
            self,
            self.batch_size,
            self.replay.shards,
            agents=(num_agents,),
            length=self.replay.n_step,
            discount=self.discount,
        )
        optimizer = agent_optimizer = make_optimizer(self, epsilon=1e-8)
        if not shared:  # each agent has its own networks

            def update(updates: Any, state: Any, params: Any = None, **rate: Any) -> tuple[Any, Any]:
                return jax.vmap(partial(agent_optimizer.update, **rate))(updates, state, params)

            optimizer = optax.GradientTransformationExtraArgs(jax.vmap(agent_optimizer.init), update)  # type: ignore[arg-type]
        optimizer = for_each_network(optimizer)

        def networks(key: jax.Array) -> dict[str, Any]:
            actor_key, critic_key = jax.random.split(key)
            inputs = jnp.zeros((1, *states.shape), jnp.float32), jnp.zeros((1, num_agents * size), jnp.float32)
            actor_params = actor.init(actor_key, zeros(obs_space))
            return {"actor": actor_params, "critic": critic.init(critic_key, *inputs)}

        def outputs(actors: Any, obs: Any) -> jax.Array:
            """Returns the actors' outputs for observations `[B, A, ...]`: logits, or actions before `tanh`. `[B, A, D]`"""
            if shared:
                return actor.apply(actors, with_ids(obs, num_agents, view.observation_space) if adds_ids else obs)
            return jax.vmap(actor.apply, in_axes=(0, 1), out_axes=1)(actors, obs)

        def actions(output: jax.Array, obs: Any, key: jax.Array) -> jax.Array:
            """Returns differentiable actions of the policies, as inputs of the critics. `[B, A, D]`"""
            if not discrete:
                return jnp.tanh(output)
            keys = jax.random.split(key, len(output))
            noise = jax.vmap(lambda key: jax.random.gumbel(key, output.shape[1:], jnp.float32))(keys)
            return straight_through(only_legal(output, obs) + noise, self.temperature)

        def values(critics: Any, state: jax.Array, joint: jax.Array, valid: jax.Array) -> jax.Array:
            """Returns the values `[B, A]` of joint actions `[B, A, A, D]` in states `[B, S]`; absent agents' actions are 0."""
            joint = jnp.where(valid[:, None, :, None], joint, 0.0).reshape(*joint.shape[:2], num_agents * size)
            if not shared:
                return jax.vmap(critic.apply, in_axes=(0, None, 1), out_axes=1)(critics, state, joint)[..., 0]
            state = jnp.broadcast_to(state[:, None], (len(state), num_agents, state.shape[-1]))
            return critic.apply(critics, with_ids(state, num_agents) if identify else state, joint)[..., 0]

        def for_every_critic(action: jax.Array) -> jax.Array:
            """Repeats the joint action `[B, A, D]` for the critics of all agents. `[B, A, A, D]`"""
            return jnp.broadcast_to(action[:, None], (len(action), num_agents, *action.shape[1:]))

        def average(x: jax.Array, valid: jax.Array) -> jax.Array:
            """Averages over the valid examples `[B, A]`; sums over the agents if each has its own network."""
            return mean(x, valid) if shared else jax.vmap(mean, in_axes=1)(x, valid).sum()

        @fragment(role="actor")
        def draw_keys(keys, progress):
            return *split_keys(keys, self.unroll_length), steps_before(self, progress)

        @fragment(role="actor")
        def explore(params, obs, is_first, keys, steps, carry):
            joint = view.observe(obs)
            keys = jax.vmap(lambda key: jax.random.split(key, num_agents))(keys)
            output = outputs(params["actor"], joint.obs)
            if discrete:
                policy_action = Categorical(only_legal(output, joint.obs)).sample(keys)
            else:
                noise = jax.vmap(jax.vmap(lambda key: jax.random.normal(key, (size,), jnp.float32)))(keys)
                policy_action = jnp.clip(jnp.tanh(output) + self.exploration_noise * noise, -1.0, 1.0)
            rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), joint.obs)
            random_action = uniform_actions(keys.reshape(-1), space, rows).reshape(policy_action.shape)
            return jnp.where(at_least(steps, buffer.min_size), policy_action, random_action), carry, carry

        @fragment(role="env")
        def of_team(reward, terminated, truncated):
            return reward, terminated, jnp.broadcast_to(truncated[..., None], terminated.shape)

        @fragment(role="buffer")
        def insert(replay, pending, items):
            return buffer.insert(buffer.update(replay, pending.indices, pending.td_error), items)

        @fragment(role="buffer")
        def sample_batches(replay, key, data, progress):
            return draw(buffer, replay, key, data, progress, self.num_updates)

        @fragment(role="learner")
        def gradients(params, target_params, batch):
            e, weight = batch.experience, batch.weight[:, None]
            obs, next_obs, valid = e.obs, e.next_obs, e.obs.valid
            next_key, key = jax.random.split(batch.key)
            next_action = actions(outputs(target_params["actor"], next_obs.obs), next_obs.obs, next_key)
            next_q = values(target_params["critic"], next_obs.state, for_every_critic(next_action), next_obs.valid)
            target = e.reward + e.discount * next_q
            joint_action = for_every_critic(jax.nn.one_hot(e.action, size, dtype=jnp.float32) if discrete else e.action)
            is_own_action = jnp.eye(num_agents, dtype=bool)[:, :, None]

            # Gradients flow through `trained` only; the loss treats `params` as constants.
            def loss(trained):
                q = values(trained["critic"], obs.state, joint_action, valid)
                critic_loss = weight * value_loss(q, target)
                output = outputs(trained["actor"], obs.obs)
                # The critic of an agent sees the new action of this agent and the old actions of the others.
                joint = jnp.where(is_own_action, for_every_critic(actions(output, obs.obs, key)), joint_action)
                actor_loss = -values(params["critic"], obs.state, joint, valid)
                actor_loss += self.output_penalty * jnp.square(output).mean(-1)
                stats = {"critic_loss": critic_loss, "actor_loss": actor_loss, "q": q}
                error = jax.vmap(mean)(jnp.abs(target - q), valid)
                return average(critic_loss + actor_loss, valid), (error, {k: mean(x, valid) for k, x in stats.items()})

            return jax.grad(loss, has_aux=True)(params)

        @fragment(role="server")
        def apply_update(params, opt_state, grads, learning_rate, ready):
            return apply_if(ready, optimizer, params, opt_state, grads, learning_rate)

        @fragment(role="server")
        def update_target(target_params, params, due):
            return move_target(target_params, params, self.tau, due)

        @fragment(role="learner")
        def learn(learner, progress, key, sample, ready):
            def update(learner, batch):
                grads, (td_error, stats) = gradients(learner.params, learner.target_params, batch)
                rate = learning_rate_at(self, progress)
                params, opt_state = apply_update(learner.params, learner.opt_state, grads, rate, ready)
                return Learner(params, update_target(learner.target_params, params, ready), opt_state), td_error, stats

            return learn_from(sample, ready, update, learner, key, progress)

        def begin(params: Any, team_state: OffPolicyState, progress: Progress) -> tuple[Any, OffPolicyState, Any]:
            actor_keys, *inputs = draw_keys(team_state.actor_keys, progress)
            return params, team_state._replace(actor_keys=actor_keys), tuple(inputs)

        def act(acting: Any, now: Now, carry: Any, inputs: Any) -> tuple[jax.Array, Any, Any]:
            keys, steps = inputs
            return explore(acting, now.obs, now.is_first, keys, steps, carry)

        def finish(
            params: Any, team_state: OffPolicyState, experience: Experience, now: Now, carry: Any, progress: Progress
        ) -> tuple[Any, OffPolicyState, Metrics]:
            t = experience
            obs, next_obs = view.join(t.obs, t.state, t.valid), view.join(t.final_obs, t.final_state, ~t.terminated)
            items = Transition(obs, t.action, *of_team(t.reward, t.terminated, t.truncated), next_obs, t.extras)
            replay = insert(team_state.replay, team_state.pending, items)
            replay_key, sample, ready, report = sample_batches(replay, team_state.replay_key, team_state.data, progress)
            learner = team_state.learner._replace(params=params)
            learner, key, pending, metrics = learn(learner, progress, team_state.key, sample, ready)
            new_state = team_state._replace(
                **learner._replace(params=())._asdict(), key=key, replay=replay, replay_key=replay_key, pending=pending
            )
            return learner.params, new_state, {**metrics, **report}

        def init(params_key: jax.Array, actor_key: jax.Array, learner_key: jax.Array) -> tuple[Any, OffPolicyState]:
            learner_key, replay_key = jax.random.split(learner_key)
            # Sequentially, because a batched QR decomposition of orthogonal initializers is slow.
            params = networks(params_key) if shared else jax.lax.map(networks, jax.random.split(params_key, num_agents))
            learner = Learner(params, params, optimizer.init(params))
            state = initial_state(self, buffer, learner, actor_key, learner_key, replay_key)
            return params, state._replace(params=())

        def choose_action(params: Any, team_state: Any, obs: Any, key: Any, carry: Any) -> tuple[jax.Array, Any]:
            joint = view.observe(obs)
            output = outputs(params["actor"], joint.obs)
            if not discrete:
                return jnp.tanh(output), carry
            return choose(Categorical(only_legal(output, joint.obs)), key, 2), carry

        return Team(
            init=init,
            axes=(P(), state_axes(buffer)._replace(params=())),
            begin=begin,
            act=act,
            learn=finish,
            choose_action=choose_action,
            initial_carry=lambda num_envs: (),
            updates_per_iteration=self.num_updates,
            learning_starts=buffer.min_size,
            agent_axes=P("env"),
        )


def straight_through(logits: jax.Array, temperature: float) -> jax.Array:
    """Returns the one-hot vector of the largest logit `[..., N]`, with the gradient of a softmax (arXiv 1611.01144)."""
    soft = jax.nn.softmax(logits / temperature)
    return jax.nn.one_hot(logits.argmax(-1), logits.shape[-1], dtype=jnp.float32) + (soft - jax.lax.stop_gradient(soft))
