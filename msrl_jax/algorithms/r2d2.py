"""R2D2: recurrent deep Q-learning from replayed sequences (Kapturowski et al., 2019).

"Recurrent Experience Replay in Distributed Reinforcement Learning", https://openreview.net/forum?id=r1lyTjAqYX.

In the shape descriptions, `T` is `unroll_length`, `B` is `batch_size`, `A` the number of actions, `H` is `core.size`, `L` is
`trace_length` and `S` the length of a window. A window has three parts. The first `burn_in` steps only refresh the stored
carry. The loss is computed over the next `L` steps. The final `n_step - 1` steps are only used in targets.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from msrl_jax import envs
from msrl_jax.agents.action_spaces import check_discrete
from msrl_jax.agents.agent import Agent, Metrics, Progress, learning_rate_at, split_keys, steps_before
from msrl_jax.agents.optimizers import make_optimizer
from msrl_jax.configs.config import Activation, NetworkKind, OptimizerKind, Tunable, TunableOrNone, config, field, tunable
from msrl_jax.configs.exploration import Annealed, Exploration
from msrl_jax.configs.replay_options import Prioritized, Replay
from msrl_jax.envs import Environment
from msrl_jax.envs.actions import action_transform, action_type
from msrl_jax.envs.base import is_on_host
from msrl_jax.envs.masks import observation_type, only_legal
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
from msrl_jax.losses.sequences import sequence_loss, sequence_target
from msrl_jax.networks.core import CoreKind
from msrl_jax.networks.q_network import epsilon_greedy, exploration_rate, greedy_target, value_heads
from msrl_jax.networks.recurrent import recurrent_network
from msrl_jax.networks.unrolls import Carry, reset_carry
from msrl_jax.replay import Transition


@config("r2d2", actions=("discrete",))
class R2D2:
    """Recurrent deep Q-learning from replayed sequences; for discrete actions.

    The defaults are for small tasks on a CPU. There are other differences from the paper. Windows may span several episodes;
    the carry is cleared between them, and time limits bootstrap. The network does not observe the last action and reward. A
    new window has the largest priority so far; in the paper, the actor computes an initial priority.
    """

    num_envs: int = field(default=16, doc="environments stepped in parallel, `E`. Usual: 1 to 256.")
    unroll_length: int = field(default=16, doc="steps of every environment per iteration, `T`. Usual: 1 to 40.")
    discount: Tunable = tunable(default=0.99, low=0, high=1, doc="discount factor per step. Usual: 0.99.")
    num_updates: int = field(default=4, doc="updates per iteration, `K`. Usual: 1/8 to 1 per environment step.")
    batch_size: int = field(default=32, doc="windows per update, `B`. Usual: 32 to 512.")
    replay: Replay = field(
        default=Replay(50_000, n_step=5, learning_starts=2000, priorities=Prioritized(0.9, None)),
        doc="the buffer. Usual: 1e4 to 1e6 steps.",
    )
    learning_rate: Tunable = tunable(default=0.001, above=0, doc="step size of updates. Usual: 1e-4 to 1e-3.")
    anneal_learning_rate: bool = field(default=True, doc="whether the learning rate falls linearly to 0. Usual: True.")
    optimizer: OptimizerKind = field(default="adam", doc='a name, or a transformation of optax. Usual: "adam".')
    max_grad_norm: Tunable = tunable(default=10.0, above=0, doc="gradients are clipped to this global norm. Usual: 10 to 40.")
    exploration: Exploration = field(default=Annealed(20_000), doc="rate of random actions. Usual: annealed.")
    actor_period: int = field(default=1, low=1, high=2**24, doc="iterations between two copies to the actors. Usual: 1.")
    tau: Tunable = tunable(default=0.02, above=0, high=1, doc="target update rate; 1 copies. Usual: 1, or 0.005 to 0.05.")
    target_period: int = field(default=1, low=1, high=2**24, doc="updates between target updates. Usual: 1, or 100 to 10,000.")
    dueling: bool = field(default=True, doc="whether to split the head into values and advantages. Usual: True for images.")
    huber_delta: TunableOrNone = tunable(
        default=None, above=0, doc="errors above it count linearly (Huber). Usual: None, or 1."
    )
    adam_epsilon: Tunable = tunable(default=1e-05, above=0, doc="small number in Adam's denominator. Usual: 1e-8 to 1e-3.")
    hidden_sizes: tuple[int, ...] = field(default=(64,), doc="widths of layers before the core. Usual: (64,); images (128,).")
    activation: Activation = field(default="relu", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".')
    network: NetworkKind = field(default="auto", doc='a name, or a module; "auto" convolves images. Usual: "auto".')
    layer_norm: bool = field(default=False, doc="whether hidden dense layers are normalized (LayerNorm). Usual: False.")
    core: CoreKind | Any = field(default="gru", doc='recurrent layer; "min_gru" is fastest. Usual: "gru".')
    burn_in: int = field(default=8, low=0, doc="first steps of a window, which only refresh the stored carry. Usual: 0 to 40.")
    trace_length: int = field(default=32, doc="steps of a window in the loss, `L`; windows overlap by half. Usual: 16 to 80.")
    rescale_epsilon: TunableOrNone = tunable(
        default=None,
        above=0,
        doc="the network learns the return as `sign(x) (sqrt(|x| + 1) - 1) + rescale_epsilon x` (arXiv 1805.11593), or None: "
        "itself. Usual: None, or 1e-3.",
    )
    eta: Tunable = tunable(
        default=0.9, low=0, high=1, doc="weight of the largest error (not the mean) in a priority. Usual: 0.9."
    )

    def build(self, env: Environment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space or a size does not fit."""
        action_space = check_discrete(type(self).__name__, env.action_space)
        venv = envs.EpisodeStatistics(envs.vectorize(env, self.num_envs))
        heads = lambda torso: value_heads(torso, action_space, self, dueling=self.dueling)
        network = recurrent_network(venv.observation_space, heads, self)
        steps = observation_type(env), action_type(action_space), self, jax.eval_shape(lambda: network.initial_carry(()))
        buffer = sequence_buffer(*steps, may_be_invalid=is_on_host(env))
        optimizer = make_optimizer(self, epsilon=self.adam_epsilon)
        to_env_action = action_transform(action_space)

        @fragment(role="actor")
        def draw_keys(keys, progress):
            return *split_keys(keys, self.unroll_length), steps_before(self, progress)

        @fragment(role="actor")
        def explore(params, obs, keys, steps, is_first, carry):
            carry = reset_carry(is_first, carry)
            values, next_carry = network.step(params, obs, carry)
            greedy = only_legal(values, obs).argmax(-1).astype(jnp.int32)
            epsilon = exploration_rate(self.exploration, steps, self.num_envs, buffer.min_size)
            return epsilon_greedy(epsilon, greedy, keys, obs, action_space.n), carry, next_carry

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
            window: Transition = batch.experience
            trace = jax.tree.map(lambda x: x[self.burn_in :], window)
            next_target = successors(
                network, target_params, trace, *replay_values(network, target_params, window, self.burn_in)
            )

            def loss(params):
                values, carries = replay_values(network, params, window, self.burn_in)
                online_values = successors(network, *jax.lax.stop_gradient((params, trace, values, carries)))
                next_value = jax.vmap(jax.vmap(greedy_target))(only_legal(online_values, trace.next_obs), next_target)
                target = sequence_target(
                    next_value, trace, discount=self.discount, num_steps=self.replay.n_step, epsilon=self.rescale_epsilon
                )
                action_value = jnp.take_along_axis(values, trace.action[..., None], -1)[: self.trace_length, :, 0]
                return sequence_loss(batch.weight, action_value, target, self.huber_delta, self.eta)

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
                keys, steps = inputs
                env_state, obs, is_first, carry = loop_state
                action, carry, next_carry = explore(acting_params, obs, keys, steps, is_first, carry)
                env_state, t = env_step(env_state, action)
                item = Transition(obs, action, t.reward, t.terminated, t.truncated, t.final_obs, carry, t.valid)
                return (env_state, t.obs, t.terminated | t.truncated, next_carry), item

            actor_keys, *inputs = draw_keys(state.actor_keys, progress)
            start = state.env_state, state.obs, jnp.zeros(self.num_envs, bool), state.carry
            (env_state, obs, is_first, carry), items = jax.lax.scan(step, start, tuple(inputs))
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
                carry=reset_carry(is_first, carry),
                env_state=env_state,
                obs=obs,
            )
            return new_state, {**metrics, **report, **episodes}

        def init(key: jax.Array) -> OffPolicyState:
            params_key, env_key, *keys = jax.random.split(key, 5)
            env_state, obs = venv.reset(env_key)
            params = network.init(params_key)
            state = initial_state(self, buffer, Learner(params, params, optimizer.init(params)), *keys)
            return state._replace(carry=network.initial_carry((self.num_envs,)), env_state=env_state, obs=obs)

        def act(state: OffPolicyState, obs: Any, key: jax.Array | None, carry: Carry) -> tuple[jax.Array, Carry]:
            values, carry = network.step(state.params, obs, carry)
            return to_env_action(only_legal(values, obs).argmax(-1).astype(jnp.int32)), carry

        return Agent(
            init=init,
            iteration=iteration,
            act=act,
            axes=state_axes(buffer, carry=P("env"), env_state=venv.axes, obs=P("env")),
            steps_per_iteration=self.num_envs * self.unroll_length,
            updates_per_iteration=self.num_updates,
            learning_starts=buffer.min_size,
            env=venv,
            initial_carry=lambda num_envs: network.initial_carry((num_envs,)),
        )
