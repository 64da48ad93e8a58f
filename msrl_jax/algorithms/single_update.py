"""What A2C and IMPALA share: acting, then one gradient of all that was seen, and one update."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from msrl_jax.algorithms.base import Agent, Metrics
from msrl_jax.algorithms.networks import ActorCritic
from msrl_jax.algorithms.optimizer import descend, learning_rate_at
from msrl_jax.algorithms.rollout import Trajectory, make_choose_action, make_unroll, stamp
from msrl_jax.envs import VectorEnvironment
from msrl_jax.fragments import fragment

Gradients = Callable[[Any, Trajectory, jax.Array, jax.Array], tuple[Any, Mapping[str, jax.Array]]]
"""`(params, trajectory [T, E, ...], last_obs [E, ...], final_value [T, E]) -> (gradient, statistics)`."""


class SingleUpdateState(NamedTuple):
    """All of a run.

    Attributes:
      params: parameters of the `ActorCritic`.
      opt_state: state of the optimiser.
      iteration: iterations done. shape=(), dtype=int32
      actor_keys: one key per environment, which samples actions. shape=(E,)
      env_state: state of the vector environment.
      obs: the observations to act on next. shape=(E, ...)
    """

    params: Any
    opt_state: optax.OptState
    iteration: jax.Array
    actor_keys: jax.Array
    env_state: Any
    obs: jax.Array


def single_update_agent(
    venv: VectorEnvironment,
    network: ActorCritic,
    optimizer: optax.GradientTransformation,
    gradients: Gradients,
    *,
    unroll_length: int,
    learning_rate: float,
    anneal_over: int | None,
) -> Agent:
    """Builds an agent that makes one update per iteration, from the unrolls of all environments.

    Args:
      venv: the vector environment.
      network: the network.
      optimizer: gives directions of descent.
      gradients: what the algorithm is; a fragment.
      unroll_length: steps of every environment per iteration, `T`.
      learning_rate: the length of a step, to start from.
      anneal_over: environment steps over which it falls linearly to 0; None for a constant.

    Returns:
      The agent. Its metrics have `parameter_age`: how many iterations old the parameters were that acted.
    """
    unroll = make_unroll(venv, network, unroll_length)
    steps_per_iteration = venv.num_envs * unroll_length

    def init(key: jax.Array) -> SingleUpdateState:
        params_key, env_key, actor_key = jax.random.split(key, 3)
        env_state, obs = venv.reset(env_key)
        params = network.init(params_key, obs)
        actor_keys = jax.random.split(actor_key, venv.num_envs)
        return SingleUpdateState(params, optimizer.init(params), jnp.int32(0), actor_keys, env_state, obs)

    @fragment(role="server")
    def apply_update(params, opt_state, grads, learning_rate):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return descend(params, updates, learning_rate), opt_state, optax.tree.norm(grads)

    @fragment(role="learner")
    def learn(params, opt_state, iteration, acted_at, trajectory, last_obs, final_value):
        rate = learning_rate_at(iteration, learning_rate, steps_per_iteration, anneal_over)
        grads, stats = gradients(params, trajectory, last_obs, final_value)
        params, opt_state, grad_norm = apply_update(params, opt_state, grads, rate)
        age = (iteration - acted_at).astype(jnp.float32)
        metrics = {"grad_norm": grad_norm, "learning_rate": rate, "parameter_age": age}
        return params, opt_state, iteration + 1, {**stats, **metrics}

    def iteration(state: SingleUpdateState) -> tuple[SingleUpdateState, Metrics]:
        acted_at = stamp(state.iteration)
        acted = unroll(state.params, state.actor_keys, state.env_state, state.obs)
        params, opt_state, count, metrics = learn(
            state.params, state.opt_state, state.iteration, acted_at, acted.trajectory, acted.obs, acted.final_value
        )
        after = SingleUpdateState(params, opt_state, count, acted.actor_keys, acted.env_state, acted.obs)
        return after, {**metrics, **acted.episodes}

    axes = SingleUpdateState._make([P(), P(), P(), P("env"), venv.axes, P("env")])
    act = make_choose_action(network, venv.action_space)
    return Agent(init, iteration, act, axes, steps_per_iteration, updates_per_iteration=1, env=venv)
