"""PPO with a recurrent network: proximal policy optimization (arXiv 1707.06347) for what one observation does not tell.

In the shape descriptions, `T` is `unroll_length`, `E` is `num_envs`, `M` is `num_minibatches` and `H` is `memory_size`.
Sequences are whole unrolls, through which gradients flow back to the first step. A minibatch holds one environment out of
every `M` adjacent ones, so a shuffle stays within groups of `M`, and nothing moves between devices that hold whole groups.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from msrl_jax.algorithms.base import Agent, Algorithm, Metrics, register, training_environment
from msrl_jax.algorithms.configs import checks as check
from msrl_jax.algorithms.loops import proximal
from msrl_jax.algorithms.loops.acting import next_values
from msrl_jax.algorithms.loops.optimizer import learning_rate_at, make_optimizer
from msrl_jax.algorithms.networks.actor_critic import action_transform
from msrl_jax.algorithms.networks.recurrent import CELLS, Memory, forget, recurrent_actor_critic
from msrl_jax.algorithms.returns import gae, standardize
from msrl_jax.envs import Environment
from msrl_jax.fragments import fragment


@dataclasses.dataclass(frozen=True)
class RecurrentPPOConfig:
    """Everything about what recurrent PPO computes; where it runs is a distribution policy's concern.

    Attributes:
      num_envs: environments stepped in parallel, `E`; a multiple of `num_minibatches`, and of that times the number of
        devices that they are split over. Usual: 16 to 4096.
      unroll_length: steps of every environment per iteration, `T`, and the most that gradients flow back. Usual: 16 to
        256.
      num_epochs: passes over the batch per iteration. Usual: 3 to 10.
      num_minibatches: updates per pass. Usual: 1 to 8.
      learning_rate: step size of Adam. Usual: 1e-4 to 1e-3.
      anneal_learning_rate: whether the learning rate falls linearly to 0 over `total_steps`. Usual: True.
      discount: the factor per step. Usual: 0.99.
      gae_lambda: bias (0) against variance (1) of the advantages. Usual: 0.95.
      clip_ratio: how far from 1 the probability ratio still pays off. Usual: 0.1 to 0.3.
      clip_value: how far a value may move to its profit, in units of the return; None does not clip. Usual: None.
      entropy_coef: weight of the entropy bonus. Usual: 0 to 0.01.
      value_coef: weight of the value loss, which is half a squared error. Usual: 0.5 to 1.
      max_grad_norm: gradients are scaled down to this global norm. Usual: 0.5.
      target_kl: the rest of an iteration's updates is skipped once the estimated divergence from the policy that acted
        exceeds this, in nats; None never skips. Usual: None, or 0.01 to 0.03.
      normalize_advantage: over what advantages are standardized: each "minibatch", the whole "batch" once, or "none".
        Usual: "minibatch".
      normalize_observations: whether observations are standardized by running statistics. Usual: True for locomotion.
      normalize_rewards: whether rewards are divided by the running deviation of the return. Usual: True for locomotion.
      core: "gru" or "lstm". Usual: "gru".
      memory_size: size of the memory, `H`. Usual: 64 to 512.
      hidden_sizes: widths of the dense layers before the core. Usual: (64,), or (128,) after a convolution.
      activation: "tanh", "relu", "elu", "gelu" or "silu". Usual: "tanh", or "relu" after a convolution.
      network: "mlp", "cnn", or "auto", which convolves observations of three dimensions. Usual: "auto".
      total_steps: environment steps over which the learning rate falls; needed only if it does.
    """

    num_envs: int = 32
    unroll_length: int = 64
    num_epochs: int = 4
    num_minibatches: int = 4
    learning_rate: float = 1e-3
    anneal_learning_rate: bool = False
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip_ratio: float = 0.2
    clip_value: float | None = None
    entropy_coef: float = 0.01
    value_coef: float = 0.5
    max_grad_norm: float = 0.5
    target_kl: float | None = None
    normalize_advantage: str = "minibatch"
    normalize_observations: bool = False
    normalize_rewards: bool = False
    core: str = "gru"
    memory_size: int = 64
    hidden_sizes: tuple[int, ...] = (64,)
    activation: str = "tanh"
    network: str = "auto"
    total_steps: int | None = None

    def __post_init__(self):
        check.check_common(self)
        check.check_integers(self, 1, "memory_size")
        check.check_choice(self, "normalize_advantage", ("minibatch", "batch", "none"))
        check.check_choice(self, "core", CELLS)
        if self.num_envs % self.num_minibatches:
            above = self.num_envs + -self.num_envs % self.num_minibatches
            raise ValueError(
                f"RecurrentPPOConfig.num_envs={self.num_envs} cannot be split into num_minibatches={self.num_minibatches} "
                f"groups of whole sequences; use num_envs={above}, or a num_minibatches that divides it"
            )


class RecurrentPPOState(NamedTuple):
    """All of a run.

    Attributes:
      params: parameters of the `RecurrentNetwork`.
      opt_state: state of the optimizer.
      iteration: iterations done. shape=(), dtype=int32
      key: the learner's key, which shuffles. shape=()
      actor_keys: one key per environment, which samples actions. shape=(E,)
      env_state: state of the vector environment.
      obs: the observations to act on next. shape=(E, ...)
      begins: whether they are the first of an episode. shape=(E,), dtype=bool
      memory: what the actors remember of earlier observations. shape=(E, H) each
    """

    params: Any
    opt_state: optax.OptState
    iteration: jax.Array
    key: jax.Array
    actor_keys: jax.Array
    env_state: Any
    obs: jax.Array
    begins: jax.Array
    memory: Memory


class Sequences(NamedTuple):
    """What the learner needs to know of an unroll.

    Attributes:
      obs: observations acted on. shape=(T, E, ...)
      begins: whether they are the first of an episode. shape=(T, E), dtype=bool
      action: the policy's actions, before they are fitted to the action space. shape=(T, E, ...)
      log_prob: their log-probabilities under the policy that acted. shape=(T, E)
      value: the values of the network that acted. shape=(T, E)
      reward: rewards. shape=(T, E)
      terminated: whether the episode ended in a terminal state. shape=(T, E), dtype=bool
      truncated: whether the episode was cut short. shape=(T, E), dtype=bool
    """

    obs: jax.Array
    begins: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array


def build(env: Environment, config: RecurrentPPOConfig) -> Agent:
    """Builds recurrent PPO for one environment.

    Args:
      env: the environment; its action space is `Discrete` or a `Box` of floats.
      config: what to compute.

    Returns:
      The agent; it acts with a memory.

    Raises:
      ValueError: if the learning rate is to be annealed and `config.total_steps` is None, or if the network does not fit.
      TypeError: if a space is not supported.
    """
    check.check_annealing(config)
    venv = training_environment(
        env, config.num_envs, normalize_observations=config.normalize_observations,
        normalize_rewards=config.normalize_rewards, discount=config.discount,
    )  # fmt: skip
    network = recurrent_actor_critic(venv.observation_space, venv.action_space, config)
    to_env_action = action_transform(venv.action_space)
    optimizer = make_optimizer("adam", max_grad_norm=config.max_grad_norm, epsilon=1e-5)
    steps_per_iteration = config.num_envs * config.unroll_length
    anneal_over = config.total_steps if config.anneal_learning_rate else None
    groups, members = config.num_envs // config.num_minibatches, config.num_minibatches

    def init(key: jax.Array) -> RecurrentPPOState:
        params_key, env_key, actor_key, learner_key = jax.random.split(key, 4)
        env_state, obs = venv.reset(env_key)
        params = network.init(params_key)
        actor_keys = jax.random.split(actor_key, config.num_envs)
        begins, memory = jnp.ones(config.num_envs, bool), network.initial_memory((config.num_envs,))
        return RecurrentPPOState(
            params, optimizer.init(params), jnp.int32(0), learner_key, actor_keys, env_state, obs, begins, memory
        )

    @fragment(role="actor")
    def draw_keys(keys):
        keys = jax.vmap(lambda key: jax.random.split(key, config.unroll_length + 1), out_axes=1)(keys)
        return keys[0], keys[1:]

    @fragment(role="actor")
    def act(params, obs, begins, memory, keys):
        (policy, value), memory = network.step(params, obs, forget(begins, memory))
        action = policy.sample(keys)
        return action, policy.log_prob(action), value, memory

    @fragment(role="env")
    def env_step(env_state, action):
        return venv.step(env_state, to_env_action(action))

    # The actors evaluate the observations that ended episodes: a number crosses to the learner, not a memory. The
    # counter tells how old their parameters are.
    @fragment(role="actor")
    def bootstrap(params, iteration, final_obs, memories):
        (_, final_value), _ = network.step(params, final_obs, memories)
        return final_value, iteration

    drain = fragment(role="env", name="drain")(venv.pop_episodes)

    @fragment(role="learner")
    def estimate_advantages(seen, final_value):
        next_value = next_values(seen.value, final_value[-1], final_value, seen.truncated)
        advantage = gae(
            seen.reward, seen.value, next_value, seen.terminated, seen.truncated,
            discount=config.discount, gae_lambda=config.gae_lambda,
        )  # fmt: skip
        target = seen.value + advantage
        if config.normalize_advantage == "batch":
            advantage = standardize(advantage)
        return advantage, target

    @fragment(role="learner")
    def gradients(params, sequences, memory, chosen):
        def pick(x):
            x = x.reshape(len(x), groups, members, *x.shape[2:])
            index = chosen.reshape(1, groups, 1, *(1,) * (x.ndim - 3))
            return jnp.take_along_axis(x, index, axis=2)[:, :, 0]

        seen, advantage, target = jax.tree.map(pick, sequences)
        memory = tuple(pick(m[None])[0] for m in memory)
        if config.normalize_advantage == "minibatch":
            advantage = standardize(advantage)

        def loss(params):
            (policy, value), _ = network.unroll(params, seen.obs, seen.begins, memory)
            return proximal.surrogate_loss(
                policy, value, action=seen.action, log_prob=seen.log_prob, advantage=advantage, old_value=seen.value,
                target=target, clip_ratio=config.clip_ratio, clip_value=config.clip_value, value_coef=config.value_coef,
                entropy_coef=config.entropy_coef,
            )  # fmt: skip

        return jax.grad(loss, has_aux=True)(params)

    @fragment(role="learner")
    def learn(params, opt_state, iteration, key, seen, memory, final_value, acted_at):
        sequences = (seen, *estimate_advantages(seen, final_value))
        key, *epoch_keys = jax.random.split(key, config.num_epochs + 1)
        order = jnp.broadcast_to(jnp.arange(members)[:, None], (members, groups))
        shuffled = [jax.random.permutation(k, order, axis=0, independent=True) for k in epoch_keys]
        params, opt_state, metrics = proximal.optimize(
            optimizer, lambda params, chosen: gradients(params, sequences, memory, chosen),
            params, opt_state, jnp.concatenate(shuffled),
            learning_rate=learning_rate_at(iteration, config.learning_rate, steps_per_iteration, anneal_over),
            target_kl=config.target_kl,
        )  # fmt: skip
        age = (iteration - acted_at).astype(jnp.float32)
        return params, opt_state, iteration + 1, key, metrics | {"parameter_age": age}

    def iteration(state: RecurrentPPOState) -> tuple[RecurrentPPOState, Metrics]:
        def step(carry, keys):
            env_state, obs, begins, memory = carry
            action, log_prob, value, memory = act(state.params, obs, begins, memory, keys)
            env_state, t = env_step(env_state, action)
            seen = Sequences(obs, begins, action, log_prob, value, t.reward, t.terminated, t.truncated)
            return (env_state, t.obs, t.terminated | t.truncated, memory), (seen, t.final_obs, memory)

        actor_keys, keys = draw_keys(state.actor_keys)
        start = state.env_state, state.obs, state.begins, state.memory
        (env_state, obs, begins, memory), (seen, final_obs, memories) = jax.lax.scan(step, start, keys)
        final_value, acted_at = bootstrap(state.params, state.iteration, final_obs, memories)
        params, opt_state, count, key, metrics = learn(
            state.params, state.opt_state, state.iteration, state.key, seen,
            state.memory, final_value, acted_at,
        )  # fmt: skip
        env_state, episodes = drain(env_state)
        after = RecurrentPPOState(params, opt_state, count, key, actor_keys, env_state, obs, begins, memory)
        return after, metrics | episodes

    def choose_action(state: RecurrentPPOState, obs: jax.Array, key: jax.Array | None, memory: Memory):
        (policy, _), memory = network.step(state.params, obs, memory)
        action = policy.mode() if key is None else policy.sample(jax.random.split(key, obs.shape[0]))
        return to_env_action(action), memory

    axes = RecurrentPPOState._make([P(), P(), P(), P(), P("env"), venv.axes, P("env"), P("env"), P("env")])
    return Agent(
        init, iteration, choose_action, axes, steps_per_iteration=steps_per_iteration,
        updates_per_iteration=config.num_epochs * config.num_minibatches, env=venv,
        initial_memory=lambda num_envs: network.initial_memory((num_envs,)), env_group=members,
    )  # fmt: skip


RecurrentPPO = register(Algorithm("recurrent_ppo", RecurrentPPOConfig, build))
