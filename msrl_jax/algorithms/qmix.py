"""QMIX and VDN: the values of joint actions, computed from the values of each agent's actions.

QMIX: Rashid et al., 2018, arXiv 1803.11485. VDN: Sunehag et al., 2017, arXiv 1706.05296. The team is one agent with joint
observations and joint actions, and learns from replayed sequences as R2D2 does; the loop over environments is in
`loops/teams.py`.

In the shape descriptions, `A` is the number of agents.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from msrl_jax.agents.action_spaces import check_discrete
from msrl_jax.agents.agent import Agent, Metrics, Progress, learning_rate_at, split_keys, steps_before
from msrl_jax.agents.optimizers import make_optimizer
from msrl_jax.configs.checking import check_unused
from msrl_jax.configs.config import (
    Activation,
    NetworkKind,
    OptimizerKind,
    Tunable,
    TunableOrNone,
    config,
    field,
    tunable,
    variant,
)
from msrl_jax.configs.exploration import Annealed, Exploration
from msrl_jax.configs.replay_options import Replay
from msrl_jax.envs import JointObservation, MultiAgentEnvironment, TeamView, VectorizedAgents
from msrl_jax.envs.masks import only_legal
from msrl_jax.fragments import fragment
from msrl_jax.fragments.counters import advance
from msrl_jax.fragments.progress import parameter_version
from msrl_jax.loops.off_policy import (
    Batch,
    Learner,
    OffPolicyState,
    apply_if,
    draw,
    initial_state,
    is_due,
    learn_from,
    move_target,
    refreshed,
    state_axes,
)
from msrl_jax.loops.sequence_replay import replay_values, sequence_buffer, successors
from msrl_jax.loops.teams import Experience, Now, Team, agent_of
from msrl_jax.losses.sequences import sequence_loss, sequence_target
from msrl_jax.networks.agent_values import agent_values
from msrl_jax.networks.core import CoreKind
from msrl_jax.networks.mixers import monotonic_mixer, sum_mixer
from msrl_jax.networks.q_network import epsilon_greedy, exploration_rate
from msrl_jax.networks.unrolls import Carry, reset_carry
from msrl_jax.replay import Transition

ETA = 0.9
"""The share of the largest error in the priority of a window; the rest is the mean (R2D2)."""


@config("qmix", multi_agent=True, actions=("discrete",))
class QMIX:
    """Q-learning of a team whose joint value rises with the value of every agent; rewards are summed, actions discrete.

    Windows may span several episodes; the carry is cleared between them, and time limits bootstrap.
    """

    num_envs: int = field(default=32, doc="environments stepped in parallel, `E`. Usual: 1 to 256.")
    unroll_length: int = field(default=26, doc="steps of every environment per iteration, `T`. Usual: 1 to 40.")
    discount: Tunable = tunable(default=0.9, low=0, high=1, doc="discount factor per step. Usual: 0.9 for 25 steps, or 0.99.")
    num_updates: int = field(default=8, doc="updates per iteration, `K`. Usual: 1/8 to 1 per environment step.")
    batch_size: int = field(default=32, doc="windows per update, `B`. Usual: 32 to 512.")
    replay: Replay = field(default=Replay(100_000, learning_starts=4000), doc="the buffer. Usual: 1e4 to 1e6 steps.")
    learning_rate: Tunable = tunable(default=0.003, above=0, doc="step size of updates. Usual: 1e-4 to 1e-3.")
    anneal_learning_rate: bool = field(default=True, doc="whether the learning rate falls linearly to 0. Usual: True.")
    optimizer: OptimizerKind = field(default="adam", doc='a name, or a transformation of optax. Usual: "adam".')
    max_grad_norm: Tunable = tunable(default=10.0, above=0, doc="gradients are clipped to this global norm. Usual: 10 to 40.")
    exploration: Exploration = field(default=Annealed(100_000), doc="rate of random actions. Usual: annealed.")
    actor_period: int = field(default=1, low=1, high=2**24, doc="iterations between two copies to the actors. Usual: 1.")
    tau: Tunable = tunable(default=0.02, above=0, high=1, doc="target update rate; 1 copies. Usual: 1, or 0.005 to 0.05.")
    target_period: int = field(default=1, low=1, high=2**24, doc="updates between target updates. Usual: 1, or 100 to 10,000.")
    dueling: bool = field(default=False, doc="whether to split the head into values and advantages. Usual: True for images.")
    huber_delta: TunableOrNone = tunable(
        default=None, above=0, doc="errors above it count linearly (Huber). Usual: None, or 1."
    )
    adam_epsilon: Tunable = tunable(default=1e-05, above=0, doc="small number in Adam's denominator. Usual: 1e-8 to 1e-3.")
    hidden_sizes: tuple[int, ...] = field(default=(64,), doc="widths of layers before the core. Usual: (64,); images (128,).")
    activation: Activation = field(default="relu", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".')
    network: NetworkKind = field(default="auto", doc='a name, or a module; "auto" convolves images. Usual: "auto".')
    layer_norm: bool = field(default=False, doc="whether hidden dense layers are normalized (LayerNorm). Usual: False.")
    core: CoreKind | Any | None = field(default="gru", doc='recurrent layer, or None. Usual: "gru".')
    mixer: Literal["monotonic", "sum"] = field(default="monotonic", doc='makes joint values. Usual: "monotonic"; VDN: "sum".')
    mixing_size: int = field(default=32, doc="width of the hidden layer of the monotonic mixer. Usual: 32.")
    hyper_size: int = field(default=64, doc="width of the hidden layers of the mixer's hypernetworks. Usual: 64.")
    burn_in: int = field(default=0, low=0, doc="first steps of a window, which only refresh the stored carry. Usual: 0 to 40.")
    trace_length: int = field(default=25, doc="steps of a window in the loss, `L`; windows overlap by half. Usual: 16 to 80.")
    share_parameters: bool = field(default=True, doc="whether agents share one network. Usual: True for one kind of agents.")
    agent_ids: bool = field(default=True, doc="whether a shared network sees which agent it acts for. Usual: True.")

    def check(self) -> None:
        """Raises ValueError if fields have no effect with the mixer or without a recurrent core."""
        if self.mixer == "sum":
            check_unused(self, ("mixing_size", "hyper_size"), "with mixer='sum'")
        if self.core is None:
            check_unused(self, ("burn_in",), "without a core")

    def build(self, env: MultiAgentEnvironment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space or a size does not fit."""
        return agent_of(self, env)

    def build_team(self, venv: VectorizedAgents, num_agents: int) -> Team:
        """Builds a team of `num_agents` agents of an environment; raises what `build` raises."""
        action_space = check_discrete(type(self).__name__, venv.action_space)
        view = TeamView(venv, num_agents, central=self.mixer == "monotonic")
        network = agent_values(view.observation_space, action_space, num_agents, self)
        mixer = sum_mixer()
        if self.mixer == "monotonic":
            sizes = {"mixing_size": self.mixing_size, "hyper_size": self.hyper_size}
            mixer = monotonic_mixer(num_agents, view.state_size, **sizes)
        carry, action = jax.eval_shape(lambda: network.initial_carry(())), jax.ShapeDtypeStruct((num_agents,), jnp.int32)
        buffer = sequence_buffer(view.observation_type, action, self, carry)
        optimizer = make_optimizer(self, epsilon=self.adam_epsilon)

        def mix(params: Any, values: jax.Array, obs: JointObservation) -> jax.Array:
            """Returns the values of joint actions `[...]` from those of the agents `[..., A]`; absent agents add nothing."""
            return mixer.apply(params["mixer"], jnp.where(obs.valid, values, 0.0), obs.state)

        @fragment(role="actor")
        def draw_keys(keys, progress):
            return *split_keys(keys, self.unroll_length), steps_before(self, progress)

        @fragment(role="actor")
        def explore(params, obs, is_first, keys, steps, carry):
            carry, joint = reset_carry(is_first, carry), view.observe(obs)
            values, next_carry = network.step(params["agents"], joint, carry)
            greedy = only_legal(values, joint.obs).argmax(-1).astype(jnp.int32)
            # Every agent explores independently.
            keys = jax.vmap(lambda key: jax.random.split(key, num_agents))(keys)
            rows, keys, best = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (joint.obs, keys, greedy))
            epsilon = exploration_rate(self.exploration, steps, self.num_envs, buffer.min_size)
            epsilon = jnp.broadcast_to(epsilon[..., None], greedy.shape).reshape(-1)  # of the agent's environment
            action = epsilon_greedy(epsilon, best, keys, rows, action_space.n)
            return action.reshape(greedy.shape), carry, next_carry

        @fragment(role="env")
        def of_team(reward, terminated, truncated):
            return reward.sum(-1), terminated.all(-1), truncated

        @fragment(role="buffer")
        def insert(replay, pending, items):
            return buffer.insert(buffer.update(replay, pending.indices, pending.td_error), items)

        @fragment(role="buffer")
        def sample_batches(replay, key, data, progress):
            return draw(buffer, replay, key, data, progress, self.num_updates)

        @fragment(role="learner")
        def gradients(params, target_params, batch: Batch):
            window: Transition = batch.experience
            trace = jax.tree.map(lambda x: x[self.burn_in :], window)
            target_agents = target_params["agents"]
            next_values = successors(
                network, target_agents, trace, *replay_values(network, target_agents, window, self.burn_in)
            )

            def loss(params):
                values, carries = replay_values(network, params["agents"], window, self.burn_in)
                online_values = successors(network, *jax.lax.stop_gradient((params["agents"], trace, values, carries)))
                best = only_legal(online_values, trace.next_obs.obs).argmax(-1)
                next_value = mix(target_params, _gather_values(next_values, best), trace.next_obs)
                target = sequence_target(next_value, trace, discount=self.discount, num_steps=self.replay.n_step, epsilon=None)
                joint_value = mix(params, _gather_values(values, trace.action), trace.obs)[: self.trace_length]
                return sequence_loss(batch.weight, joint_value, target, self.huber_delta, ETA)

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
                due = is_due(ready, advance(batch.update), self.target_period)
                return Learner(params, update_target(learner.target_params, params, due), opt_state), td_error, stats

            return learn_from(sample, ready, update, learner, key, progress)

        @fragment(role="learner")
        def refresh(acting_params, params, progress, version):
            return refreshed(acting_params, params, progress, version, self.actor_period)

        def begin(params: Any, team_state: OffPolicyState, progress: Progress) -> tuple[Any, OffPolicyState, Any]:
            actor_keys, *inputs = draw_keys(team_state.actor_keys, progress)
            return (
                team_state.acting_params[0] if team_state.acting_params else params,
                team_state._replace(actor_keys=actor_keys),
                tuple(inputs),
            )

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
            acting = team_state.acting_params
            if acting:
                acting, age = refresh(acting, learner.params, progress, parameter_version(acting[1].low))
                metrics = metrics | age
            new_state = team_state._replace(
                **learner._replace(params=())._asdict(),
                key=key,
                acting_params=acting,
                replay=replay,
                replay_key=replay_key,
                pending=pending,
            )
            return learner.params, new_state, {**metrics, **report}

        def init(params_key: jax.Array, actor_key: jax.Array, learner_key: jax.Array) -> tuple[Any, OffPolicyState]:
            learner_key, replay_key = jax.random.split(learner_key)
            network_key, mixer_key = jax.random.split(params_key)
            params = {"agents": network.init(network_key), "mixer": mixer.init(mixer_key)}
            learner = Learner(params, params, optimizer.init(params))
            state = initial_state(self, buffer, learner, actor_key, learner_key, replay_key)
            return params, state._replace(params=())

        def choose_action(params: Any, team_state: Any, obs: Any, key: Any, carry: Carry) -> tuple[jax.Array, Carry]:
            joint = view.observe(obs)
            values, carry = network.step(params["agents"], joint, carry)
            return only_legal(values, joint.obs).argmax(-1).astype(jnp.int32), carry

        return Team(
            init=init,
            axes=(P(), state_axes(buffer)._replace(params=())),
            begin=begin,
            act=act,
            learn=finish,
            choose_action=choose_action,
            initial_carry=lambda num_envs: network.initial_carry((num_envs,)),
            updates_per_iteration=self.num_updates,
            learning_starts=buffer.min_size,
            agent_axes=P("env"),
        )


VDN = variant(QMIX, "VDN", "vdn", "Q-learning of a team whose joint value is the sum of the agents' values.", mixer="sum")


def _gather_values(values: jax.Array, action: jax.Array) -> jax.Array:
    """Gathers the values `[..., A]` of actions `[..., A]` from those of all actions `[..., A, N]`."""
    return jnp.take_along_axis(values, action[..., None], -1)[..., 0]
