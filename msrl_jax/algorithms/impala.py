"""IMPALA (Espeholt et al., 2018, arXiv 1802.01561): an actor-critic that corrects for stale actors with V-trace.

Every iteration makes one update from the unrolls of all environments. With replay, a queue keeps whole batches, and every
iteration makes `K` updates, each from a batch drawn uniformly. V-trace also corrects for the age of these batches; a recurrent
core starts from the carry that was stored with the batch. The staleness of the distribution policy sets the age of the acting
parameters, which is 0 under a synchronous policy. In the shape descriptions, `T` is `unroll_length`, `E` is `num_envs` and `K`
is `num_updates`.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from msrl_jax.agents.agent import Agent, Metrics, Progress, learning_rate_at, learning_rate_metric, logical_axes, split_keys
from msrl_jax.agents.optimizers import make_optimizer
from msrl_jax.agents.vector_env import make_vector_env
from msrl_jax.configs.config import ALL_ACTIONS, Activation, NetworkKind, OptimizerKind, Tunable, config, field, tunable
from msrl_jax.envs import Environment
from msrl_jax.envs.actions import action_transform
from msrl_jax.envs.privileged import actor_obs, are_privileged
from msrl_jax.fragments import fragment
from msrl_jax.fragments.counters import counter
from msrl_jax.fragments.progress import parameter_age, parameter_version
from msrl_jax.kernels.networks import global_norm
from msrl_jax.loops.trajectory import NO_BONUS, AddBonus, Trajectory, next_values
from msrl_jax.losses.policy_gradient import approximate_kl, policy_gradient_loss
from msrl_jax.losses.values import value_loss
from msrl_jax.networks.actor_critic import acting_functions, actor_critic, final_value_inputs, values
from msrl_jax.networks.core import CoreKind
from msrl_jax.networks.unrolls import Carry, reset_carry
from msrl_jax.replay import FifoState, fifo
from msrl_jax.returns.means import mean, standardize
from msrl_jax.returns.off_policy import vtrace


class IMPALAState(NamedTuple):
    """The state of a run."""

    params: Any
    opt_state: optax.OptState
    actor_keys: jax.Array  # keys for sampling actions, one per environment, [E]
    env_state: Any
    obs: jax.Array  # for the next actions, [E, ...]
    replay: FifoState | tuple[()] = ()  # the kept batches; () without replay
    replay_key: jax.Array | tuple[()] = ()  # for draws; () without replay
    carry: Carry = ()  # the recurrent state of the actors, [E, ...] each


class UnrollBatch(NamedTuple):
    """The data of one update."""

    trajectory: Trajectory  # [T, E, ...]
    last_obs: jax.Array  # after the trajectory, [E, ...]
    bootstrap_value: jax.Array  # values of the true successors; used where an episode was truncated, [T, E]
    version: jax.Array | tuple[()]  # with replay, the version of the acting parameters, uint32 []
    carry: Carry = ()  # of the actors, before the trajectory


@config("impala", privileged=True, actions=ALL_ACTIONS)
class IMPALA:
    """An actor-critic for stale actors; for any observations, and actions that are discrete, integers or floats.

    Its metric `parameter_age` is the age of the acting parameters in iterations, averaged over the batches.
    """

    num_envs: int = field(default=32, doc="environments stepped in parallel, `E`. Usual: 8 to 4096.")
    unroll_length: int = field(default=16, doc="steps of every environment per iteration, `T`. Usual: 20 to 100.")
    discount: Tunable = tunable(default=0.99, low=0, high=1, doc="discount factor per step. Usual: 0.99.")
    normalize_observations: bool = field(default=False, doc="standardize by running statistics. Usual: True for locomotion.")
    normalize_rewards: bool = field(default=False, doc="divide by the return's running deviation. Usual: True for locomotion.")
    entropy_coef: Tunable = tunable(default=0.01, low=0, doc="weight of the entropy bonus. Usual: 0.001 to 0.01.")
    value_coef: Tunable = tunable(default=0.5, low=0, doc="weight of the value loss, half the squared error. Usual: 0.5 to 1.")
    learning_rate: Tunable = tunable(default=0.002, above=0, doc="step size of updates. Usual: 1e-4 to 7e-3.")
    anneal_learning_rate: bool = field(default=False, doc="whether the learning rate falls linearly to 0. Usual: True.")
    max_grad_norm: Tunable = tunable(default=0.5, above=0, doc="gradients are clipped to this global norm. Usual: 0.5 to 40.")
    optimizer: OptimizerKind = field(default="rmsprop", doc='a name, or a transformation of optax. Usual: "rmsprop", "adam".')
    rms_decay: Tunable = tunable(default=0.99, low=0, high=1, doc="decay of RMSProp's mean of squares. Usual: 0.99.")
    epsilon: Tunable = tunable(default=1e-05, above=0, doc="added to the denominator. Usual: 1e-5 to 0.1; Adam: 1e-8 to 1e-5.")
    hidden_sizes: tuple[int, ...] = field(default=(64, 64), doc="widths of dense layers. Usual: (64, 64); (128,) for images.")
    activation: Activation = field(default="tanh", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "tanh".')
    network: NetworkKind = field(default="auto", doc='a name, or a module; "auto" convolves images. Usual: "auto".')
    layer_norm: bool = field(default=False, doc="whether hidden dense layers are normalized (LayerNorm). Usual: False.")
    shared_torso: bool = field(default=False, doc="whether policy and value share a torso. Usual: False; images: True.")
    core: CoreKind | Any | None = field(default=None, doc='recurrent layer. Usual: None, or "gru".')
    vtrace_lambda: Tunable = tunable(
        default=0.95, low=0, high=1, doc="decay of traces, in addition to the discount. Usual: 1, or 0.95."
    )
    clip_rho: Tunable = tunable(default=1.0, above=0, doc="largest importance weight of a TD error. Usual: 1.")
    clip_c: Tunable = tunable(default=1.0, above=0, doc="largest importance weight of a trace. Usual: 1.")
    clip_pg_rho: Tunable = tunable(default=1.0, above=0, doc="largest importance weight of a policy gradient. Usual: 1.")
    normalize_advantage: Literal["batch", "none"] = field(default="none", doc='how to standardize advantages. Usual: "none".')
    replay_batches: int = field(default=0, low=0, doc="batches kept for replay, with the newest. Usual: 0, 10 to 1000.")
    num_updates: int = field(default=1, doc="updates per iteration, `K`, each from a kept batch. Usual: 1; with replay 2 to 4.")

    def check(self) -> None:
        """Raises ValueError if `num_updates` is above 1 without replay."""
        if self.num_updates > 1 and not self.replay_batches:
            raise ValueError(
                f"{type(self).__name__}.num_updates={self.num_updates}: without replay an iteration has one batch to learn "
                "from; use num_updates=1, or replay_batches of at least 1"
            )

    def build(self, env: Environment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space or a size does not fit."""
        venv = make_vector_env(env, self)
        network = actor_critic(self, venv.observation_space, venv.action_space)
        optimizer = make_optimizer(self, epsilon=self.epsilon, rms_decay=self.rms_decay)
        to_env_action = action_transform(venv.action_space)

        def begin(key: jax.Array) -> IMPALAState:
            params_key, env_key, actor_key = jax.random.split(key, 3)
            env_state, obs = venv.reset(env_key)
            params = network.init(params_key)
            return IMPALAState(
                params,
                optimizer.init(params),
                jax.random.split(actor_key, self.num_envs),
                env_state,
                obs,
                carry=network.initial_carry((self.num_envs,)),
            )

        axes = logical_axes(
            IMPALAState, params=P(), opt_state=P(), actor_keys=P("env"), env_state=venv.axes, obs=P("env"), carry=P("env")
        )

        @fragment(role="actor")
        def act(params, obs, is_first, carry, keys):
            policy, _, carry = network.act(params, obs, reset_carry(is_first, carry))
            action = policy.sample(keys)
            return action, policy.log_prob(action), carry

        @fragment(role="env")
        def env_step(env_state, action):
            return venv.step(env_state, to_env_action(action))

        @fragment(role="env")
        def pop_episodes(env_state):
            return venv.pop_episodes(env_state)

        # Actors compute what critics need of the last observations, so that the learner does not need the carries after them.
        @fragment(role="actor")
        def bootstrap(params, final_obs, carries, truncated):
            return final_value_inputs(network, params, final_obs, carries, truncated)

        @fragment(role="learner")
        def complete(params, final_obs, value_inputs):
            return values(network, params, final_obs, value_inputs)

        def play(state: IMPALAState, progress: Progress) -> tuple[IMPALAState, UnrollBatch, Metrics]:
            def step(loop_state, keys):
                env_state, obs, is_first, carry = loop_state
                action, log_prob, carry = act(state.params, actor_obs(obs), is_first, carry, keys)
                env_state, t = env_step(env_state, action)
                experience = Trajectory(obs, action, log_prob, t.reward, t.terminated, t.truncated, t.valid)
                return (env_state, t.obs, t.terminated | t.truncated, carry), (experience, t.final_obs, carry)

            actor_keys, keys = split_keys(state.actor_keys, self.unroll_length)
            start = state.env_state, state.obs, jnp.zeros(self.num_envs, bool), state.carry
            (env_state, obs, is_first, carry), (trajectory, final_obs, carries) = jax.lax.scan(step, start, keys)
            version = parameter_version(progress.version) if self.replay_batches else ()
            bootstrap_value = bootstrap(state.params, actor_obs(final_obs), carries, trajectory.truncated)
            if are_privileged(venv.observation_space):
                bootstrap_value = complete(state.params, final_obs, bootstrap_value)
            batch = UnrollBatch(trajectory, obs, bootstrap_value, version, state.carry)
            env_state, episodes = pop_episodes(env_state)
            carry = reset_carry(is_first, carry)
            return state._replace(actor_keys=actor_keys, env_state=env_state, obs=obs, carry=carry), batch, episodes

        queue = None
        if self.replay_batches:
            first = Progress(counter(), None, jnp.uint32(0))
            example = jax.eval_shape(lambda key: play(begin(key), first)[1], jax.random.key(0))
            batch_axes = logical_axes(
                UnrollBatch,
                trajectory=P(None, "env"),
                last_obs=P("env"),
                bootstrap_value=P(None, "env"),
                version=P(),
                carry=P("env"),
            )
            queue = fifo(example, capacity=self.replay_batches, axes=batch_axes)
            axes = axes._replace(replay=queue.axes, replay_key=P())

        def init(key: jax.Array) -> IMPALAState:
            if queue is None:
                return begin(key)
            key, replay_key = jax.random.split(key)
            return begin(key)._replace(replay=queue.init(), replay_key=replay_key)

        @fragment(role="buffer")
        def sample_batches(replay, key, batch):
            assert queue is not None
            # A full queue rejects a batch, so pop the oldest batch first.
            full, (popped, _) = queue.size(replay) == self.replay_batches, queue.pop(replay)
            first, length = jnp.where(full, popped.first, replay.first), jnp.where(full, popped.length, replay.length)
            replay = queue.insert(replay._replace(first=first, length=length), batch)
            key, *keys = jax.random.split(key, self.num_updates + 1)
            return replay, key, jax.vmap(queue.sample, (None, 0))(replay, jnp.stack(keys))

        @fragment(role="learner")
        def gradients(params, batch):
            t = batch.trajectory

            def loss(params):
                policy, value, carries = network.unroll(params, t.obs, t.is_first, batch.carry)
                log_prob = policy.log_prob(t.action)
                fixed_value, log_ratio = jax.lax.stop_gradient((value, log_prob - t.log_prob))
                _, value_input, _ = network.act(params, actor_obs(batch.last_obs), jax.tree.map(lambda x: x[-1], carries))
                last_value = jax.lax.stop_gradient(network.value(params, batch.last_obs, value_input))
                next_value = next_values(fixed_value, last_value, batch.bootstrap_value, t.truncated)
                target, advantage = vtrace(
                    log_ratio,
                    t.reward,
                    fixed_value,
                    next_value,
                    t.terminated,
                    t.truncated,
                    t.valid,
                    discount=self.discount,
                    lambda_=self.vtrace_lambda,
                    clip_rho=self.clip_rho,
                    clip_c=self.clip_c,
                    clip_pg_rho=self.clip_pg_rho,
                )
                if t.bonus is not None:  # weighted only for the step's own action; it is an advantage of the acting policy
                    advantage += jnp.minimum(jnp.exp(log_ratio), self.clip_pg_rho) * t.bonus
                if self.normalize_advantage == "batch":
                    advantage = standardize(advantage, t.valid)
                stats = {
                    "policy_loss": policy_gradient_loss(log_prob, advantage),
                    "value_loss": value_loss(value, target),
                    "entropy": policy.entropy(),
                    "approx_kl": approximate_kl(log_ratio),
                }
                stats = {name: mean(x, t.valid) for name, x in stats.items()}
                total = stats["policy_loss"] + self.value_coef * stats["value_loss"]
                return total - self.entropy_coef * stats["entropy"], stats

            return jax.grad(loss, has_aux=True)(params)

        @fragment(role="server")
        def apply_update(params, opt_state, grads, learning_rate):
            updates, opt_state = optimizer.update(grads, opt_state, params, learning_rate=learning_rate)
            return optax.apply_updates(params, updates), opt_state, global_norm(grads)

        @fragment(role="learner")
        def learn(params, opt_state, progress, batches):
            learning_rate = learning_rate_at(self, progress)

            def update(carry, batch):
                params, opt_state = carry
                grads, stats = gradients(params, batch)
                params, opt_state, grad_norm = apply_update(params, opt_state, grads, learning_rate)
                return (params, opt_state), {**stats, "grad_norm": grad_norm}

            if queue is None:  # one batch, the newest
                (params, opt_state), metrics = update((params, opt_state), batches)
            else:
                (params, opt_state), metrics = jax.lax.scan(update, (params, opt_state), batches)
                metrics["parameter_age"] = jax.vmap(lambda version: parameter_age(progress.iteration, version))(batches.version)
                metrics = jax.tree.map(lambda x: x.mean(0), metrics)
            return params, opt_state, {**metrics, **learning_rate_metric(learning_rate)}

        def iteration(state: IMPALAState, progress: Progress, add_bonus: AddBonus = NO_BONUS) -> tuple[IMPALAState, Metrics]:
            new_state, batches, episodes = play(state, progress)
            batches = batches._replace(trajectory=add_bonus(batches.trajectory, batches.last_obs))
            if queue is not None:  # draw K batches from the queue
                replay, replay_key, batches = sample_batches(state.replay, state.replay_key, batches)
                new_state = new_state._replace(replay=replay, replay_key=replay_key)
            params, opt_state, metrics = learn(state.params, state.opt_state, progress, batches)
            new_state = new_state._replace(params=params, opt_state=opt_state)
            return new_state, {**metrics, **episodes}

        acting = acting_functions(network, venv.action_space)
        return Agent(
            init=init,
            iteration=iteration,
            axes=axes,
            steps_per_iteration=self.num_envs * self.unroll_length,
            updates_per_iteration=self.num_updates,
            env=venv,
            act=acting.act,
            initial_carry=acting.initial_carry,
            probabilities=acting.probabilities,
        )
