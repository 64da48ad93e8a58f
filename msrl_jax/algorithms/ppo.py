"""Proximal policy optimization (Schulman et al., 2017, arXiv 1707.06347) with generalized advantage estimation.

In the shape descriptions, `T` is `unroll_length` and `E` is `num_envs`. A minibatch holds `T / num_minibatches` time steps of
all environments. With a recurrent core, it holds whole unrolls of some environments, and gradients flow back to the first step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from msrl_jax.agents.agent import Agent, Metrics, Progress, learning_rate_at, logical_axes, split_keys
from msrl_jax.agents.optimizers import make_optimizer
from msrl_jax.agents.vector_env import make_vector_env
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
from msrl_jax.envs import Environment
from msrl_jax.envs.actions import action_transform
from msrl_jax.envs.privileged import actor_obs
from msrl_jax.fragments import fragment
from msrl_jax.kernels.networks import global_norm
from msrl_jax.loops.divergence import apply_gradients, current_rate_metric, no_divergence, update_divergence
from msrl_jax.loops.minibatches import check_minibatches, gather_carry, gather_minibatch, has_core, shuffle
from msrl_jax.loops.trajectory import NO_BONUS, AddBonus, Trajectory, advantages_and_targets
from msrl_jax.losses.policy_gradient import approximate_kl, clipped_surrogate_loss
from msrl_jax.losses.values import clipped_value_loss, value_loss
from msrl_jax.networks.actor_critic import acting_functions, actor_critic, final_value_inputs, values
from msrl_jax.networks.core import CoreKind
from msrl_jax.networks.distributions import Distribution
from msrl_jax.networks.unrolls import Carry, reset_carry
from msrl_jax.returns.means import mean, standardize
from msrl_jax.returns.value_scale import ValueScale, value_scale


class PPOState(NamedTuple):
    """The state of a run."""

    params: Any
    opt_state: optax.OptState
    key: jax.Array  # of the learner, for shuffling, []
    actor_keys: jax.Array  # keys for sampling actions, one per environment, [E]
    env_state: Any
    obs: jax.Array  # for the next actions, [E, ...]
    carry: Carry = ()  # the recurrent state of the actors, [E, ...] each
    value_scale: ValueScale | tuple[()] = ()  # the running scale of the critic's targets, if values are normalized


class Collected(NamedTuple):
    """What actors send to the learner."""

    trajectory: Trajectory
    value_inputs: Any  # inputs of the critic for every step, in addition to observations; `()` if nothing, [T, E, ...]
    final_obs: Any  # the last observations of episodes, and of the unroll, [T, E, ...]
    final_value_inputs: Any  # inputs of the critic for these
    carry: Carry  # before the first step, [E, ...] each


@config("ppo", privileged=True, actions=ALL_ACTIONS)
class PPO:
    """Proximal policy optimization; for any observations, and actions that are discrete, integers or floats."""

    num_envs: int = field(default=32, doc="environments stepped in parallel, `E`. Usual: 8 to 4096.")
    unroll_length: int = field(default=128, doc="steps of every environment per iteration, `T`. Usual: 16 to 2048.")
    num_epochs: int = field(default=4, doc="passes over the batch per iteration. Usual: 3 to 10.")
    num_minibatches: int = field(default=8, doc="updates per pass, a divisor of `T`, or with a core of `E`. Usual: 4 to 32.")
    learning_rate: Tunable = tunable(default=3e-3, adaptive=True, doc="step size of updates. Usual: 1e-4 to 3e-3.", above=0)
    anneal_learning_rate: bool = field(default=False, doc="whether the learning rate falls linearly to 0. Usual: True.")
    optimizer: OptimizerKind = field(default="adam", doc='a name, or a transformation of optax. Usual: "adam".')
    max_grad_norm: TunableOrNone = tunable(default=0.5, above=0, doc="gradients are clipped to this global norm. Usual: 0.5.")
    discount: Tunable = tunable(default=0.99, doc="discount factor per step. Usual: 0.99.", low=0, high=1)
    gae_lambda: Tunable = tunable(default=0.95, low=0, high=1, doc="lambda of advantages: 0 bias, 1 variance. Usual: 0.95.")
    normalize_advantage: Normalization = field(default="minibatch", doc='how to standardize advantages. Usual: "minibatch".')
    clip_ratio: Tunable = tunable(default=0.2, doc="clip of the probability ratio around 1. Usual: 0.1 to 0.3.", above=0)
    clip_value: TunableOrNone = tunable(default=None, above=0, doc="clip of the critic's change, in its units. Usual: None.")
    target_kl: TunableOrNone = tunable(
        default=None, above=0, doc="KL (nats) above which the rest of an iteration changes nothing. Usual: None, 0.01 to 0.03."
    )
    entropy_coef: Tunable = tunable(default=0.01, doc="weight of the entropy bonus. Usual: 0 to 0.01.", low=0)
    value_coef: Tunable = tunable(default=0.5, low=0, doc="weight of the value loss, half the squared error. Usual: 0.5 to 1.")
    hidden_sizes: tuple[int, ...] = field(default=(64, 64), doc="widths of the dense layers. Usual: (64, 64).")
    activation: Activation = field(default="tanh", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "tanh".')
    network: NetworkKind = field(default="auto", doc='a name, or a module; "auto" convolves images. Usual: "auto".')
    layer_norm: bool = field(default=False, doc="whether hidden dense layers are normalized (LayerNorm). Usual: False.")
    shared_torso: bool = field(default=False, doc="whether policy and value share a torso. Usual: False; images: True.")
    core: CoreKind | Any | None = field(default=None, doc='recurrent layer; "min_gru" is fastest. Usual: None, "gru".')
    normalize_observations: bool = field(default=False, doc="standardize by running statistics. Usual: True for locomotion.")
    normalize_rewards: bool = field(default=False, doc="divide by the return's running deviation. Usual: True for locomotion.")
    normalize_values: bool = field(default=True, doc="whether the critic learns values over their RMS. Usual: True.")

    def check(self) -> None:
        """Raises ValueError unless `num_minibatches` divides `unroll_length` (with a recurrent core, `num_envs`)."""
        check_minibatches(self)

    def build(self, env: Environment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space or a size does not fit."""
        venv = make_vector_env(env, self)
        network = actor_critic(self, venv.observation_space, venv.action_space)
        optimizer = make_optimizer(self, epsilon=1e-5)
        to_env_action = action_transform(venv.action_space)

        def init(key: jax.Array) -> PPOState:
            params_key, env_key, actor_key, learner_key = jax.random.split(key, 4)
            env_state, obs = venv.reset(env_key)
            params = network.init(params_key)
            return PPOState(
                params=params,
                opt_state=optimizer.init(params),
                key=learner_key,
                actor_keys=jax.random.split(actor_key, self.num_envs),
                env_state=env_state,
                obs=obs,
                carry=network.initial_carry((self.num_envs,)),
                value_scale=value_scale() if self.normalize_values else (),
            )

        axes = logical_axes(
            PPOState,
            params=P(),
            opt_state=P(),
            key=P(),
            actor_keys=P("env"),
            env_state=venv.axes,
            obs=P("env"),
            carry=P("env"),
            value_scale=P(),
        )

        @fragment(role="actor")
        def act(params, obs, is_first, carry, keys):
            policy, value_input, carry = network.act(params, obs, reset_carry(is_first, carry))
            action = policy.sample(keys)
            return action, policy.log_prob(action), value_input, carry

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
        def estimate_advantages(params, scale, collected: Collected):
            t = collected.trajectory
            value = values(network, params, t.obs, collected.value_inputs)
            bootstrap_value = values(network, params, collected.final_obs, collected.final_value_inputs)
            advantage, value, target, scale = advantages_and_targets(self, t, value, bootstrap_value, scale)
            if self.normalize_advantage == "batch":
                advantage = standardize(advantage, t.valid)
            return scale, (t, advantage, value, target)

        @fragment(role="learner")
        def gradients(params, batch, carry, index):
            minibatch, advantage, old_value, target = gather_minibatch(self, batch, index)
            carry = gather_carry(self, carry, index)
            if self.normalize_advantage == "minibatch":
                advantage = standardize(advantage, minibatch.valid)

            def loss(params):
                policy, value, _ = network.unroll(params, minibatch.obs, minibatch.is_first, carry)
                return ppo_loss(self, policy, value, minibatch, advantage, old_value, target)

            return jax.grad(loss, has_aux=True)(params)

        @fragment(role="server")
        def apply_update(params, opt_state, grads, learning_rate, divergence):
            learner = apply_gradients(self, optimizer, params, opt_state, grads, learning_rate, divergence)
            return *learner, global_norm(grads)

        @fragment(role="learner")
        def learn(params, opt_state, progress, key, scale, collected: Collected):
            scale, batch = estimate_advantages(params, scale, collected)
            learning_rate = learning_rate_at(self, progress)
            key, minibatches = shuffle(key, self)

            def update(learner, index):
                params, opt_state, divergence = learner
                grads, metrics = gradients(params, batch, collected.carry, index)
                divergence = update_divergence(self, divergence, metrics["approx_kl"])
                params, opt_state, grad_norm = apply_update(params, opt_state, grads, learning_rate, divergence)
                return (params, opt_state, divergence), metrics | {"grad_norm": grad_norm}

            learner, metrics = jax.lax.scan(update, (params, opt_state, no_divergence(self)), minibatches)
            params, opt_state, _ = learner
            metrics = jax.tree.map(jnp.mean, metrics) | current_rate_metric(self, learning_rate, opt_state)
            return params, opt_state, key, scale, metrics

        def iteration(state: PPOState, progress: Progress, add_bonus: AddBonus = NO_BONUS) -> tuple[PPOState, Metrics]:
            def step(loop_state, keys):
                env_state, obs, is_first, carry = loop_state
                action, log_prob, value_input, carry = act(state.params, actor_obs(obs), is_first, carry, keys)
                env_state, t = env_step(env_state, action)
                experience = Trajectory(obs, action, log_prob, t.reward, t.terminated, t.truncated, t.valid)
                return (env_state, t.obs, t.terminated | t.truncated, carry), (experience, value_input, t.final_obs, carry)

            actor_keys, keys = split_keys(state.actor_keys, self.unroll_length)
            start = state.env_state, state.obs, jnp.zeros(self.num_envs, bool), state.carry
            (env_state, obs, is_first, carry), (trajectory, value_inputs, final_obs, carries) = jax.lax.scan(step, start, keys)
            last = bootstrap(state.params, actor_obs(final_obs), carries, trajectory.truncated)
            env_state, episodes = pop_episodes(env_state)
            collected = Collected(add_bonus(trajectory, obs), value_inputs, final_obs, last, state.carry)
            params, opt_state, key, scale, metrics = learn(
                state.params, state.opt_state, progress, state.key, state.value_scale, collected
            )
            new_state = PPOState(
                params=params,
                opt_state=opt_state,
                key=key,
                actor_keys=actor_keys,
                env_state=env_state,
                obs=obs,
                carry=reset_carry(is_first, carry),
                value_scale=scale,
            )
            return new_state, {**metrics, **episodes}

        acting = acting_functions(network, venv.action_space)
        return Agent(
            init=init,
            iteration=iteration,
            axes=axes,
            steps_per_iteration=self.num_envs * self.unroll_length,
            updates_per_iteration=self.num_epochs * self.num_minibatches,
            env=venv,
            env_group=self.num_minibatches if has_core(self) else 1,
            act=acting.act,
            initial_carry=acting.initial_carry,
            probabilities=acting.probabilities,
        )


