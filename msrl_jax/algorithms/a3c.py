"""Asynchronous advantage actor-critic (A3C; Mnih et al., 2016, arXiv 1602.01783), with a fixed order of events.

`W` workers own `E / W` neighboring environments each, and a copy of the parameters. In every iteration

1. each worker unrolls `T` steps with its own copy, and computes one gradient with that same copy;
2. the server applies the gradients of workers 0, 1, ..., `W - 1`, one after another, each to the parameters that the one
   before it left; and right after its own gradient was applied, a worker fetches the parameters.

So from its second gradient on, every worker's gradient is applied `W - 1` updates after it fetched the parameters: the
asynchrony of A3C whose workers are equally fast, reproducibly. A distribution policy's staleness comes on top: it
delays what acts, not what differentiates. In the shape descriptions, `T` is `unroll_length` and `E` is `num_envs`.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from msrl_jax.algorithms.a2c import make_gradients
from msrl_jax.algorithms.base import Agent, Algorithm, Metrics, register, training_environment
from msrl_jax.algorithms.configs.checks import check_integers
from msrl_jax.algorithms.configs.loss import ActorCriticLossConfig, AdvantageConfig
from msrl_jax.algorithms.configs.network import ActorCriticConfig
from msrl_jax.algorithms.configs.optimizer import RMSPropConfig
from msrl_jax.algorithms.configs.rollout import OnPolicyConfig
from msrl_jax.algorithms.loops.acting import make_choose_action, make_unroll, stamp
from msrl_jax.algorithms.loops.optimizer import descend, learning_rate_at, make_optimizer
from msrl_jax.algorithms.networks.actor_critic import ActorCritic, actor_critic
from msrl_jax.envs import Environment
from msrl_jax.fragments import fragment


@dataclasses.dataclass(frozen=True, kw_only=True)
class A3CConfig(ActorCriticConfig, RMSPropConfig, AdvantageConfig, ActorCriticLossConfig, OnPolicyConfig):
    """Everything about what A3C computes; where it runs is a distribution policy's concern.

    Attributes:
      num_envs: environments stepped in parallel, `E`; a multiple of `num_workers`. Usual: 8 to 4096.
      num_workers: groups of environments with parameters of their own, `W`; they can be split over as many devices.
        Usual: 8 to 16.
      unroll_length: steps of every environment per iteration, `T`. Usual: 5 to 32.
      max_grad_norm: gradients are scaled down to this global norm. Usual: 0.5 to 40.
      gae_lambda: bias (0) against variance (1) of the advantages; 1 makes them the n-step advantages of the paper, as
        long as the unroll allows. Usual: 1, or 0.95.
      normalize_advantage: over what advantages are standardized: the part of each "worker", or "none". Usual: "none".
    """

    num_envs: int = 64
    num_workers: int = 8
    unroll_length: int = 16
    learning_rate: float = 2e-3
    max_grad_norm: float = 0.5
    entropy_coef: float = 0.001
    normalize_advantage: Literal["worker", "none"] = "none"

    def check(self) -> None:
        """Raises ValueError unless the workers divide the environments."""
        check_integers(self, 1, "num_workers")
        if self.num_envs % self.num_workers:
            above = -(-self.num_envs // self.num_workers) * self.num_workers
            raise ValueError(
                f"{type(self).__name__}.num_envs={self.num_envs} cannot be split between num_workers={self.num_workers}; use "
                f"num_envs={above}, or a num_workers that divides it"
            )


class A3CState(NamedTuple):
    """All of a run.

    Attributes:
      params: the server's parameters of the `ActorCritic`.
      opt_state: state of the server's optimizer, which all workers share.
      iteration: iterations done; the server has made `W` times as many updates. shape=(), dtype=int32
      worker_params: the parameters that each worker fetched last; every leaf has shape=(W, ...)
      fetched: the number of updates that the server had made by then. shape=(W,), dtype=int32
      actor_keys: one key per environment, which samples actions. shape=(E,)
      env_state: state of the vector environment.
      obs: the observations to act on next. shape=(E, ...)
    """

    params: Any
    opt_state: optax.OptState
    iteration: jax.Array
    worker_params: Any
    fetched: jax.Array
    actor_keys: jax.Array
    env_state: Any
    obs: jax.Array


def per_worker(network: ActorCritic, num_workers: int) -> ActorCritic:
    """A network whose parameters have a leading dimension `W`; inputs `[W * n, ...]` hold `n` rows of each worker in turn."""

    def split(method):
        def apply(params, x):
            grouped = jax.vmap(method)(params, x.reshape(num_workers, -1, *x.shape[1:]))
            return jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), grouped)

        return apply

    return ActorCritic(network.init, split(network.apply), split(network.policy), split(network.value))


def build(env: Environment, config: A3CConfig) -> Agent:
    """Builds A3C for one environment.

    Args:
      env: the environment; its action space is `Discrete` or a `Box` of floats.
      config: what to compute.

    Returns:
      The agent.

    Raises:
      ValueError: if the learning rate is to be annealed and `config.total_steps` is None, or if the network does not fit.
      TypeError: if a space is not supported.
    """
    config.check_annealing()
    venv = training_environment(
        env, config.num_envs, normalize_observations=config.normalize_observations,
        normalize_rewards=config.normalize_rewards, discount=config.discount,
    )  # fmt: skip
    network = actor_critic(venv.observation_space, venv.action_space, config, shared_torso=config.shared_torso)
    optimizer = make_optimizer(
        config.optimizer, max_grad_norm=config.max_grad_norm, epsilon=config.epsilon, rms_decay=config.rms_decay
    )
    num_workers = config.num_workers
    unroll = make_unroll(venv, per_worker(network, num_workers), config.unroll_length)
    steps_per_iteration = config.num_envs * config.unroll_length
    anneal_over = config.total_steps if config.anneal_learning_rate else None

    def init(key: jax.Array) -> A3CState:
        params_key, env_key, actor_key = jax.random.split(key, 3)
        env_state, obs = venv.reset(env_key)
        params = network.init(params_key, obs)
        worker_params = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_workers, *x.shape)), params)
        fetched = jnp.zeros(num_workers, jnp.int32)
        actor_keys = jax.random.split(actor_key, config.num_envs)
        return A3CState(
            params, optimizer.init(params), jnp.int32(0), worker_params, fetched, actor_keys, env_state, obs
        )

    worker_gradients = make_gradients(
        network, discount=config.discount, gae_lambda=config.gae_lambda, entropy_coef=config.entropy_coef,
        value_coef=config.value_coef, normalize_advantage=config.normalize_advantage == "worker",
    )  # fmt: skip

    @fragment(role="learner")
    def gradients(worker_params, trajectory, last_obs, final_value):
        def group(x, axis):
            return x.reshape(*x.shape[:axis], num_workers, -1, *x.shape[axis + 1 :])

        trajectory, final_value = jax.tree.map(lambda x: group(x, 1), (trajectory, final_value))
        return jax.vmap(worker_gradients, in_axes=(0, 1, 0, 1))(worker_params, trajectory, group(last_obs, 0), final_value)

    @fragment(role="server")
    def apply_updates(params, opt_state, iteration, fetched, grads):
        learning_rate = learning_rate_at(iteration, config.learning_rate, steps_per_iteration, anneal_over)

        def update(carry, worker):
            params, opt_state = carry
            grads, count, fetched = worker
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = descend(params, updates, learning_rate)
            age = (count - fetched).astype(jnp.float32)
            return (params, opt_state), (params, count + 1, {"grad_norm": optax.tree.norm(grads), "gradient_age": age})

        counts = iteration * num_workers + jnp.arange(num_workers, dtype=jnp.int32)
        (params, opt_state), (worker_params, fetched, stats) = jax.lax.scan(
            update, (params, opt_state), (grads, counts, fetched)
        )
        metrics = jax.tree.map(jnp.mean, stats) | {"learning_rate": learning_rate}
        return params, opt_state, iteration + 1, worker_params, fetched, metrics

    @fragment(role="learner")
    def summarize(iteration, acted_at, stats):
        return jax.tree.map(jnp.mean, stats) | {"parameter_age": (iteration - acted_at).astype(jnp.float32)}

    def iteration(state: A3CState) -> tuple[A3CState, Metrics]:
        acted_at = stamp(state.iteration)
        acted = unroll(state.worker_params, state.actor_keys, state.env_state, state.obs)
        grads, stats = gradients(state.worker_params, acted.trajectory, acted.obs, acted.final_value)
        params, opt_state, count, worker_params, fetched, metrics = apply_updates(
            state.params, state.opt_state, state.iteration, state.fetched, grads
        )
        after = A3CState(
            params, opt_state, count, worker_params, fetched, acted.actor_keys, acted.env_state, acted.obs
        )
        return after, {**metrics, **summarize(state.iteration, acted_at, stats), **acted.episodes}

    axes = A3CState._make([P(), P(), P(), P("env"), P("env"), P("env"), venv.axes, P("env")])
    act = make_choose_action(network, venv.action_space)
    return Agent(init, iteration, act, axes, steps_per_iteration, updates_per_iteration=num_workers, env=venv)


A3C = register(Algorithm("a3c", A3CConfig, build))
