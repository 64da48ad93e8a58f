"""Twin delayed deep deterministic policy gradients (Fujimoto et al., 2018, arXiv 1802.09477), and DDPG.

In the shape descriptions, `B` is `batch_size` and `C` the number of critics. One update computes all gradients at the same
parameters, so that devices exchange gradients once. The paper updates the critics first.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from msrl_jax import envs
from msrl_jax.agents.action_spaces import check_bounded
from msrl_jax.agents.agent import Agent, Metrics, Progress, learning_rate_at, split_keys, steps_before
from msrl_jax.agents.optimizers import make_optimizer
from msrl_jax.configs.checking import is_constant
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
from msrl_jax.configs.replay_options import Hindsight, Replay
from msrl_jax.envs import Environment
from msrl_jax.envs.actions import action_transform, uniform_actions
from msrl_jax.envs.privileged import actor_obs
from msrl_jax.envs.vector_wrappers import normalized_space
from msrl_jax.fragments import fragment
from msrl_jax.fragments.counters import at_least
from msrl_jax.loops.data_field import check_data
from msrl_jax.loops.normalized import initial_statistics, normalize_obs, update_statistics
from msrl_jax.loops.off_policy import (
    Learner,
    OffPolicyState,
    apply_if,
    draw,
    initial_state,
    is_due,
    learn_from,
    move_target,
    state_axes,
)
from msrl_jax.loops.windows import check_core, windows_of
from msrl_jax.losses.predictions import CriticReturns, Expected
from msrl_jax.networks.core import CoreKind
from msrl_jax.networks.heads import make_actor, make_critics
from msrl_jax.networks.unrolls import reset_carry
from msrl_jax.replay import Transition


@config("td3", privileged=True, actions=("bounded",))
class TD3:
    """Twin delayed deep deterministic policy gradients; for actions that are bounded floats.

    Discount, batch size, `tau`, noises and networks are those of the authors' code. Other defaults are for small tasks: 16
    environments, a buffer of 200,000 steps, 1/4 update per step and a larger learning rate.
    """

    num_envs: int = field(default=16, doc="environments stepped in parallel, `E`. Usual: 1 to 256.")
    unroll_length: int = field(default=2, doc="steps of every environment per iteration, `T`. Usual: 1 to 40.")
    discount: Tunable = tunable(default=0.99, low=0, high=1, doc="discount factor per step. Usual: 0.99.")
    num_updates: int = field(default=8, doc="updates per iteration, `K`. Usual: 1/8 to 1 per environment step.")
    batch_size: int = field(default=256, doc="transitions, or windows, per update, `B`. Usual: 32 to 512.")
    data: str | None = field(default=None, doc="path of a data set to mix in, or a `msrl_jax.data.Dataset`. Usual: None.")
    data_fraction: float = field(default=0.5, above=0, high=1, doc="share of `data` in a batch, rounded per shard. Usual: 0.5.")
    replay: Replay = field(default=Replay(200_000), doc="the buffer. Usual: 1e4 to 1e6 steps.")
    hindsight: Hindsight | None = field(default=None, doc="relabelling of sampled steps (HER). Usual: None.")
    learning_rate: Tunable = tunable(default=0.001, above=0, doc="step size of updates. Usual: 1e-4 to 1e-3.")
    anneal_learning_rate: bool = field(default=False, doc="whether the learning rate falls linearly to 0. Usual: False.")
    optimizer: OptimizerKind = field(default="adam", doc='a name, or a transformation of optax. Usual: "adam".')
    max_grad_norm: TunableOrNone = tunable(default=None, above=0, doc="largest norm of each network's gradients. Usual: None.")
    tau: Tunable = tunable(default=0.005, above=0, high=1, doc="target update rate (Polyak). Usual: 0.001 to 0.05.")
    hidden_sizes: tuple[int, ...] = field(default=(256, 256), doc="widths of dense layers. Usual: (256, 256).")
    activation: Activation = field(default="relu", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".')
    network: NetworkKind = field(default="auto", doc='a name, or a module; "auto" convolves images. Usual: "auto".')
    layer_norm: bool = field(default=False, doc="whether hidden dense layers are normalized (LayerNorm). Usual: False.")
    core: CoreKind | Any | None = field(default=None, doc='recurrent layer, for sequences. Usual: None, "gru".')
    burn_in: int = field(default=8, low=0, doc="first steps of a window, which only refresh the stored carry. Usual: 0 to 40.")
    trace_length: int = field(default=32, doc="steps of a window in the loss; windows overlap by half. Usual: 16 to 80.")
    normalize_observations: bool = field(default=False, doc="standardize by running statistics. Usual: True for locomotion.")
    num_critics: int = field(default=2, doc='number of critics, `C`. Usual: 2, or 5 with "tqc".')
    returns: CriticReturns = field(default=Expected(), doc="what critics predict of a return. Usual: expected.")
    policy_period: int = field(default=2, low=1, high=2**24, doc="critic updates per update of actor and targets. Usual: 2.")
    exploration_noise: Tunable = tunable(default=0.1, low=0, doc="deviation of the noise on actions in [-1, 1]. Usual: 0.1.")
    max_exploration_noise: TunableOrNone = tunable(
        default=None,
        low=0,
        doc="deviation in the last environment, if it rises evenly over all; None: the same in all. Usual: None, or 0.4.",
    )
    policy_noise: Tunable = tunable(default=0.2, low=0, doc="deviation of the target actor's noise. Usual: 0.2, or 0.")
    noise_clip: Tunable = tunable(default=0.5, low=0, doc="bound of the noise of the target actor. Usual: 0.5.")

    def check(self) -> None:
        """Raises ValueError if `data` or the core do not fit, or `max_exploration_noise` is too small."""
        check_data(self)
        check_core(self)
        low, high = self.exploration_noise, self.max_exploration_noise
        if high is not None and high < low:
            raise ValueError(
                f"{type(self).__name__}.max_exploration_noise={high:g} is below exploration_noise={low:g}; use a larger one"
            )

    def build(self, env: Environment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space, a size or the data do not fit."""
        action_space = check_bounded(type(self).__name__, env.action_space)
        size = math.prod(action_space.shape)
        venv = envs.EpisodeStatistics(envs.vectorize(env, self.num_envs))
        obs_space = normalized_space(venv.observation_space) if self.normalize_observations else venv.observation_space
        windows, prediction = windows_of(self), self.returns.of_critics(self.discount)
        actor = windows.network("actor", obs_space, lambda inputs: make_actor(inputs, size, self))
        critics = windows.network(
            "critic",
            obs_space,
            lambda inputs: make_critics(inputs, action_space, self.num_critics, self, prediction.num_outputs),
        )
        buffer = windows.buffer(env)
        optimizer = make_optimizer(self, epsilon=1e-8)
        to_env_action = action_transform(action_space)

        def policy(actor_params, obs):
            return jnp.tanh(actor.apply(actor_params, obs))

        deviation = self.exploration_noise
        if self.max_exploration_noise is not None:
            deviation = jnp.linspace(deviation, self.max_exploration_noise, self.num_envs, dtype=jnp.float32)[:, None]

        def noise(keys):
            return jax.vmap(lambda key: jax.random.normal(key, (size,), jnp.float32))(keys)

        @fragment(role="actor")
        def draw_keys(keys, progress):
            return *split_keys(keys, self.unroll_length), steps_before(self, progress)

        @fragment(role="actor")
        def explore(params, observations, obs, keys, steps, is_first, carry):
            carry = reset_carry(is_first, carry)
            inputs, next_carry = windows.step(params, normalize_obs(observations, obs), carry)
            noisy_action = jnp.clip(policy(params["actor"], inputs) + deviation * noise(keys), -1.0, 1.0)
            action = jnp.where(at_least(steps, buffer.min_size), noisy_action, uniform_actions(keys, action_space))
            return action, carry, next_carry

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
        def gradients(params, target_params, batch, actor_moves):
            batch = windows.steps(batch)
            e = batch.experience
            next_action = policy(target_params["actor"], e.next_obs)
            if not is_constant(self.policy_noise, 0):
                smoothing = self.policy_noise * noise(jax.random.split(batch.key, len(e.reward)))
                # Similar actions have similar values (eq. 14).
                next_action = jnp.clip(next_action + jnp.clip(smoothing, -self.noise_clip, self.noise_clip), -1.0, 1.0)
            next_q = critics.apply(target_params["critic"], e.next_obs, next_action)
            target = prediction.target(next_q, lambda q: e.reward + e.discount * q)

            def critic_loss(critic):
                q = critics.apply(critic, e.obs, e.action)
                losses = batch.weight * prediction.loss(q, target).sum(0)
                return losses.mean(), (prediction.error(q, target), prediction.expected(q).mean())

            def actor_loss(actor):
                first_critic = windows.first_critic(params["critic"])
                return -prediction.expected(critics.apply(first_critic, e.obs, policy(actor, e.obs))).mean()

            def no_actor_loss(actor):
                return jnp.float32(0), jax.tree.map(jnp.zeros_like, actor)

            (critic, (td_error, q)), critic_grads = jax.value_and_grad(critic_loss, has_aux=True)(params["critic"])
            loss, actor_grads = jax.lax.cond(actor_moves, jax.value_and_grad(actor_loss), no_actor_loss, params["actor"])
            # Metrics are averaged over updates; those without an actor's loss count as 0.
            stats = {"critic_loss": critic, "actor_loss": loss * self.policy_period, "q": q}
            return {"actor": actor_grads, "critic": critic_grads}, (windows.errors(td_error), stats)

        @fragment(role="learner")
        def observe(observations, batch):
            return update_statistics(observations, batch)

        @fragment(role="server")
        def apply_update(params, opt_state, grads, learning_rate, due):
            return apply_if(due, optimizer, params, opt_state, grads, learning_rate)

        @fragment(role="server")
        def update_target(target_params, params, due):
            return move_target(target_params, params, self.tau, due)

        @fragment(role="learner")
        def learn(learner, progress, key, sample, ready):
            def update(learner, batch):
                observations = learner.observations
                if self.normalize_observations:
                    observations, experience = observe(observations, batch)
                    batch = batch._replace(experience=experience)
                actor_moves = is_due(ready, batch.update, self.policy_period)
                grads, (td_error, stats) = gradients(learner.params, learner.target_params, batch, actor_moves)
                params, opt_state, rate = {}, {}, learning_rate_at(self, progress)
                for part, due in (("actor", actor_moves), ("critic", ready)):
                    part_state = learner.params[part], learner.opt_state[part]
                    params[part], opt_state[part] = apply_update(*part_state, grads[part], rate, due)
                target_params = update_target(learner.target_params, params, actor_moves)
                return Learner(params, target_params, opt_state, observations), td_error, stats

            return learn_from(sample, ready, update, learner, key, progress, may_be_invalid=buffer.may_be_invalid)

        def iteration(state: OffPolicyState, progress: Progress) -> tuple[OffPolicyState, Metrics]:
            def step(loop_state, inputs):
                keys, steps = inputs
                env_state, obs, is_first, carry = loop_state
                action, carry, next_carry = explore(
                    state.params, state.observations, actor_obs(obs), keys, steps, is_first, carry
                )
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
            new_state = state._replace(
                **learner._asdict(),
                key=key,
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
            observations = initial_statistics(obs, normalize=self.normalize_observations)
            actor_key, critic_key = jax.random.split(params_key)
            inputs = normalize_obs(observations, obs)
            params = {"actor": actor.init(actor_key, inputs), "critic": critics.init(critic_key, inputs)}
            learner = Learner(params, params, {name: optimizer.init(p) for name, p in params.items()}, observations)
            state = initial_state(self, buffer, learner, *keys)
            return state._replace(carry=windows.initial_carry(self.num_envs), env_state=env_state, obs=obs)

        def act(state: OffPolicyState, obs: Any, key: jax.Array | None, carry: Any) -> tuple[jax.Array, Any]:
            # Outside of training, nothing uses the carry of the critics' core.
            inputs, carry = windows.step({"actor": state.params["actor"]}, normalize_obs(state.observations, obs), carry)
            return to_env_action(policy(state.params["actor"], inputs)), carry

        return Agent(
            init=init,
            iteration=iteration,
            act=act,
            axes=state_axes(buffer, carry=P("env"), env_state=venv.axes, obs=P("env")),
            steps_per_iteration=self.num_envs * self.unroll_length,
            updates_per_iteration=self.num_updates,
            learning_starts=buffer.min_size,
            env=venv,
            initial_carry=windows.initial_carry,
            data={"data": buffer.data} if buffer.data else {},
        )


DDPG = variant(
    TD3,
    "DDPG",
    "ddpg",
    """Deep deterministic policy gradients (Lillicrap et al., 2016, arXiv 1509.02971): TD3 without its three additions.

    It has one critic, no noise on the target actor, and an actor that moves as often. The exploration noise is independent at
    every step, as in TD3; the paper's noise is correlated in time.
    """,
    num_critics=1,
    policy_period=1,
    policy_noise=0.0,
)
