"""Deep Q-learning (Mnih et al., 2013, arXiv 1312.5602; 2015, Nature 518), extensions of Rainbow, and Ape-X.

Noisy networks are the one extension of Rainbow that is missing. Later extensions are IQN (Dabney et al., 2018, arXiv
1806.06923) and M-DQN (Vieillard et al., 2020, arXiv 2007.14430). Two objects adapt the loss to options: `prediction` is what
the network predicts of a return (`losses/predictions.py`); `self.target` computes targets (`losses/q_targets.py`). In the shape
descriptions, `B` is `batch_size`, `A` is the number of actions and `N` is the number of outputs per action: one value, or the
atoms or quantiles of a distribution.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from msrl_jax import envs
from msrl_jax.agents.action_spaces import check_discrete
from msrl_jax.agents.agent import Agent, Metrics, Progress, learning_rate_at, split_keys, steps_before
from msrl_jax.agents.optimizers import make_optimizer
from msrl_jax.configs.config import Activation, NetworkKind, OptimizerKind, Tunable, config, field, tunable, variant
from msrl_jax.configs.exploration import Annealed, Exploration, PerEnv
from msrl_jax.configs.replay_options import Hindsight, Prioritized, Replay
from msrl_jax.envs import Environment
from msrl_jax.envs.actions import action_transform
from msrl_jax.envs.masks import only_legal
from msrl_jax.fragments import fragment
from msrl_jax.fragments.counters import advance
from msrl_jax.fragments.progress import parameter_version
from msrl_jax.loops.data_field import check_data
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
from msrl_jax.loops.replay_buffers import n_step_buffer
from msrl_jax.losses.predictions import ActionReturns, Expected
from msrl_jax.losses.q_targets import Double, QTarget
from msrl_jax.networks.q_network import epsilon_greedy, exploration_rate, q_network
from msrl_jax.networks.torso import make_torso
from msrl_jax.replay import NStep, Transition


@config("dqn", actions=("discrete",))
class DQN:
    """Deep Q-learning, with extensions of Rainbow; for discrete actions. Double Q-learning is on by default.

    The defaults are for small tasks on a CPU: many environments, large batches, Adam and a target network that follows
    slowly. The papers have one environment, batches of 32, RMSProp and a target network that is copied.
    """

    num_envs: int = field(default=16, doc="environments stepped in parallel, `E`. Usual: 1 to 256.")
    unroll_length: int = field(default=4, doc="steps of every environment per iteration, `T`. Usual: 1 to 40.")
    discount: Tunable = tunable(default=0.99, low=0, high=1, doc="discount factor per step. Usual: 0.99.")
    num_updates: int = field(default=4, doc="updates per iteration, `K`. Usual: 1/8 to 1 per environment step.")
    batch_size: int = field(default=128, doc="transitions per update, `B`. Usual: 32 to 512.")
    replay: Replay = field(default=Replay(), doc="the buffer. Usual: 1e4 to 1e6 steps.")
    hindsight: Hindsight | None = field(default=None, doc="relabelling of sampled steps (HER). Usual: None.")
    learning_rate: Tunable = tunable(default=0.00025, above=0, doc="step size of updates. Usual: 1e-4 to 1e-3.")
    anneal_learning_rate: bool = field(default=True, doc="whether the learning rate falls linearly to 0. Usual: True.")
    optimizer: OptimizerKind = field(default="adam", doc='a name, or a transformation of optax. Usual: "adam".')
    max_grad_norm: Tunable = tunable(default=10.0, above=0, doc="gradients are clipped to this global norm. Usual: 10 to 40.")
    exploration: Exploration = field(default=Annealed(), doc="rate of random actions. Usual: annealed.")
    actor_period: int = field(default=1, low=1, high=2**24, doc="iterations between two copies to the actors. Usual: 1.")
    tau: Tunable = tunable(default=0.02, above=0, high=1, doc="target update rate; 1 copies. Usual: 1, or 0.005 to 0.05.")
    target_period: int = field(default=1, low=1, high=2**24, doc="updates between target updates. Usual: 1, or 100 to 10,000.")
    dueling: bool = field(default=False, doc="whether to split the head into values and advantages. Usual: True for images.")
    adam_epsilon: Tunable = tunable(default=1e-05, above=0, doc="small number in Adam's denominator. Usual: 1e-8 to 1e-3.")
    data: str | None = field(default=None, doc="path of a data set to mix in, or a `msrl_jax.data.Dataset`. Usual: None.")
    data_fraction: float = field(default=0.5, above=0, high=1, doc="share of `data` in a batch, rounded per shard. Usual: 0.5.")
    hidden_sizes: tuple[int, ...] = field(default=(64, 64), doc="widths of dense layers. Usual: (64, 64); (128,) for images.")
    activation: Activation = field(default="relu", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".')
    network: NetworkKind = field(default="auto", doc='a name, or a module; "auto" convolves images. Usual: "auto".')
    layer_norm: bool = field(default=False, doc="whether hidden dense layers are normalized (LayerNorm). Usual: False.")
    target: QTarget = field(default=Double(), doc="how targets are computed. Usual: double.")
    returns: ActionReturns = field(default=Expected(), doc="what the network predicts of a return. Usual: expected.")

    def check(self) -> None:
        """Raises ValueError if `data` does not fit the other fields."""
        check_data(self)

    def build(self, env: Environment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space, a size or the data do not fit."""
        action_space = check_discrete(type(self).__name__, env.action_space)
        venv = envs.EpisodeStatistics(envs.vectorize(env, self.num_envs))
        buffer = n_step_buffer(env, self)
        prediction = self.returns.of_actions(self.discount)
        make_network, torso = prediction.network or q_network, make_torso(venv.observation_space, self)
        network = make_network(torso, action_space, dueling=self.dueling, num_outputs=prediction.num_outputs)
        optimizer = make_optimizer(self, epsilon=self.adam_epsilon)
        to_env_action = action_transform(action_space)

        def action_values(params: Any, obs: Any) -> jax.Array:
            """Returns the values `[B, A]` by which actions are chosen, -inf for illegal actions."""
            return only_legal(prediction.expected(network.apply(params, obs, *prediction.choice_inputs)), obs)

        @fragment(role="actor")
        def draw_keys(keys, progress):
            return *split_keys(keys, self.unroll_length), steps_before(self, progress)

        @fragment(role="actor")
        def explore(params, obs, keys, steps):
            greedy = action_values(params, obs).argmax(-1).astype(jnp.int32)
            epsilon = exploration_rate(self.exploration, steps, self.num_envs, buffer.min_size)
            return epsilon_greedy(epsilon, greedy, keys, obs, action_space.n)

        @fragment(role="env")
        def env_step(env_state, action):
            return venv.step(env_state, to_env_action(action))

        @fragment(role="env")
        def pop_episodes(env_state):
            return venv.pop_episodes(env_state)

        @fragment(role="buffer")
        def insert(replay, pending, items):
            return buffer.insert(buffer.update(replay, pending.indices, pending.td_error), items)

        @fragment(role="buffer")
        def sample_batches(replay, key, data, progress):
            return draw(buffer, replay, key, data, progress, self.num_updates)

        @fragment(role="learner")
        def gradients(params, target_params, batch: Batch):
            e: NStep = batch.experience
            inputs, next_inputs = prediction.inputs(batch.key, self.batch_size)
            next_outputs = network.apply(target_params, e.next_obs, *next_inputs)
            next_outputs, reward = self.target.next_outputs_and_reward(action_values, params, target_params, e, next_outputs)
            chex.assert_rank((next_outputs, reward), (2, 1), custom_message=f"target={self.target} returns [B, N] and [B]")

            def loss(params):
                outputs = network.apply(params, e.obs, *inputs)
                action_outputs = jnp.take_along_axis(outputs, e.action[:, None, None], 1)[:, 0]
                losses, td_error = jax.vmap(prediction.loss)(action_outputs, next_outputs, reward, e.discount, *inputs)
                stats = {"value": prediction.expected(action_outputs).mean(), "loss": losses.mean()}
                return (batch.weight * losses).mean(), (td_error, stats)

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

            return learn_from(sample, ready, update, learner, key, progress, may_be_invalid=buffer.may_be_invalid)

        @fragment(role="learner")
        def refresh(acting_params, params, progress, version):
            return refreshed(acting_params, params, progress, version, self.actor_period)

        def iteration(state: OffPolicyState, progress: Progress) -> tuple[OffPolicyState, Metrics]:
            acting = state.acting_params
            acting_params = acting[0] if acting else state.params

            def step(loop_state, inputs):
                env_state, obs = loop_state
                action = explore(acting_params, obs, *inputs)
                env_state, t = env_step(env_state, action)
                item = Transition(obs, action, t.reward, t.terminated, t.truncated, t.final_obs, valid=t.valid)
                return (env_state, t.obs), item

            actor_keys, *inputs = draw_keys(state.actor_keys, progress)
            (env_state, obs), items = jax.lax.scan(step, (state.env_state, state.obs), tuple(inputs))
            env_state, episodes = pop_episodes(env_state)
            replay = insert(state.replay, state.pending, items)
            replay_key, sample, ready, report = sample_batches(replay, state.replay_key, state.data, progress)
            learner, key, pending, metrics = learn(state.learner, progress, state.key, sample, ready)
            if acting:
                acting, age = refresh(acting, learner.params, progress, parameter_version(acting[1].low))
                metrics = metrics | age
            new_state = state._replace(
                **learner._asdict(),
                key=key,
                acting_params=acting,
                actor_keys=actor_keys,
                replay=replay,
                replay_key=replay_key,
                pending=pending,
                env_state=env_state,
                obs=obs,
            )
            return new_state, {**metrics, **report, **episodes}

        def init(key: jax.Array) -> OffPolicyState:
            params_key, env_key, *keys = jax.random.split(key, 5)
            env_state, obs = venv.reset(env_key)
            params = network.init(params_key, obs, *prediction.choice_inputs)
            state = initial_state(self, buffer, Learner(params, params, optimizer.init(params)), *keys)
            return state._replace(env_state=env_state, obs=obs)

        def act(state: OffPolicyState, obs: Any, key: jax.Array | None, carry: Any) -> tuple[jax.Array, Any]:
            return to_env_action(action_values(state.params, obs).argmax(-1).astype(jnp.int32)), carry

        return Agent(
            init=init,
            iteration=iteration,
            act=act,
            axes=state_axes(buffer, env_state=venv.axes, obs=P("env"), carry=P()),
            steps_per_iteration=self.num_envs * self.unroll_length,
            updates_per_iteration=self.num_updates,
            learning_starts=buffer.min_size,
            env=venv,
            data={"data": buffer.data} if buffer.data else {},
        )


ApexDQN = variant(
    DQN,
    "ApexDQN",
    "apex_dqn",
    """Ape-X DQN (Horgan et al., 2018, arXiv 1803.00933): DQN with many environments, each with its own epsilon.

    There are two differences from the paper. A new window has the largest priority so far; in the paper, the actor computes an
    initial priority. Actors and learner take turns at a fixed ratio, or run at the same time under a policy with `staleness`.
    """,
    num_envs=64,
    num_updates=8,
    replay=Replay(n_step=3, priorities=Prioritized()),
    dueling=True,
    exploration=PerEnv(),
    actor_period=4,
)
