"""What A2C and IMPALA share: acting, then one update along the gradient of all that was seen.

With replay, whole batches are kept, and updates learn from batches drawn uniformly. In the shape descriptions, `T` denotes the
length of an unroll, `E` the number of environments and `K` the number of updates per iteration.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from msrl_jax.algorithms.base import Agent, Metrics
from msrl_jax.algorithms.loops.acting import Trajectory, Unroll, make_choose_action, make_unroll, stamp
from msrl_jax.algorithms.loops.optimizer import descend, learning_rate_at
from msrl_jax.algorithms.networks.actor_critic import ActorCritic
from msrl_jax.envs import VectorEnvironment
from msrl_jax.fragments import fragment
from msrl_jax.replay import fifo

Gradients = Callable[[Any, Trajectory, jax.Array, jax.Array], tuple[Any, Mapping[str, jax.Array]]]
"""`(params, trajectory [T, E, ...], last_obs [E, ...], final_value [T, E]) -> (gradient, statistics)`."""


class SingleUpdateState(NamedTuple):
    """All of a run.

    Attributes:
      params: parameters of the `ActorCritic`.
      opt_state: state of the optimizer.
      iteration: iterations done. shape=(), dtype=int32
      actor_keys: one key per environment, which samples actions. shape=(E,)
      env_state: state of the vector environment.
      obs: the observations to act on next. shape=(E, ...)
      replay: the batches that are kept, a `FifoState`; `()` without replay.
      replay_key: the buffer's key, which draws. shape=(); `()` without replay.
    """

    params: Any
    opt_state: optax.OptState
    iteration: jax.Array
    actor_keys: jax.Array
    env_state: Any
    obs: jax.Array
    replay: Any = ()
    replay_key: Any = ()


class Batch(NamedTuple):
    """What an update learns from.

    Attributes:
      trajectory: what happened. shape=(T, E, ...)
      last_obs: the observations after it. shape=(E, ...)
      final_value: values of the true successors, as `Unroll` has them. shape=(T, E)
      acted_at: the iteration at whose start the parameters that acted were the newest. shape=(), dtype=int32
    """

    trajectory: Trajectory
    last_obs: jax.Array
    final_value: jax.Array
    acted_at: jax.Array


_BATCH_AXES = Batch._make([P(None, "env"), P("env"), P(None, "env"), P()])


def single_update_agent(
    venv: VectorEnvironment,
    network: ActorCritic,
    optimizer: optax.GradientTransformation,
    gradients: Gradients,
    *,
    unroll_length: int,
    learning_rate: float,
    anneal_over: int | None,
    replay_batches: int = 0,
    num_updates: int = 1,
) -> Agent:
    """Builds an agent that makes an update from the unrolls of all environments, or several from batches like this one.

    Args:
      venv: the vector environment.
      network: the network.
      optimizer: gives directions of descent.
      gradients: what the algorithm is; a fragment.
      unroll_length: steps of every environment per iteration, `T`.
      learning_rate: the length of a step, to start from.
      anneal_over: environment steps over which it falls linearly to 0; None for a constant.
      replay_batches: how many batches are kept, the newest included; 0 learns from the newest one without keeping it.
      num_updates: updates per iteration, `K`; with replay each learns from a batch drawn uniformly from those kept.

    Returns:
      The agent. Its metrics have `parameter_age`: how many iterations old the parameters were that acted, the mean over the
      batches learned from.
    """
    unroll = make_unroll(venv, network, unroll_length)
    steps_per_iteration = venv.num_envs * unroll_length

    def begin(key: jax.Array) -> SingleUpdateState:
        params_key, env_key, actor_key = jax.random.split(key, 3)
        env_state, obs = venv.reset(env_key)
        params = network.init(params_key, obs)
        actor_keys = jax.random.split(actor_key, venv.num_envs)
        return SingleUpdateState(params, optimizer.init(params), jnp.int32(0), actor_keys, env_state, obs)

    def act(state: SingleUpdateState) -> tuple[Unroll, Batch]:
        acted_at = stamp(state.iteration)
        acted = unroll(state.params, state.actor_keys, state.env_state, state.obs)
        return acted, Batch(acted.trajectory, acted.obs, acted.final_value, acted_at)

    queue = None
    if replay_batches:
        example = jax.eval_shape(lambda key: act(begin(key))[1], jax.random.key(0))
        queue = fifo(example, capacity=replay_batches, axes=_BATCH_AXES)

    def init(key: jax.Array) -> SingleUpdateState:
        if queue is None:
            return begin(key)
        key, replay_key = jax.random.split(key)
        return begin(key)._replace(replay=queue.init(), replay_key=replay_key)

    @fragment(role="buffer")
    def recall(state, key, batch):
        assert queue is not None
        # A full queue would refuse the batch, so the oldest one gives way.
        full, (popped, _) = queue.size(state) == replay_batches, queue.pop(state)
        first, length = jnp.where(full, popped.first, state.first), jnp.where(full, popped.length, state.length)
        state = queue.insert(state._replace(first=first, length=length), batch)
        key, *keys = jax.random.split(key, num_updates + 1)
        return state, key, jax.vmap(queue.sample, (None, 0))(state, jnp.stack(keys))

    @fragment(role="server")
    def apply_update(params, opt_state, grads, learning_rate):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return descend(params, updates, learning_rate), opt_state, optax.tree.norm(grads)

    @fragment(role="learner")
    def learn(params, opt_state, iteration, batches):
        rate = learning_rate_at(iteration, learning_rate, steps_per_iteration, anneal_over)

        def update(learner, batch):
            grads, stats = gradients(learner[0], batch.trajectory, batch.last_obs, batch.final_value)
            *learner, grad_norm = apply_update(*learner, grads, rate)
            age = (iteration - batch.acted_at).astype(jnp.float32)
            return tuple(learner), {**stats, "grad_norm": grad_norm, "parameter_age": age}

        if queue is None:
            learner, metrics = update((params, opt_state), batches)
        else:
            learner, metrics = jax.lax.scan(update, (params, opt_state), batches)
            metrics = jax.tree.map(lambda x: x.mean(0), metrics)
        return *learner, iteration + 1, {**metrics, "learning_rate": rate}

    def iteration(state: SingleUpdateState) -> tuple[SingleUpdateState, Metrics]:
        acted, batches = act(state)
        held, replay_key = state.replay, state.replay_key
        if queue is not None:
            held, replay_key, batches = recall(held, replay_key, batches)
        params, opt_state, count, metrics = learn(state.params, state.opt_state, state.iteration, batches)
        after = SingleUpdateState(
            params, opt_state, count, acted.actor_keys, acted.env_state, acted.obs, held, replay_key
        )
        return after, {**metrics, **acted.episodes}

    replay_axes = () if queue is None else queue.axes
    axes = SingleUpdateState._make([P(), P(), P(), P("env"), venv.axes, P("env"), replay_axes, P() if queue else ()])
    choose_action = make_choose_action(network, venv.action_space)
    return Agent(init, iteration, choose_action, axes, steps_per_iteration, num_updates, env=venv)
