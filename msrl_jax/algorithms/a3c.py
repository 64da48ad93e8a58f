"""Asynchronous advantage actor-critic (A3C; Mnih et al., 2016, arXiv 1602.01783), with a fixed order of events.

Each of `W` workers owns `E / W` neighboring environments and a copy of the parameters. In every iteration

1. each worker unrolls `T` steps with its own copy, and computes one gradient with that same copy;
2. the server applies the gradients of workers 0, 1, ..., `W - 1`, one after another, each to the newest parameters;
3. a worker fetches the new parameters as soon as the server has applied its gradient.

As a result, the server applies `W - 1` updates of other workers between a worker's fetch and that worker's next update,
except before the first update. This is A3C with equally fast workers, and it is reproducible. The staleness of a
distribution policy delays the acting parameters further; gradients are still computed at the worker's own copy. In the
shape descriptions, `T` is `unroll_length` and `E` is `num_envs`.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from msrl_jax.agents.agent import Agent, Metrics, Progress, learning_rate_at, learning_rate_metric, logical_axes, split_keys
from msrl_jax.agents.optimizers import make_optimizer
from msrl_jax.agents.vector_env import make_vector_env
from msrl_jax.algorithms.a2c import advantage_loss
from msrl_jax.configs.config import ALL_ACTIONS, Activation, NetworkKind, OptimizerKind, Tunable, config, field, tunable
from msrl_jax.envs import Environment
from msrl_jax.envs.actions import action_transform
from msrl_jax.envs.privileged import actor_obs
from msrl_jax.fragments import fragment
from msrl_jax.kernels.networks import global_norm
from msrl_jax.loops.trajectory import Trajectory
from msrl_jax.networks.actor_critic import acting_functions, actor_critic, final_value_inputs, values
from msrl_jax.networks.core import CoreKind
from msrl_jax.networks.unrolls import Carry, reset_carry


class A3CState(NamedTuple):
    """The state of a run."""

    params: Any  # parameters of the server
    opt_state: optax.OptState  # of the server's optimizer, which all workers share
    worker_params: Any  # the parameters that each worker fetched last, [W, ...]
    fetched: jax.Array  # update count of the server at each worker's last fetch, modulo 2**32, uint32 [W]
    actor_keys: jax.Array  # keys for sampling actions, one per environment, [E]
    env_state: Any
    obs: jax.Array  # for the next actions, [E, ...]
    carry: Carry = ()  # the recurrent state of the actors, [E, ...] each


@config("a3c", privileged=True, actions=ALL_ACTIONS)
class A3C:
    """Asynchronous advantage actor-critic; for any observations, and actions that are discrete, integers or floats."""

    num_envs: int = field(default=64, doc="environments in parallel, `E`, a multiple of `num_workers`. Usual: 8 to 4096.")
    unroll_length: int = field(default=16, doc="steps of every environment per iteration, `T`. Usual: 5 to 32.")
    discount: Tunable = tunable(default=0.99, low=0, high=1, doc="discount factor per step. Usual: 0.99.")
    normalize_observations: bool = field(default=False, doc="standardize by running statistics. Usual: True for locomotion.")
    normalize_rewards: bool = field(default=False, doc="divide by the return's running deviation. Usual: True for locomotion.")
    entropy_coef: Tunable = tunable(default=0.001, low=0, doc="weight of the entropy bonus. Usual: 0 to 0.01.")
    value_coef: Tunable = tunable(default=0.5, low=0, doc="weight of the value loss, half the squared error. Usual: 0.5 to 1.")
    gae_lambda: Tunable = tunable(
        default=0.95, low=0, high=1, doc="lambda: 0 bias, 1 variance (the paper's). Usual: 1, or 0.95."
    )
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
    num_workers: int = field(default=8, doc="workers, `W`, each with its own parameters; at most `W` devices. Usual: 8 to 16.")
    normalize_advantage: Literal["worker", "none"] = field(default="none", doc='how to standardize advantages. Usual: "none".')

    def check(self) -> None:
        """Raises ValueError unless `num_workers` divides `num_envs`."""
        if self.num_envs % self.num_workers:
            above = -(-self.num_envs // self.num_workers) * self.num_workers
            raise ValueError(
                f"{type(self).__name__}.num_envs={self.num_envs} cannot be split between num_workers={self.num_workers}; use "
                f"num_envs={above}, or a num_workers that divides it"
            )

    def build(self, env: Environment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space or a size does not fit."""
        venv = make_vector_env(env, self)
        network = actor_critic(self, venv.observation_space, venv.action_space)
        optimizer = make_optimizer(self, epsilon=self.epsilon, rms_decay=self.rms_decay)
        num_workers = self.num_workers
        to_env_action = action_transform(venv.action_space)

        def init(key: jax.Array) -> A3CState:
            params_key, env_key, actor_key = jax.random.split(key, 3)
            env_state, obs = venv.reset(env_key)
            params = network.init(params_key)
            return A3CState(
                params,
                optimizer.init(params),
                jax.tree.map(lambda x: jnp.broadcast_to(x, (num_workers, *x.shape)), params),
                jnp.zeros(num_workers, jnp.uint32),
                jax.random.split(actor_key, self.num_envs),
                env_state,
                obs,
                network.initial_carry((self.num_envs,)),
            )

        axes = logical_axes(
            A3CState,
            params=P(),
            opt_state=P(),
            worker_params=P("worker"),
            fetched=P("worker"),
            actor_keys=P("env"),
            env_state=venv.axes,
            obs=P("env"),
            carry=P("env"),
        )

        def by_worker(tree: Any, axis: int = 0) -> Any:
            """Splits the dimension `axis` by worker: `[..., W * n, ...]` becomes `[..., W, n, ...]`."""
            return jax.tree.map(lambda x: x.reshape(*x.shape[:axis], num_workers, -1, *x.shape[axis + 1 :]), tree)

        def merge(x: jax.Array) -> jax.Array:
            """Merges `[W, n, ...]` into `[W * n, ...]`."""
            return x.reshape(-1, *x.shape[2:])

        def of_workers(function: Callable[..., Any]) -> Callable[..., Any]:
            """Maps a function of parameters and arrays `[E, ...]` over workers, each with its own parameters."""
            return lambda params, *inputs: jax.tree.map(merge, jax.vmap(function)(params, *by_worker(inputs)))

        value_input = network.value_input and of_workers(network.value_input)
        workers = network._replace(act=of_workers(network.act), value_input=value_input, value=of_workers(network.value))

        @fragment(role="actor")
        def act(params, obs, is_first, carry, keys):
            policy, _, carry = workers.act(params, obs, reset_carry(is_first, carry))
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
            return final_value_inputs(workers, params, final_obs, carries, truncated)

        @fragment(role="learner")
        def gradients(worker_params, trajectory, final_obs, last_value_inputs, carry):
            bootstrap_value = values(workers, worker_params, final_obs, last_value_inputs)
            trajectory, bootstrap_value = by_worker((trajectory, bootstrap_value), axis=1)
            loss = functools.partial(advantage_loss, self, network)
            gradient = jax.vmap(jax.grad(loss, has_aux=True), in_axes=(0, 1, 1, 0))
            return gradient(worker_params, trajectory, bootstrap_value, by_worker(carry))

        @fragment(role="server")
        def apply_updates(params, opt_state, progress, fetched, grads):
            learning_rate = learning_rate_at(self, progress)

            def update(carry, worker):
                params, opt_state = carry
                grads, count, fetched = worker
                updates, opt_state = optimizer.update(grads, opt_state, params, learning_rate=learning_rate)
                params = optax.apply_updates(params, updates)
                age = (count - fetched).astype(jnp.int32).astype(jnp.float32)
                return (params, opt_state), (params, count + 1, {"grad_norm": global_norm(grads), "gradient_age": age})

            counts = progress.iteration.low * num_workers + jnp.arange(num_workers, dtype=jnp.uint32)
            (params, opt_state), (worker_params, fetched, stats) = jax.lax.scan(
                update, (params, opt_state), (grads, counts, fetched)
            )
            metrics = jax.tree.map(jnp.mean, stats) | learning_rate_metric(learning_rate)
            return params, opt_state, worker_params, fetched, metrics

        @fragment(role="learner")
        def summarize(stats):
            return jax.tree.map(jnp.mean, stats)

        def iteration(state: A3CState, progress: Progress) -> tuple[A3CState, Metrics]:
            def step(loop_state, keys):
                env_state, obs, is_first, carry = loop_state
                action, log_prob, carry = act(state.worker_params, actor_obs(obs), is_first, carry, keys)
                env_state, t = env_step(env_state, action)
                experience = Trajectory(obs, action, log_prob, t.reward, t.terminated, t.truncated, t.valid)
                return (env_state, t.obs, t.terminated | t.truncated, carry), (experience, t.final_obs, carry)

            actor_keys, keys = split_keys(state.actor_keys, self.unroll_length)
            start = state.env_state, state.obs, jnp.zeros(self.num_envs, bool), state.carry
            (env_state, obs, is_first, carry), (trajectory, final_obs, carries) = jax.lax.scan(step, start, keys)
            last_value_inputs = bootstrap(state.worker_params, actor_obs(final_obs), carries, trajectory.truncated)
            env_state, episodes = pop_episodes(env_state)
            grads, stats = gradients(state.worker_params, trajectory, final_obs, last_value_inputs, state.carry)
            params, opt_state, worker_params, fetched, metrics = apply_updates(
                state.params, state.opt_state, progress, state.fetched, grads
            )
            carry = reset_carry(is_first, carry)
            new_state = A3CState(params, opt_state, worker_params, fetched, actor_keys, env_state, obs, carry)
            return new_state, {**metrics, **summarize(stats), **episodes}

        acting = acting_functions(network, venv.action_space)
        return Agent(
            init=init,
            iteration=iteration,
            axes=axes,
            steps_per_iteration=self.num_envs * self.unroll_length,
            updates_per_iteration=num_workers,
            env=venv,
            act=acting.act,
            initial_carry=acting.initial_carry,
            probabilities=acting.probabilities,
        )
