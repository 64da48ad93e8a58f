"""What the off-policy algorithms share: acting into a replay buffer, and updates from it at a declared ratio.

In the shape descriptions, `T` denotes the length of an unroll, `E` the number of environments, `B` the batch size and `K` the
number of updates per iteration. An iteration takes `T` steps of every environment, puts them into the buffer, draws `K`
batches at once and learns from one after another. Priorities that follow from them are written before the next draw.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from msrl_jax.algorithms.base import Agent, Metrics
from msrl_jax.algorithms.loops.acting import stamp
from msrl_jax.algorithms.loops.mixing import Mixture
from msrl_jax.algorithms.loops.optimizer import descend
from msrl_jax.algorithms.networks.recurrent import Memory, forget
from msrl_jax.envs import VectorEnvironment
from msrl_jax.fragments import fragment
from msrl_jax.metrics import Mean
from msrl_jax.replay import Indices, Replay, ReplayState, Transition, importance_weights


class Learner(NamedTuple):
    """What learns; every algorithm decides what the trees are.

    Attributes:
      params: parameters of all networks that are trained.
      target_params: what follows them slowly.
      opt_state: states of the optimizers.
    """

    params: Any
    target_params: Any
    opt_state: Any


class Pending(NamedTuple):
    """TD errors that the buffer has not heard of yet.

    Attributes:
      indices: which windows they are of. shape=(K, B)
      td_error: the errors; nan where there are none. shape=(K, B)
    """

    indices: Indices
    td_error: jax.Array


class Recall(NamedTuple):
    """What actors with a memory take along from step to step.

    Attributes:
      begins: whether the observations to act on next are the first of an episode. shape=(E,), dtype=bool
      memory: what is left of earlier observations; it is cleared where an episode begins. shape=(E, H) each
    """

    begins: jax.Array
    memory: Memory


class RecurrentTransition(NamedTuple):
    """A `Transition`, and the memory with which it was acted.

    Attributes:
      obs: the observation acted on.
      action: the action.
      reward: the reward. shape=()
      terminated: whether the episode ended in a terminal state. shape=(), bool
      truncated: whether the episode was cut short. shape=(), bool
      next_obs: the true successor, before the reset.
      memory: what the actor remembered before it saw `obs`; the initial memory where an episode began. shape=(H,) each
    """

    obs: Any
    action: Any
    reward: Any
    terminated: Any
    truncated: Any
    next_obs: Any
    memory: Any


class OffPolicyState(NamedTuple):
    """All of a run.

    Attributes:
      params: parameters of all networks that are trained.
      target_params: what follows them slowly.
      opt_state: states of the optimizers.
      iteration: iterations done, as the learner counts. shape=(), dtype=int32
      key: the learner's key. shape=()
      clock: iterations done, as the actors count. shape=(), dtype=int32
      actor_keys: one key per environment, which samples actions. shape=(E,)
      env_state: state of the vector environment.
      obs: the observations to act on next. shape=(E, ...)
      replay: state of the buffer.
      replay_key: the buffer's key, which draws. shape=()
      pending: what the buffer is told before the next draw.
      actor: the parameters that act, and how many iterations the learner had done when they were taken; `()` if it is always
        the newest that act.
      recall: what acting remembers; `()` if it needs no memory.
      data: state of the buffer of a data set that batches come from as well; `()` without one.
    """

    params: Any
    target_params: Any
    opt_state: Any
    iteration: jax.Array
    key: jax.Array
    clock: jax.Array
    actor_keys: jax.Array
    env_state: Any
    obs: jax.Array
    replay: ReplayState
    replay_key: jax.Array
    pending: Pending
    actor: tuple[Any, jax.Array] | tuple[()]
    recall: Recall | tuple[()] = ()
    data: ReplayState | tuple[()] = ()


class Batch(NamedTuple):
    """What an update learns from.

    Attributes:
      experience: the buffer's, such as an `NStep`. shape=(B, ...)
      weight: importance weights, 1 without priorities. shape=(B,)
      key: for what the update draws. shape=()
    """

    experience: Any
    weight: jax.Array
    key: jax.Array


Act = Callable[..., Any]
"""`(params, obs [E, ...], keys [E], steps) -> action [E, ...]`: how to explore after `steps` environment steps; with a memory
`(params, obs, keys, steps, memory [E, H]) -> (action, memory)`."""

Update = Callable[[Learner, Batch, jax.Array, jax.Array], tuple[Learner, jax.Array, Mapping[str, jax.Array]]]
"""`(learner, batch, count, ready) -> (learner, TD errors [B], statistics)`: update number `count`; if not `ready`, the batch
means nothing, and the learner must stay what it is (`make_apply_update` and `make_track` see to that)."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a learner does with batches, wherever they come from.

    Attributes:
      init: `(key, obs [..., *observation_shape]) -> Learner`; of observations, shapes matter only.
      update: learns from a batch.
      measure: `(learner, batch) -> statistics`: those that `update` reports, without learning.
      choose_action: `(params, obs [E, ...], key) -> action [E, ...]`, as in batches; the most probable one if `key` is None.
    """

    init: Callable[[jax.Array, jax.Array], Learner]
    update: Update
    measure: Callable[[Learner, Batch], Mapping[str, jax.Array]]
    choose_action: Callable[[Any, jax.Array, jax.Array | None], jax.Array]


def off_policy_agent(
    venv: VectorEnvironment,
    buffer: Replay,
    *,
    init: Callable[[jax.Array, jax.Array], Learner],
    act: Act,
    update: Update,
    choose_action: Callable[..., Any],
    to_env_action: Callable[[jax.Array], jax.Array],
    unroll_length: int,
    num_updates: int,
    batch_size: int,
    beta: Callable[[jax.Array], jax.Array] | None = None,
    actor_period: int = 1,
    report_lost: bool = False,
    mixture: Mixture | None = None,
    initial_memory: Callable[[int], Memory] | None = None,
) -> Agent:
    """Builds an agent that learns from a replay buffer.

    Args:
      venv: the vector environment.
      buffer: the buffer, of items like `Transition`, or like `RecurrentTransition` if there is a memory.
      init: `(key, obs [E, ...]) -> Learner`.
      act: explores.
      update: what the algorithm is; it calls fragments.
      choose_action: `Agent.act` of parameters instead of a state, with actions as `act` makes them.
      to_env_action: turns such actions into those that the environment takes.
      unroll_length: steps of every environment per iteration, `T`.
      num_updates: updates per iteration, `K`.
      batch_size: windows per batch, `B`.
      beta: the exponent of the importance weights after a number of iterations; None for a buffer without priorities.
      actor_period: iterations between two refreshes of the parameters that act.
      report_lost: whether a metric `replay_lost` counts the steps that the buffer's codecs could not hold.
      mixture: what a data set adds to the batches of the buffer, which are smaller by that.
      initial_memory: `Agent.initial_memory`: the memory, zeros, with which an episode begins; None if acting needs none.

    Returns:
      The agent. Its metrics have `parameter_age`, how many iterations old the parameters were that acted, and `replay_size`.
      Statistics are `Mean`s over the updates; there are none until the buffer is ready.
    """
    steps_per_iteration = venv.num_envs * unroll_length

    def init_state(key: jax.Array) -> OffPolicyState:
        params_key, env_key, actor_key, learner_key, replay_key = jax.random.split(key, 5)
        env_state, obs = venv.reset(env_key)
        actor_keys = jax.random.split(actor_key, venv.num_envs)
        nowhere = Indices(jnp.zeros((num_updates, batch_size), jnp.int32), jnp.zeros((num_updates, batch_size), jnp.int32))
        pending = Pending(nowhere, jnp.full((num_updates, batch_size), jnp.nan, jnp.float32))
        learner = init(params_key, obs)
        # A copy: a state in which two leaves are one array cannot be donated.
        actor = (jax.tree.map(jnp.copy, learner.params), jnp.int32(0)) if actor_period > 1 else ()
        recall = ()
        if initial_memory is not None:
            recall = Recall(jnp.ones(venv.num_envs, bool), initial_memory(venv.num_envs))
        return OffPolicyState(
            *learner, jnp.int32(0), learner_key, jnp.int32(0), actor_keys, env_state, obs,
            buffer.init(), replay_key, pending, actor, recall,
        )  # fmt: skip

    @fragment(role="actor")
    def draw_keys(keys, clock):
        keys = jax.vmap(lambda key: jax.random.split(key, unroll_length + 1), out_axes=1)(keys)
        steps = clock * steps_per_iteration + jnp.arange(unroll_length) * venv.num_envs
        return keys[0], keys[1:], steps, clock + 1

    @fragment(role="actor")
    def explore(params, obs, keys, steps, recall):
        if not recall:
            return act(params, obs, keys, steps), (), ()
        memory = forget(*recall)
        action, after = act(params, obs, keys, steps, memory)
        return action, memory, after

    @fragment(role="env")
    def env_step(env_state, action):
        return venv.step(env_state, to_env_action(action))

    drain = fragment(role="env", name="drain")(venv.pop_episodes)

    @fragment(role="buffer")
    def remember(replay, pending, items):
        errors = (pending.indices, pending.td_error)
        return buffer.insert(buffer.update(replay, *(errors if mixture is None else mixture.own(*errors))), items)

    @fragment(role="buffer")
    def draw(replay, key, data):
        key, *keys = jax.random.split(key, num_updates + 1)
        sample = jax.vmap(buffer.sample, (None, 0))(replay, jnp.stack(keys))
        if mixture is not None:
            sample = mixture.add(sample, data, jnp.stack(keys))
        held = {"replay_size": buffer.size(replay)}
        if report_lost:
            held["replay_lost"] = replay.lost.sum()
        return key, sample, buffer.ready(replay), jax.tree.map(jnp.float32, held)

    @fragment(role="learner")
    def learn(learner, iteration, acted_at, key, sample, ready, actor):
        key, *keys = jax.random.split(key, num_updates + 1)
        weight = jnp.ones_like(sample.probability)
        if beta is not None:
            weight = jax.vmap(importance_weights, (0, None))(sample.probability, beta(iteration))
        counts = iteration * num_updates + jnp.arange(num_updates)

        def step(learner, inputs):
            count, batch = inputs
            learner, td_error, stats = update(learner, batch, count, ready)
            return learner, (jnp.where(ready, td_error, jnp.nan), stats)

        batches = Batch(sample.experience, weight, jnp.stack(keys))
        learner, (td_error, stats) = jax.lax.scan(step, learner, (counts, batches))
        # The learner sends indices along with errors: a policy with staleness delays what learners make.
        pending = Pending(sample.indices, td_error)
        done = jnp.where(ready, jnp.float32(num_updates), 0.0)
        means = jax.tree.map(lambda x: Mean(jnp.where(ready, x.sum(), 0.0), done), stats)
        age = (iteration - acted_at).astype(jnp.float32)
        iteration += 1
        if actor_period > 1:
            actor = select(iteration % actor_period == 0, (learner.params, iteration), actor)
        return learner, iteration, key, pending, actor, {**means, "parameter_age": age}

    def iteration(state: OffPolicyState) -> tuple[OffPolicyState, Metrics]:
        def step(carry, inputs):
            env_state, obs, recall = carry
            keys, steps = inputs
            action, memory, after = explore(acting, obs, keys, steps, recall)
            env_state, t = env_step(env_state, action)
            item = Transition(obs, action, t.reward, t.terminated, t.truncated, t.final_obs)
            if recall:
                item, recall = RecurrentTransition(*item, memory), Recall(t.terminated | t.truncated, after)
            return (env_state, t.obs, recall), item

        acting, taken_at = state.actor or (state.params, state.iteration)
        acted_at = stamp(taken_at)
        actor_keys, keys, steps, clock = draw_keys(state.actor_keys, state.clock)
        start = state.env_state, state.obs, state.recall
        (env_state, obs, recall), items = jax.lax.scan(step, start, (keys, steps))
        env_state, episodes = drain(env_state)
        replay = remember(state.replay, state.pending, items)
        replay_key, sample, ready, held = draw(replay, state.replay_key, state.data)
        learner = Learner(state.params, state.target_params, state.opt_state)
        learner, count, key, pending, actor, metrics = learn(
            learner, state.iteration, acted_at, state.key, sample, ready, state.actor
        )
        after = OffPolicyState(
            *learner, count, key, clock, actor_keys, env_state, obs, replay, replay_key, pending, actor, recall, state.data
        )
        return after, {**metrics, **held, **episodes}

    def act_in_env(state: OffPolicyState, obs: jax.Array, key: jax.Array | None, *memory: Memory) -> Any:
        if not memory:
            return to_env_action(choose_action(state.params, obs, key))
        action, after = choose_action(state.params, obs, key, *memory)
        return to_env_action(action), after

    mixed: Any = P() if mixture is None else mixture.buffer.axes
    axes = OffPolicyState._make(
        [*[P()] * 6, P("env"), venv.axes, P("env"), buffer.axes, P(), P(None, "env"), P(), P("env"), mixed]
    )  # fmt: skip
    return Agent(
        init_state, iteration, act_in_env, axes, steps_per_iteration, num_updates, venv,
        initial_memory=initial_memory, env_group=venv.num_envs // buffer.shards,
        data={} if mixture is None else {"data": mixture.state},
    )  # fmt: skip


def make_apply_update(optimizer: optax.GradientTransformation) -> Callable[..., tuple[Any, Any]]:
    """Makes the fragment that takes a step along a gradient, once the buffer is ready.

    Args:
      optimizer: gives directions of descent.

    Returns:
      `(params, opt_state, grads, learning_rate, ready) -> (params, opt_state)`.
    """

    @fragment(role="server")
    def apply_update(params, opt_state, grads, learning_rate, ready):
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        return select(ready, (descend(params, updates, learning_rate), new_opt_state), (params, opt_state))

    return apply_update


def select(condition: jax.Array, new: Any, old: Any) -> Any:
    """The leaves of `new` if the scalar `condition` holds, else those of `old`."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


@fragment(role="server")
def track(target_params: Any, params: Any, rate: jax.Array) -> Any:
    """Moves target parameters towards parameters by a share in [0, 1]: Polyak averaging, or a copy if it is 1."""
    return jax.tree.map(lambda target, p: (1 - rate) * target + rate * p, target_params, params)
