"""The loop of the off-policy algorithms: act, store steps in a replay buffer, learn from batches.

In the shape descriptions, `T` denotes the length of an unroll, `E` the number of environments, `B` the batch size and `K` the
number of updates per iteration. An iteration

1. takes `T` steps of every environment with the acting parameters,
2. updates the priorities in the buffer with the TD errors of the iteration before, then inserts the steps,
3. draws `K` batches at once,
4. learns from the batches one after another,
5. refreshes the acting parameters every `refresh_period` iterations.

An algorithm defines its `Rule` (what it learns) and its `Explore` function in its own file. The buffer handles data sets,
priorities and importance weights. A network without a recurrent state acts with the empty carry `()`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from msrl_jax.algorithms.agent import Agent, Metrics, Progress, logical_axes
from msrl_jax.algorithms.loops.updates import select
from msrl_jax.algorithms.networks.layers import Carry, forget
from msrl_jax.envs import Box, Discrete, Space, VectorEnvironment
from msrl_jax.envs.actions import action_transform
from msrl_jax.envs.masks import mask_of, sample_legal
from msrl_jax.envs.spaces import is_integers, num_values
from msrl_jax.fragments import fragment
from msrl_jax.fragments.counters import Counter, advance, at_least, counter, fraction, remainder
from msrl_jax.fragments.metrics import Mean
from msrl_jax.fragments.progress import parameter_age, parameter_version
from msrl_jax.replay import SHARD_AXIS, Indices, Replay, ReplayState, Transition


class Learner(NamedTuple):
    """The part of the state that an update changes; every algorithm decides the structure of the trees.

    Attributes:
      params: parameters of all trained networks.
      target_params: parameters of the target networks.
      opt_state: states of the optimizers.
    """

    params: Any
    target_params: Any
    opt_state: Any


class Batch(NamedTuple):
    """The data of one update.

    Attributes:
      experience: items of the buffer, such as an `NStep`. shape=(B, ...)
      weight: importance weights, 1 without priorities. shape=(B,)
      key: key for the randomness of the update. shape=()
      update: the number of the update from 0 on; those before the buffer was ready count too. shape=()
      ready: whether the buffer holds enough steps; if not, the batch has no meaning. shape=(), dtype=bool
    """

    experience: Any
    weight: jax.Array
    key: jax.Array
    update: Counter
    ready: jax.Array


@dataclasses.dataclass(frozen=True)
class Rule:
    """What an algorithm learns from a batch.

    Attributes:
      init: `(key, obs [..., *observation_shape]) -> Learner`; only the shapes of observations matter.
      update: `(learner, batch, progress) -> (learner, TD errors [B], statistics)`. If the batch is not `ready`, the learner
        must not change: give `batch.ready` to the fragment of `make_apply_update`, and a share of 0 to `polyak_update`.
      choose_action: `(params, obs [E, ...], key, carry) -> (action [E, ...], carry)`, with actions before `action_transform`;
        the best or most probable one if `key` is None.
      initial_carry: `num_envs -> carry`, zeros; None if networks have no recurrent state, and the carry is `()`.
    """

    init: Callable[[jax.Array, jax.Array], Learner]
    update: Callable[[Learner, Batch, Progress], tuple[Learner, jax.Array, Mapping[str, jax.Array]]]
    choose_action: Callable[[Any, Any, jax.Array | None, Carry], tuple[jax.Array, Carry]]
    initial_carry: Callable[[int], Carry] | None = None


Explore = Callable[[Any, Any, jax.Array, Counter, Carry], tuple[jax.Array, Carry]]
"""`(params, obs [E, ...], keys [E], steps, carry) -> (action [E, ...], carry)`: acts after `steps` environment steps."""


class Pending(NamedTuple):
    """TD errors for the next update of the buffer's priorities.

    Attributes:
      indices: the windows in the buffer. shape=(K, B)
      td_error: their errors; nan where there are none. shape=(K, B)
    """

    indices: Indices
    td_error: jax.Array


class OffPolicyState(NamedTuple):
    """The state of a run, or of a team of agents, which keeps no environments.

    Attributes:
      params: parameters of all trained networks.
      target_params: parameters of the target networks.
      opt_state: states of the optimizers.
      key: the learner's key. shape=()
      acting_params: the acting parameters, and the iterations done at their last refresh; `()` if the newest parameters act.
      actor_keys: one key per environment, which samples actions. shape=(E,)
      replay: state of the buffer.
      replay_key: the buffer's key, for draws. shape=()
      pending: TD errors for the buffer.
      data: `Replay.data` of a buffer that mixes in a data set; `()` without one.
      carry: the recurrent state of the actors, zeros at the start of an episode; `()` without one. shape=(E, ...)
      env_state: state of the vector environment.
      obs: the observations for the next actions. shape=(E, ...)
    """

    params: Any
    target_params: Any
    opt_state: Any
    key: jax.Array
    acting_params: tuple[Any, Counter] | tuple[()]
    actor_keys: jax.Array
    replay: ReplayState
    replay_key: jax.Array
    pending: Pending
    data: Any = ()
    carry: Carry = ()
    env_state: Any = ()
    obs: Any = ()


class Replaying(NamedTuple):
    """What an off-policy algorithm does besides stepping environments, as functions that call fragments.

    Attributes:
      init: `(params_key, actor_key, learner_key, replay_key, obs [..., *observation_shape]) -> state`, without environments.
      begin: `(state, progress) -> (acting_params, state, (keys [T, E], steps [T]))`, as `Explore` takes them one by one.
      finish: `(state, items [T, E, ...], progress) -> (state, metrics)`: stores the steps, and learns.
      axes: logical axes of the state but for the fields of the environments, by name.
    """

    init: Callable[..., OffPolicyState]
    begin: Callable[[OffPolicyState, Progress], tuple[Any, OffPolicyState, tuple[jax.Array, Counter]]]
    finish: Callable[[OffPolicyState, Transition, Progress], tuple[OffPolicyState, Metrics]]
    axes: Mapping[str, Any]


def replaying(
    buffer: Replay, rule: Rule, *, num_envs: int, unroll_length: int, num_updates: int, refresh_period: int = 1
) -> Replaying:
    """Builds what `off_policy_agent` does besides stepping environments; the arguments and metrics are the same."""

    def init(
        params_key: jax.Array, actor_key: jax.Array, learner_key: jax.Array, replay_key: jax.Array, obs: Any
    ) -> OffPolicyState:
        learner = rule.init(params_key, obs)
        nowhere = Indices(*jnp.zeros((2, num_updates, buffer.batch_size), jnp.int32))
        nothing = jnp.full((num_updates, buffer.batch_size), jnp.nan, jnp.float32)
        return OffPolicyState(
            *learner,
            key=learner_key,
            # A copy: a state in which two leaves are one array cannot be donated.
            acting_params=(jax.tree.map(jnp.copy, learner.params), counter()) if refresh_period > 1 else (),
            actor_keys=jax.random.split(actor_key, num_envs),
            replay=buffer.init(),
            replay_key=replay_key,
            pending=Pending(nowhere, nothing),
        )

    @fragment(role="actor")
    def draw_keys(keys, progress):
        keys = jax.vmap(lambda key: jax.random.split(key, unroll_length + 1), out_axes=1)(keys)
        steps = advance(progress.times(num_envs * unroll_length), jnp.arange(unroll_length) * num_envs)
        return keys[0], keys[1:], steps

    @fragment(role="buffer")
    def insert(replay, pending, items):
        return buffer.insert(buffer.update(replay, pending.indices, pending.td_error), items)

    @fragment(role="buffer")
    def sample_batches(replay, key, data, progress):
        key, *keys = jax.random.split(key, num_updates + 1)
        sample = jax.vmap(lambda key: buffer.sample(replay, key, data, progress.fraction))(jnp.stack(keys))
        return key, sample, buffer.ready(replay), buffer.report(replay)

    @fragment(role="learner")
    def learn(learner, progress, key, sample, ready):
        key, *keys = jax.random.split(key, num_updates + 1)

        def step(learner, inputs):
            batch = Batch(*inputs, ready=ready)
            learner, td_error, stats = rule.update(learner, batch, progress)
            if buffer.may_be_absent:  # nothing is to be learned from these windows
                td_error = jnp.where(batch.weight > 0, td_error, 0.0)
            return learner, (jnp.where(ready, td_error, jnp.nan), stats)

        numbers = advance(progress.times(num_updates), jnp.arange(num_updates))
        inputs = sample.experience, sample.weight, jnp.stack(keys), numbers
        learner, (td_error, stats) = jax.lax.scan(step, learner, inputs)
        done = jnp.where(ready, jnp.float32(num_updates), 0.0)
        means = jax.tree.map(lambda x: Mean(jnp.where(ready, x.sum(), 0.0), done), stats)
        # The learner returns the indices too: a policy with staleness delays a learner's outputs, so they stay with their
        # errors.
        return learner, key, Pending(sample.indices, td_error), dict(means)

    @fragment(role="learner")
    def refresh(acting_params, params, progress, version):
        count = advance(progress.iteration)
        age = parameter_age(progress.iteration, version)
        return select(remainder(count, refresh_period) == 0, (params, count), acting_params), {"parameter_age": age}

    def begin(state: OffPolicyState, progress: Progress) -> tuple[Any, OffPolicyState, tuple[jax.Array, Counter]]:
        actor_keys, keys, steps = draw_keys(state.actor_keys, progress)
        acting_params = state.acting_params[0] if state.acting_params else state.params
        return acting_params, state._replace(actor_keys=actor_keys), (keys, steps)

    def finish(state: OffPolicyState, items: Transition, progress: Progress) -> tuple[OffPolicyState, Metrics]:
        replay = insert(state.replay, state.pending, items)
        replay_key, sample, ready, report = sample_batches(replay, state.replay_key, state.data, progress)
        learner = Learner(state.params, state.target_params, state.opt_state)
        learner, key, pending, metrics = learn(learner, progress, state.key, sample, ready)
        acting_params, age = state.acting_params, {}
        if acting_params:
            version = parameter_version(acting_params[1].low)
            acting_params, age = refresh(acting_params, learner.params, progress, version)
        after = state._replace(
            **learner._asdict(),
            key=key,
            acting_params=acting_params,
            replay=replay,
            replay_key=replay_key,
            pending=pending,
        )
        return after, {**metrics, **age, **report}

    axes = {
        **dict.fromkeys((*Learner._fields, "key", "acting_params", "replay_key"), P()),
        "actor_keys": P("env"),
        "replay": buffer.axes,
        "pending": P(None, SHARD_AXIS),
        "data": buffer.data_axes,
    }
    return Replaying(init, begin, finish, axes)


def off_policy_agent(
    venv: VectorEnvironment,
    buffer: Replay,
    rule: Rule,
    explore: Explore,
    *,
    unroll_length: int,
    num_updates: int,
    refresh_period: int = 1,
) -> Agent:
    """Builds an agent that learns from a replay buffer.

    Args:
      venv: the vector environment.
      buffer: the buffer, of items like `Transition`.
      rule: what the agent learns from a batch.
      explore: chooses actions in training.
      unroll_length: steps of every environment per iteration, `T`.
      num_updates: updates per iteration, `K`.
      refresh_period: iterations between two refreshes of the acting parameters.

    Returns:
      The agent. Its metrics are the statistics of the rule, as `Mean`s over the updates (without samples until the buffer is
      ready), the report of the buffer, and with a `refresh_period` above 1 the age of the acting parameters.
    """
    num_envs, to_env_action = venv.num_envs, action_transform(venv.action_space)
    sizes = {"num_envs": num_envs, "unroll_length": unroll_length, "num_updates": num_updates}
    replayer = replaying(buffer, rule, **sizes, refresh_period=refresh_period)

    def init(key: jax.Array) -> OffPolicyState:
        params_key, env_key, actor_key, learner_key, replay_key = jax.random.split(key, 5)
        env_state, obs = venv.reset(env_key)
        begun = replayer.init(params_key, actor_key, learner_key, replay_key, obs)
        carry = rule.initial_carry(num_envs) if rule.initial_carry else ()
        return begun._replace(carry=carry, env_state=env_state, obs=obs)

    act: Any = fragment(role="actor", name="explore")(explore)

    @fragment(role="env")
    def env_step(env_state, action):
        return venv.step(env_state, to_env_action(action))

    pop_episodes = fragment(role="env", name="pop_episodes")(venv.pop_episodes)

    def iteration(state: OffPolicyState, progress: Progress) -> tuple[OffPolicyState, Metrics]:
        acting_params, begun, keys = replayer.begin(state, progress)

        def step(loop, inputs):
            env_state, obs, carry = loop
            action, next_carry = act(acting_params, obs, *inputs, carry)
            env_state, t = env_step(env_state, action)
            item = Transition(obs, action, t.reward, t.terminated, t.truncated, t.final_obs, carry, t.present)
            return (env_state, t.obs, forget(t.terminated | t.truncated, next_carry)), item

        (env_state, obs, carry), items = jax.lax.scan(step, (state.env_state, state.obs, state.carry), keys)
        env_state, episodes = pop_episodes(env_state)
        done, metrics = replayer.finish(begun, items, progress)
        return done._replace(carry=carry, env_state=env_state, obs=obs), {**metrics, **episodes}

    def act_in_env(state: OffPolicyState, obs: jax.Array, key: jax.Array | None, carry: Carry = ()) -> Any:
        action, carry = rule.choose_action(state.params, obs, key, carry)
        return (to_env_action(action), carry) if rule.initial_carry else to_env_action(action)

    return Agent(
        init=init,
        iteration=iteration,
        act=act_in_env,
        axes=logical_axes(OffPolicyState, **replayer.axes, carry=P("env"), env_state=venv.axes, obs=P("env")),
        steps_per_iteration=num_envs * unroll_length,
        updates_per_iteration=num_updates,
        env=venv,
        initial_carry=rule.initial_carry,
        data={"data": buffer.data} if buffer.data else {},
    )


def epsilon_greedy(config: Any, *, num_envs: int, num_actions: int, random_steps: int) -> Callable[..., jax.Array]:
    """Makes a function that replaces actions by random ones with probability epsilon (per environment: arXiv 1803.00933).

    Args:
      config: the schedule of epsilon: `exploration`, `exploration_steps`, `final_epsilon` and `base_epsilon`.
      num_envs: number of environments, `E`.
      num_actions: number of actions.
      random_steps: number of environment steps at the start of the run with random actions only.

    Returns:
      `(greedy actions [E] int32, keys [E], environment steps taken, obs=None) -> actions [E] int32`; with `MaskedObservation`s,
      random actions are legal.
    """
    rank = jnp.arange(num_envs) / max(num_envs - 1, 1)
    by_env = config.base_epsilon ** (1 + 7 * rank)
    # A schedule over the fraction of `exploration_steps` that is done: the fraction cannot overflow, a step count could.
    annealed = optax.linear_schedule(1.0, config.final_epsilon, transition_steps=1)

    def epsilon(steps: Counter) -> jax.Array:
        """The probabilities of random actions. `[]` or `[E]`"""
        if config.exploration == "per_env":
            return by_env
        return jnp.asarray(annealed(fraction(steps, 1, config.exploration_steps)))

    def explore(greedy: jax.Array, keys: jax.Array, steps: Counter, obs: Any = None) -> jax.Array:
        whether, which = jax.vmap(lambda key: jax.random.split(key), out_axes=1)(keys)
        probability = jnp.where(at_least(steps, random_steps), epsilon(steps), 1.0)
        at_random = jax.vmap(jax.random.uniform)(whether) < probability
        return jnp.where(at_random, uniform_actions(which, Discrete(num_actions), obs), greedy)

    return explore


def uniform_actions(keys: jax.Array, space: Space, obs: Any = None) -> jax.Array:
    """Draws uniform actions of a policy, before `action_transform`.

    Args:
      keys: one per action. `[E]`
      space: a `Box`, or `Discrete`.
      obs: the observations acted on; with `MaskedObservation`s, actions are legal. `[E, ...]`

    Returns:
      Continuous actions in [-1, 1] `[E, D]`, discrete ones `[E]` int32, or integers counted from 0 `[E, K]` int32.
    """
    if (mask := mask_of(obs)) is not None:
        return jax.vmap(sample_legal)(keys, mask)
    if isinstance(space, Discrete):
        return jax.vmap(lambda key: jax.random.randint(key, (), 0, space.n))(keys)
    assert isinstance(space, Box)
    if is_integers(space):
        sizes = jnp.array(num_values(space))
        return jax.vmap(lambda key: jax.random.randint(key, sizes.shape, 0, sizes))(keys)
    size = math.prod(space.shape)
    return jax.vmap(lambda key: jax.random.uniform(key, (size,), minval=-1.0, maxval=1.0))(keys)