def ppo_loss(
    config: Any,
    policy: Distribution,
    value: jax.Array,
    steps: Any,
    advantage: jax.Array,
    old_value: jax.Array,
    target: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the loss of a minibatch `[...]` (1707.06347, eq. 9), and its parts; `steps` is the data of the minibatch."""
    log_ratio = policy.log_prob(steps.action) - steps.log_prob
    value_losses = value_loss(value, target)
    if config.clip_value is not None:
        value_losses = clipped_value_loss(value, old_value, target, config.clip_value)
    stats = {
        "policy_loss": clipped_surrogate_loss(log_ratio, advantage, config.clip_ratio),
        "value_loss": value_losses,
        "entropy": policy.entropy(),
        "approx_kl": approximate_kl(log_ratio),
        "clip_fraction": jnp.abs(jnp.expm1(log_ratio)) > config.clip_ratio,
    }
    stats = {name: mean(x.astype(jnp.float32), steps.valid) for name, x in stats.items()}
    total = stats["policy_loss"] + config.value_coef * stats["value_loss"]
    return total - config.entropy_coef * stats["entropy"], stats


RecurrentPPO = variant(
    PPO,
    "RecurrentPPO",
    "recurrent_ppo",
    "PPO with a recurrent core; for any observations, and actions as PPO has them.",
    unroll_length=64,
    num_minibatches=4,
    learning_rate=0.001,
    hidden_sizes=(64,),
    core="gru",
)
