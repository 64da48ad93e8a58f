"""Soft actor-critic (Haarnoja et al., 2018, arXiv 1801.01290, 1812.05905).

One update computes all gradients at the same parameters, so that devices exchange gradients once. The papers update the critics
first.

Four objects adapt the losses to actions and options: `heads` makes the policy and critics of continuous or discrete actions
(`networks/continuous_policies.py`, `networks/discrete_policies.py`); `windows` are single steps, or sequences for a core
(`loops/windows.py`, `loops/core_windows.py`); `prediction` is what critics predict of a return (`losses/predictions.py`); and
`self.target` says which critics value next steps (`losses/critic_targets.py`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from msrl_jax import envs
from msrl_jax.agents.action_spaces import check_discrete_or_bounded
from msrl_jax.agents.agent import Agent, Metrics, Progress, learning_rate_at, split_keys, steps_before
from msrl_jax.agents.optimizers import for_each_network, make_optimizer
from msrl_jax.configs.checking import check_unused
from msrl_jax.configs.config import Activation, NetworkKind, OptimizerKind, Tunable, TunableOrNone, config, field, tunable
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
    learn_from,
    move_target,
    state_axes,
)
from msrl_jax.loops.windows import check_core, windows_of
from msrl_jax.losses.critic_targets import CriticTargets, TargetNetworks
from msrl_jax.losses.entropy import soft_value, temperature_loss
from msrl_jax.losses.predictions import CriticReturns, Expected
from msrl_jax.networks.continuous_policies import heads_of
from msrl_jax.networks.core import CoreKind
from msrl_jax.networks.distributions import choose
from msrl_jax.networks.unrolls import reset_carry
from msrl_jax.replay import Transition


@config("sac", privileged=True, actions=("discrete", "bounded"))
class SAC:
    """Soft actor-critic; for actions that are discrete or bounded floats.

    Discount, batch size, `tau` and networks are the papers'. Other defaults are for small tasks: 16 environments, a buffer of
    200,000 steps, 1/2 update per step and a larger learning rate.
    """

    num_envs: int = field(default=16, doc="environments stepped in parallel, `E`. Usual: 1 to 256.")
    unroll_length: int = field(default=2, doc="steps of every environment per iteration, `T`. Usual: 1 to 40.")
    discount: Tunable = tunable(default=0.99, low=0, high=1, doc="discount factor per step. Usual: 0.99.")
    num_updates: int = field(default=16, doc="updates per iteration, `K`. Usual: 1/8 to 1 per environment step.")
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
    target: CriticTargets = field(default=TargetNetworks(), doc="which critics value next steps. Usual: target_networks.")
    initial_temperature: float = tunable(default=1.0, above=0, once=True, doc="initial weight of the entropy. Usual: 0.1 to 1.")
    learn_temperature: bool = field(default=True, doc="whether the temperature is learned. Usual: True.")
    target_entropy: TunableOrNone = tunable(
        default=None,
        doc="target entropy in nats. None takes minus the length of a continuous action, or half the logarithm of the number "
        "of legal discrete actions (the paper takes 98 %, which is almost random). Usual: None.",
    )

    def check(self) -> None:
        """Raises ValueError if `data`, the recurrent core or the target entropy do not fit the other fields."""
        check_data(self)
        check_core(self)
        if not self.learn_temperature:
            check_unused(self, ("target_entropy",), "with learn_temperature=False")

    def build(self, env: Environment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space, a size or the data do not fit."""
        action_space = check_discrete_or_bounded(type(self).__name__, env.action_space)
        venv = envs.EpisodeStatistics(envs.vectorize(env, self.num_envs))
        obs_space = normalized_space(venv.observation_space) if self.normalize_observations else venv.observation_space
        heads, windows, prediction = heads_of(action_space), windows_of(self), self.returns.of_critics(self.discount)
        policy = windows.network("actor", obs_space, lambda inputs: heads.policy(inputs, action_space, self))
        critics = windows.network(
            "critic",
            obs_space,
            lambda inputs: heads.critics(
                inputs, action_space, self.num_critics, self, prediction.num_outputs, self.target.torso
            ),
        )
        buffer = windows.buffer(env)
        optimizer = for_each_network(make_optimizer(self, epsilon=1e-8))
        to_env_action = action_transform(action_space)

        @fragment(role="actor")
        def draw_keys(keys, progress):
            return *split_keys(keys, self.unroll_length), steps_before(self, progress)

        @fragment(role="actor")
        def explore(params, observations, obs, keys, steps, is_first, carry):
            carry = reset_carry(is_first, carry)
            inputs, next_carry = windows.step(params, normalize_obs(observations, obs), carry)
            policy_action = policy.apply(params["actor"], inputs).sample(keys)
            action = jnp.where(at_least(steps, buffer.min_size), policy_action, uniform_actions(keys, action_space, inputs))
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
        def gradients(params, target_critic, batch):
            batch, temperature = windows.steps(batch), jnp.exp(params["log_temperature"])
            e = batch.experience
            next_keys, keys = jax.random.split(batch.key, (2, len(e.reward)))
            next_actor = policy.apply(params["actor"], e.next_obs)
            next_action, next_log_prob = next_actor.sample_and_log_prob(next_keys)

            def backup(next_q):  # with the entropy of the next action
                return e.reward + e.discount * next_actor.expectation(soft_value(next_q, next_log_prob, temperature))

            # Gradients flow through `trained` only; the loss treats `params` as constants.
            def loss(trained):
                # The critics predict the soft values of the next steps.
                step, next_step = (e.obs, e.action), (e.next_obs, next_action)
                q, next_q, statistics = self.target.values(critics, trained["critic"], target_critic, step, next_step)
                target = prediction.target(next_q, backup)
                critic_loss = (batch.weight * prediction.loss(q, target).sum(0)).mean()

                # The actor maximizes the soft values of its actions.
                actor, critic = policy.apply(trained["actor"], e.obs), self.target.for_actor(params["critic"], target_critic)
                action, log_prob = actor.sample_and_log_prob(keys)
                value = prediction.value(critics.apply(critic, e.obs, action))
                actor_loss = -actor.expectation(soft_value(value, log_prob, temperature)).mean()

                # The temperature moves the entropy towards its target.
                mean_log_prob, total = actor.expectation(log_prob), critic_loss + actor_loss
                if self.learn_temperature:
                    entropy = actor.usual_target_entropy() if self.target_entropy is None else self.target_entropy
                    total += temperature_loss(trained["log_temperature"], mean_log_prob, entropy).mean()
                stats = {
                    "critic_loss": critic_loss,
                    "actor_loss": actor_loss,
                    "q": prediction.expected(q).mean(),
                    "entropy": -mean_log_prob.mean(),
                    "temperature": temperature,
                }
                return total, (windows.errors(prediction.error(q, target)), stats, statistics)

            return jax.grad(loss, has_aux=True)(params)

        @fragment(role="learner")
        def observe(observations, batch):
            return update_statistics(observations, batch)

        @fragment(role="server")
        def apply_update(params, opt_state, grads, learning_rate, ready):
            return apply_if(ready, optimizer, params, opt_state, grads, learning_rate)

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
                grads, (td_error, stats, statistics) = gradients(learner.params, learner.target_params, batch)
                learning_rate = learning_rate_at(self, progress)
                params, opt_state = apply_update(learner.params, learner.opt_state, grads, learning_rate, ready)
                online_params = self.target.followed(params["critic"], statistics)
                target_params = update_target(learner.target_params, online_params, ready)
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
            critic = critics.init(critic_key, inputs)
            params = {
                "actor": policy.init(actor_key, inputs),
                "critic": critic,
                "log_temperature": jnp.log(jnp.float32(self.initial_temperature)),
            }
            learner = Learner(params, self.target.initial(critic), optimizer.init(params), observations)
            state = initial_state(self, buffer, learner, *keys)
            return state._replace(carry=windows.initial_carry(self.num_envs), env_state=env_state, obs=obs)

        def act(state: OffPolicyState, obs: Any, key: jax.Array | None, carry: Any) -> tuple[jax.Array, Any]:
            # Outside of training, nothing uses the carry of the critics' core.
            inputs, carry = windows.step({"actor": state.params["actor"]}, normalize_obs(state.observations, obs), carry)
            return to_env_action(choose(policy.apply(state.params["actor"], inputs), key)), carry

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
