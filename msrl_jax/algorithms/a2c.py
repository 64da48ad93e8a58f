"""Advantage actor-critic (A2C): the synchronous form of A3C (Mnih et al., 2016, arXiv 1602.01783).

Every iteration makes one update from the unrolls of all environments. In the shape descriptions, `T` is `unroll_length`
and `E` is `num_envs`.
"""

import functools
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
from msrl_jax.envs.privileged import actor_obs
from msrl_jax.fragments import fragment
from msrl_jax.kernels.networks import global_norm
from msrl_jax.loops.trajectory import NO_BONUS, AddBonus, Trajectory, advantages_and_targets
from msrl_jax.losses.policy_gradient import policy_gradient_loss
from msrl_jax.losses.values import value_loss
from msrl_jax.networks.actor_critic import ActorCritic, acting_functions, actor_critic, final_value_inputs, values
from msrl_jax.networks.core import CoreKind
from msrl_jax.networks.unrolls import Carry, reset_carry
from msrl_jax.returns.means import mean, standardize


class A2CState(NamedTuple):
    """The state of a run."""

    params: Any
    opt_state: optax.OptState
    actor_keys: jax.Array  # keys for sampling actions, one per environment, [E]
    env_state: Any
    obs: jax.Array  # for the next actions, [E, ...]
    carry: Carry = ()  # the recurrent state of the actors, [E, ...] each


