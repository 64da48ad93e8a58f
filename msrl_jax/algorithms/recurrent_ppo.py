"""PPO with a recurrent network, for tasks where one observation is not enough (arXiv 1707.06347).

In the shape descriptions, `T` is `unroll_length`, `E` is `num_envs`, `M` is `num_minibatches` and `H` is `memory_size`.
Sequences are whole unrolls; gradients flow back to the first step of an unroll. A minibatch holds one environment from every
group of `M` adjacent ones. So a shuffle stays within groups, and moves nothing between devices that hold whole groups.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from msrl_jax.algorithms.agent import Agent, Metrics, Progress, in_force, logical_axes, split_keys, step_size, training_env
from msrl_jax.algorithms.config import (
    Activation,
    CoreKind,
    NetworkKind,
    Normalization,
    OptimizerKind,
    Tunable,
    TunableOrNone,
    config,
    field,
    tunable,
)
from msrl_jax.algorithms.kernels import global_norm, truncated_values
from msrl_jax.algorithms.loops.divergence import apply_gradients, diverged, no_divergence
from msrl_jax.algorithms.loops.trajectory import Trajectory, check_minibatches, estimate
from msrl_jax.algorithms.losses.policy_gradient import ppo_loss
from msrl_jax.algorithms.networks.layers import Carry, forget
from msrl_jax.algorithms.networks.recurrent import pick, shuffle_members
from msrl_jax.algorithms.networks.recurrent_actor_critic import outside_recurrent_training, recurrent_actor_critic
from msrl_jax.algorithms.optimizers import make_optimizer
from msrl_jax.algorithms.returns.advantages import standardize
from msrl_jax.algorithms.returns.value_size import ValueSize, value_size
from msrl_jax.algorithms.rnd import random_network_distillation
from msrl_jax.envs import Environment
from msrl_jax.envs.actions import action_transform
from msrl_jax.envs.masks import unmasked
from msrl_jax.envs.privileged import actor_part, with_privileged_of
from msrl_jax.fragments import fragment


class RecurrentPPOState(NamedTuple):
    """The state of a run."""

    params: Any  # of the `RecurrentNetwork`
    opt_state: optax.OptState
    key: jax.Array  # the learner's, which shuffles, []
    actor_keys: jax.Array  # one per environment, which samples actions, [E]
    env_state: Any
    obs: jax.Array  # for the next actions, [E, ...]
    is_first: jax.Array  # whether these observations are the first of an episode, bool [E]
    carry: Carry  # the recurrent state of the actors, [E, H] each
    value_size: ValueSize | tuple[()] = ()  # how large the critic's targets are, if values are scaled
    novelty: Any = ()  # of `random_network_distillation`


@config("recurrent_ppo", privileged=True)
class RecurrentPPO:
    """PPO with a memory; for any observations, and actions that are discrete, integers or floats."""

    num_envs: int = field(default=32, doc="environments, `E`, a multiple of `num_minibatches` per device. Usual: 16 to 4096.")
    unroll_length: int = field(default=64, doc="steps per iteration, `T`; gradients flow back through all. Usual: 16 to 256.")
    num_epochs: int = field(default=4, doc="passes over the batch per iteration. Usual: 3 to 10.")
    num_minibatches: int = field(default=4, doc="updates per pass. Usual: 1 to 8.")
    learning_rate: Tunable = tunable(default=0.001, adaptive=True, doc="step size of updates. Usual: 1e-4 to 1e-3.", above=0)
    anneal_learning_rate: bool = field(default=False, doc="whether the learning rate falls linearly to 0. Usual: True.")
    optimizer: OptimizerKind = field(default="adam", doc='a name, or a transformation of optax. Usual: "adam".')
    max_grad_norm: Tunable = tunable(default=0.5, above=0, doc="gradients are clipped to this global norm. Usual: 0.5.")
    discount: Tunable = tunable(default=0.99, doc="discount factor per step. Usual: 0.99.", low=0, high=1)
    gae_lambda: Tunable = tunable(default=0.95, low=0, high=1, doc="lambda of advantages: 0 bias, 1 variance. Usual: 0.95.")
    normalize_advantage: Normalization = field(default="minibatch", doc='how to standardize advantages. Usual: "minibatch".')
    clip_ratio: Tunable = tunable(default=0.2, doc="clip of the probability ratio around 1. Usual: 0.1 to 0.3.", above=0)
    clip_value: TunableOrNone = tunable(default=None, above=0, doc="clip of the critic's change, in its units. Usual: None.")
    target_kl: TunableOrNone = tunable(
        default=None, above=0, doc="KL (nats) that ends an iteration. Usual: None, 0.01 to 0.03."
    )
    entropy_coef: Tunable = tunable(default=0.01, doc="weight of the entropy bonus. Usual: 0 to 0.01.", low=0)
    value_coef: Tunable = tunable(default=0.5, low=0, doc="weight of the value loss, half the squared error. Usual: 0.5 to 1.")
    hidden_sizes: tuple[int, ...] = field(default=(64,), doc="widths of layers before the core. Usual: (64,); images (128,).")
    activation: Activation = field(default="tanh", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "tanh".')
    network: NetworkKind = field(default="auto", doc='a name, or a module; "auto" convolves images. Usual: "auto".')
    layer_norm: bool = field(default=False, doc="whether hidden dense layers are normalized (LayerNorm). Usual: False.")
    core: CoreKind = field(default="gru", doc='recurrent layer; "min_gru" is fastest. Usual: "gru".')
    memory_size: int = field(default=64, doc="size of the recurrent state, `H`. Usual: 64 to 512.")
    normalize_observations: bool = field(default=False, doc="standardize by running statistics. Usual: True for locomotion.")
    normalize_rewards: bool = field(default=False, doc="divide by the return's running deviation. Usual: True for locomotion.")
    scale_values: bool = field(default=True, doc="whether the critic learns values over their size. Usual: True.")
    intrinsic_coef: TunableOrNone = tunable(default=None, above=0, doc="weight of novelty's advantage (RND). Usual: None, 0.5.")

    def check(self) -> None:
        """Raises ValueError unless `num_minibatches` divides `num_envs`."""
        check_minibatches(self, recurrent=True)

    def build(self, env: Environment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space or a size does not fit."""
        venv = training_env(env, self)
        network = recurrent_actor_critic(self, venv)
        optimizer = make_optimizer(self, epsilon=1e-5)
        to_env_action = action_transform(venv.action_space)
        begin_novelty, explore = random_network_distillation(self, venv, optimizer)

        def init(key: jax.Array) -> RecurrentPPOState:
            params_key, env_key, actor_key, learner_key = jax.random.split(key, 4)
            env_state, obs = venv.reset(env_key)
            params = network.init(params_key)
            return RecurrentPPOState(
                params, optimizer.init(params), learner_key, jax.random.split(actor_key, self.num_envs), env_state, obs,
                is_first=jnp.ones(self.num_envs, bool), carry=network.initial_carry((self.num_envs,)),
                value_size=value_size() if self.scale_values else (), novelty=begin_novelty(key),
            )  # fmt: skip

        axes = logical_axes(
            RecurrentPPOState, params=P(), opt_state=P(), key=P(), actor_keys=P("env"), env_state=venv.axes, obs=P("env"),
            is_first=P("env"), carry=P("env"), value_size=P(), novelty=P(),
        )  # fmt: skip

        @fragment(role="actor")
        def act(params, obs, is_first, carry, keys):
            (policy, value), carry = network.step(params, obs, forget(is_first, carry))
            action = policy.sample(keys)
            return action, policy.log_prob(action), value, carry

        @fragment(role="env")
        def env_step(env_state, action):
            return venv.step(env_state, to_env_action(action))

        @fragment(role="env")
        def pop_episodes(env_state):
            return venv.pop_episodes(env_state)

        # The actors compute the values of the last observations, so that numbers cross to the learner and carries do not.
        @fragment(role="actor")
        def bootstrap(params, final_obs, carries, truncated):
            value = lambda params, final: network.step(params, *final)[0][1]  # noqa: E731
            return truncated_values(value, params, (final_obs, carries), truncated, and_last=True)

        @fragment(role="learner")
        def estimate_advantages(t, value, bootstrap_value, size):
            return estimate(self, t, value, bootstrap_value[-1], bootstrap_value, size)

        @fragment(role="learner")
        def gradients(params, batch, carry, chosen):
            minibatch, is_first, old_value, advantage, target = jax.tree.map(lambda x: pick(x, chosen), batch)
            carry = tuple(pick(array[None], chosen)[0] for array in carry)
            if self.normalize_advantage == "minibatch":
                advantage = standardize(advantage, minibatch.present)

            def loss(params):
                (policy, value), _ = network.unroll(params, minibatch.obs, is_first, carry)
                return ppo_loss(self, policy, value, minibatch, advantage, old_value, target)

            return jax.grad(loss, has_aux=True)(params)

        @fragment(role="server")
        def apply_update(params, opt_state, grads, learning_rate, divergence):
            learned = apply_gradients(self, optimizer, params, opt_state, grads, learning_rate, divergence)
            return *learned, global_norm(grads)

        @fragment(role="learner")
        def learn(params, opt_state, progress, key, size, experience, carry, bootstrap_value):
            trajectory, is_first, value = experience
            value = network.value(params, with_privileged_of(unmasked(trajectory.obs), value))
            bootstrap_value = network.value(params, bootstrap_value)
            advantage, value, target, size = estimate_advantages(trajectory, value, bootstrap_value, size)
            batch = trajectory, is_first, value, advantage, target
            learning_rate = step_size(self, progress)
            key, minibatches = shuffle_members(key, self)

            def update(learned, chosen):
                params, opt_state, divergence = learned
                grads, metrics = gradients(params, batch, carry, chosen)
                divergence = diverged(self, divergence, metrics["approx_kl"])
                params, opt_state, grad_norm = apply_update(params, opt_state, grads, learning_rate, divergence)
                return (params, opt_state, divergence), metrics | {"grad_norm": grad_norm}

            learned, metrics = jax.lax.scan(update, (params, opt_state, no_divergence(self)), minibatches)
            params, opt_state, _ = learned
            return params, opt_state, key, size, jax.tree.map(jnp.mean, metrics) | in_force(learning_rate, opt_state)

        def iteration(state: RecurrentPPOState, progress: Progress) -> tuple[RecurrentPPOState, Metrics]:
            def step(before, keys):
                env_state, obs, is_first, carry = before
                action, log_prob, value, carry = act(state.params, actor_part(obs), is_first, carry, keys)
                env_state, t = env_step(env_state, action)
                record = Trajectory(obs, action, log_prob, t.reward, t.terminated, t.truncated, t.present)
                return (env_state, t.obs, t.terminated | t.truncated, carry), ((record, is_first, value), t.final_obs, carry)

            actor_keys, keys = split_keys(state.actor_keys, self.unroll_length)
            start = state.env_state, state.obs, state.is_first, state.carry
            (env_state, obs, is_first, carry), (experience, final_obs, carries) = jax.lax.scan(step, start, keys)
            last = bootstrap(state.params, actor_part(final_obs), carries, experience[0].truncated)
            env_state, episodes = pop_episodes(env_state)
            bootstrap_value = with_privileged_of(unmasked(final_obs), last)
            novelty, trajectory, found = explore(state.novelty, experience[0], obs, progress)
            experience = trajectory, *experience[1:]
            params, opt_state, key, size, metrics = learn(
                state.params, state.opt_state, progress, state.key, state.value_size, experience, state.carry, bootstrap_value
            )
            after = RecurrentPPOState(params, opt_state, key, actor_keys, env_state, obs, is_first, carry, size, novelty)
            return after, {**metrics, **found, **episodes}

        return Agent(
            init=init,
            iteration=iteration,
            axes=axes,
            steps_per_iteration=self.num_envs * self.unroll_length,
            updates_per_iteration=self.num_epochs * self.num_minibatches,
            env=venv,
            env_group=self.num_minibatches,
            **outside_recurrent_training(network, venv.action_space),
        )