@config("a2c", privileged=True, actions=ALL_ACTIONS)
class A2C:
    """Advantage actor-critic; for any observations, and actions that are discrete, integers or floats."""

    num_envs: int = field(default=32, doc="environments stepped in parallel, `E`. Usual: 8 to 4096.")
    unroll_length: int = field(default=16, doc="steps of every environment per iteration, `T`. Usual: 5 to 32.")
    optimizer: OptimizerKind = field(default="rmsprop", doc='a name, or a transformation of optax. Usual: "rmsprop", "adam".')
    learning_rate: Tunable = tunable(default=0.002, doc="step size of updates. Usual: 1e-4 to 7e-3.", above=0)
    anneal_learning_rate: bool = field(default=False, doc="whether the learning rate falls linearly to 0. Usual: True.")
    max_grad_norm: Tunable = tunable(default=0.5, above=0, doc="gradients are clipped to this global norm. Usual: 0.5 to 40.")
    rms_decay: Tunable = tunable(default=0.99, low=0, high=1, doc="decay of RMSProp's mean of squares. Usual: 0.99.")
    epsilon: Tunable = tunable(default=1e-05, above=0, doc="added to the denominator. Usual: 1e-5 to 0.1; Adam: 1e-8 to 1e-5.")
    discount: Tunable = tunable(default=0.99, doc="discount factor per step. Usual: 0.99.", low=0, high=1)
    gae_lambda: Tunable = tunable(
        default=0.95, low=0, high=1, doc="lambda: 0 bias, 1 variance (the paper's). Usual: 1, or 0.95."
    )
    normalize_advantage: Literal["batch", "none"] = field(default="none", doc='how to standardize advantages. Usual: "none".')
    entropy_coef: Tunable = tunable(default=0.01, doc="weight of the entropy bonus. Usual: 0 to 0.01.", low=0)
    value_coef: Tunable = tunable(default=0.5, low=0, doc="weight of the value loss, half the squared error. Usual: 0.5 to 1.")
    hidden_sizes: tuple[int, ...] = field(default=(64, 64), doc="widths of the dense layers. Usual: (64, 64).")
    activation: Activation = field(default="tanh", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "tanh".')
    network: NetworkKind = field(default="auto", doc='a name, or a module; "auto" convolves images. Usual: "auto".')
    layer_norm: bool = field(default=False, doc="whether hidden dense layers are normalized (LayerNorm). Usual: False.")
    shared_torso: bool = field(default=False, doc="whether policy and value share a torso. Usual: False; images: True.")
    core: CoreKind | Any | None = field(default=None, doc='recurrent layer. Usual: None, or "gru".')
    normalize_observations: bool = field(default=False, doc="standardize by running statistics. Usual: True for locomotion.")
    normalize_rewards: bool = field(default=False, doc="divide by the return's running deviation. Usual: True for locomotion.")

    def build(self, env: Environment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space or a size does not fit."""
        venv = make_vector_env(env, self)
        network = actor_critic(self, venv.observation_space, venv.action_space)
        optimizer = make_optimizer(self, epsilon=self.epsilon, rms_decay=self.rms_decay)
        to_env_action = action_transform(venv.action_space)

        def init(key: jax.Array) -> A2CState:
            params_key, env_key, actor_key = jax.random.split(key, 3)
            env_state, obs = venv.reset(env_key)
            params = network.init(params_key)
            return A2CState(
                params,
                optimizer.init(params),
                jax.random.split(actor_key, self.num_envs),
                env_state,
                obs,
                network.initial_carry((self.num_envs,)),
            )

        axes = logical_axes(
            A2CState, params=P(), opt_state=P(), actor_keys=P("env"), env_state=venv.axes, obs=P("env"), carry=P("env")
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
        def gradients(params, trajectory, bootstrap_value, carry):
            loss = functools.partial(advantage_loss, self, network)
            return jax.grad(loss, has_aux=True)(params, trajectory, bootstrap_value, carry)

        @fragment(role="server")
        def apply_update(params, opt_state, grads, learning_rate):
            updates, opt_state = optimizer.update(grads, opt_state, params, learning_rate=learning_rate)
            return optax.apply_updates(params, updates), opt_state, global_norm(grads)

        @fragment(role="learner")
        def learn(params, opt_state, progress, trajectory, final_obs, last_value_inputs, carry):
            bootstrap_value = values(network, params, final_obs, last_value_inputs)
            learning_rate = learning_rate_at(self, progress)
            grads, stats = gradients(params, trajectory, bootstrap_value, carry)
            params, opt_state, grad_norm = apply_update(params, opt_state, grads, learning_rate)
            return params, opt_state, {**stats, "grad_norm": grad_norm, **learning_rate_metric(learning_rate)}

        def iteration(state: A2CState, progress: Progress, add_bonus: AddBonus = NO_BONUS) -> tuple[A2CState, Metrics]:
            def step(loop_state, keys):
                env_state, obs, is_first, carry = loop_state
                action, log_prob, carry = act(state.params, actor_obs(obs), is_first, carry, keys)
                env_state, t = env_step(env_state, action)
                experience = Trajectory(obs, action, log_prob, t.reward, t.terminated, t.truncated, t.valid)
                return (env_state, t.obs, t.terminated | t.truncated, carry), (experience, t.final_obs, carry)

            actor_keys, keys = split_keys(state.actor_keys, self.unroll_length)
            start = state.env_state, state.obs, jnp.zeros(self.num_envs, bool), state.carry
            (env_state, obs, is_first, carry), (trajectory, final_obs, carries) = jax.lax.scan(step, start, keys)
            last_value_inputs = bootstrap(state.params, actor_obs(final_obs), carries, trajectory.truncated)
            env_state, episodes = pop_episodes(env_state)
            trajectory = add_bonus(trajectory, obs)
            params, opt_state, metrics = learn(
                state.params, state.opt_state, progress, trajectory, final_obs, last_value_inputs, state.carry
            )
            new_state = A2CState(params, opt_state, actor_keys, env_state, obs, reset_carry(is_first, carry))
            return new_state, {**metrics, **episodes}

        acting = acting_functions(network, venv.action_space)
        return Agent(
            init=init,
            iteration=iteration,
            axes=axes,
            steps_per_iteration=self.num_envs * self.unroll_length,
            updates_per_iteration=1,
            env=venv,
            act=acting.act,
            initial_carry=acting.initial_carry,
            probabilities=acting.probabilities,
        )


def advantage_loss(
    config: Any, network: ActorCritic, params: Any, t: Trajectory, bootstrap_value: jax.Array, carry: Carry
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the loss of an advantage actor-critic, A2C or one worker of A3C, and its parts: means over a trajectory `[T, E,
    ...]`.
    """
    policy, value, _ = network.unroll(params, t.obs, t.is_first, carry)
    advantage, _, target, _ = advantages_and_targets(config, t, jax.lax.stop_gradient(value), bootstrap_value)
    if config.normalize_advantage != "none":
        advantage = standardize(advantage, t.valid)
    stats = {
        "policy_loss": mean(policy_gradient_loss(policy.log_prob(t.action), advantage), t.valid),
        "value_loss": mean(value_loss(value, target), t.valid),
        "entropy": mean(policy.entropy(), t.valid),
    }
    total = stats["policy_loss"] + config.value_coef * stats["value_loss"]
    return total - config.entropy_coef * stats["entropy"], stats
