"""The loop of the off-policy algorithms: act, store steps in a replay buffer, learn from batches.

In the shape descriptions, `T` denotes the length of an unroll, `E` the number of environments, `B` the batch size and `K` the
number of updates per iteration. An iteration

1. takes `T` steps of every environment with the acting parameters,
2. updates the priorities in the buffer with the TD errors of the iteration before, then inserts the steps,
3. draws `K` batches at once,
4. learns from the batches one after another,
5. refreshes the acting parameters every `actor_period` iterations.

An algorithm defines its `Rule` (what it learns) and its `Explore` function. The buffer handles data sets,
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

from msrl_jax.algorithms.agent import Agent, Metrics, Progress, logical_axes, step_size
from msrl_jax.algorithms.networks.layers import Carry, forget
from msrl_jax.algorithms.options import Annealed, PerEnv
from msrl_jax.envs import Box, Discrete, Space, VectorEnvironment
from msrl_jax.envs.actions import action_transform
from msrl_jax.envs.masks import mask_of, sample_legal
from msrl_jax.envs.privileged import actor_part
from msrl_jax.envs.spaces import is_integers, num_values
from msrl_jax.fragments import fragment
from msrl_jax.fragments.counters import Counter, advance, at_least, counter, remainder
from msrl_jax.fragments.metrics import Mean
from msrl_jax.fragments.progress import parameter_age, parameter_version
from msrl_jax.replay import SHARD_AXIS, Indices, Replay, ReplayState, Transition


class Learner(NamedTuple):
    """The part of the state that an update changes; every algorithm decides the structure of the trees."""

    params: Any  # of all trained networks
    target_params: Any
    opt_state: Any


class Batch(NamedTuple):
    """The data of one update."""

    experience: Any  # items of the buffer, such as an `NStep`, [B, ...]
    weight: jax.Array  # importance weights, 1 without priorities, [B]
    key: jax.Array  # for the randomness of the update
    update: Counter  # the number of the update from 0 on; those before the buffer was ready count too
    ready: jax.Array  # whether the buffer holds enough steps; if not, the batch has no meaning; bool []


Update = Callable[[Learner, Batch, Progress], tuple[Learner, jax.Array, Mapping[str, jax.Array]]]
"""`(learner, batch, progress) -> (learner, TD errors [B], statistics)`; it changes nothing if the batch is not `ready`."""
ChooseAction = Callable[[Any, Any, jax.Array | None, Carry], tuple[jax.Array, Carry]]
"""`(params, obs [E, ...], key, carry) -> (action [E, ...], carry)` outside of training, before `action_transform`; the best or
most probable action if `key` is None."""
Explore = Callable[[Any, Any, jax.Array, Counter, Carry], tuple[jax.Array, Carry]]
"""`(params, obs [E, ...], keys [E], steps, carry) -> (action [E, ...], carry)`: acts after `steps` environment steps."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """What an algorithm learns from a batch, and how it acts."""

    init: Callable[[jax.Array, Any], Learner]  # (key, obs [..., *observation_shape]); only the shapes of observations matter
    update: Update
    choose_action: ChooseAction
    initial_carry: Callable[[int], Carry] = lambda num_envs: ()  # zeros


def updater(optimizer: optax.GradientTransformationExtraArgs) -> Callable[..., tuple[Any, Any]]:
    """Makes the fragment that applies a gradient if a buffer is ready: `(..., learning_rate, ready) -> (params, opt_state)`."""

    @fragment(role="server")
    def apply_update(params, opt_state, grads, learning_rate, ready):
        updates, new_opt_state = optimizer.update(grads, opt_state, params, learning_rate=learning_rate)
        return select(ready, (optax.apply_updates(params, updates), new_opt_state), (params, opt_state))

    return apply_update


@fragment(role="server")
def polyak_update(target_params: Any, params: Any, share: jax.Array) -> Any:
    """Moves target parameters towards parameters by a share in [0, 1]: Polyak averaging, or a copy if it is 1."""
    return optax.incremental_update(params, target_params, share)


def select(condition: jax.Array, new: Any, old: Any) -> Any:
    """The leaves of `new` if the scalar `condition` holds, else those of `old`."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def gradient_rule(
    config: Any,
    optimizer: optax.GradientTransformationExtraArgs,
    init: Callable[[jax.Array, Any], Any],
    gradients: Callable[[Any, Any, Batch], tuple[Any, tuple[Any, ...]]],
    choose_action: ChooseAction,
    *,
    target: Callable[[Any], Any] | None = lambda params: params,
    initial_carry: Callable[[int], Carry] = lambda num_envs: (),
) -> Rule:
    """The rule that descends along gradients, and moves target parameters by `config.tau`, every `target_period` updates.

    `init` is `(key, obs) -> params`, and `gradients` is `(params, target_params, batch) -> (gradients, (TD errors [B],
    statistics))`, or with a third after these, what target parameters move towards. If there is none, that is what `target`
    selects of the new parameters; None if nothing has a target network.
    """
    apply_update, period = updater(optimizer), getattr(config, "target_period", 1)

    def begin(key: jax.Array, obs: Any) -> Learner:
        params = init(key, obs)
        # A copy: a state in which two leaves are one array cannot be donated.
        return Learner(params, jax.tree.map(jnp.copy, target(params)) if target else (), optimizer.init(params))

    def update(learner: Learner, batch: Batch, progress: Progress) -> tuple[Learner, jax.Array, Mapping[str, jax.Array]]:
        grads, (td_error, stats, *towards) = gradients(learner.params, learner.target_params, batch)
        rate = step_size(config, progress)
        params, opt_state = apply_update(learner.params, learner.opt_state, grads, rate, batch.ready)
        target_params = ()
        if target:
            moves = batch.ready & (remainder(advance(batch.update), period) == 0) if period > 1 else batch.ready
            towards = towards[0] if towards else target(params)
            target_params = polyak_update(learner.target_params, towards, jnp.where(moves, config.tau, 0.0))
        return Learner(params, target_params, opt_state), td_error, stats

    return Rule(begin, update, choose_action, initial_carry)


def for_each_network(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """An optimizer of several networks by name, which treats each by itself: it clips the norm of each one's gradients."""

    def init(params: Any) -> Any:
        return {name: optimizer.init(p) for name, p in params.items()}

    def update(updates: Any, state: Any, params: Any = None, **rate: Any) -> tuple[Any, Any]:
        new = {name: optimizer.update(u, state[name], params[name], **rate) for name, u in updates.items()}
        return {name: u for name, (u, _) in new.items()}, {name: own for name, (_, own) in new.items()}

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]


class Pending(NamedTuple):
    """TD errors for the next update of the buffer's priorities."""

    indices: Indices  # the windows in the buffer, [K, B]
    td_error: jax.Array  # their errors; nan where there are none, [K, B]


class OffPolicyState(NamedTuple):
    """The state of a run, or of a team of agents, which keeps no environments."""

    params: Any
    target_params: Any
    opt_state: Any
    key: jax.Array  # the learner's
    acting_params: tuple[Any, Counter] | tuple[()]  # with the iterations done at their last refresh; () if the newest act
    actor_keys: jax.Array  # they sample actions, [E]
    replay: ReplayState
    replay_key: jax.Array  # for draws
    pending: Pending
    data: Any = ()  # `Replay.data` of a buffer that mixes in a data set
    carry: Carry = ()  # the recurrent state of the actors, [E, ...]
    env_state: Any = ()
    obs: Any = ()  # for the next actions, [E, ...]


class Replaying(NamedTuple):
    """What an off-policy algorithm does besides stepping environments, as functions that call fragments."""

    # (params_key, actor_key, learner_key, replay_key, obs [..., *observation_shape]) -> a state without environments
    init: Callable[..., OffPolicyState]
    # (state, progress) -> (acting_params, state, (keys [T, E], steps [T])), as `Explore` takes them one by one
    begin: Callable[[OffPolicyState, Progress], tuple[Any, OffPolicyState, tuple[jax.Array, Counter]]]
    # (state, items [T, E, ...], progress) -> (state, metrics): stores the steps, and learns
    finish: Callable[[OffPolicyState, Transition, Progress], tuple[OffPolicyState, Metrics]]
    axes: Mapping[str, Any]  # of the state but for the fields of the environments


def replaying(config: Any, buffer: Replay, rule: Rule, num_envs: int) -> Replaying:
    """Builds what `off_policy_agent` does besides stepping environments; the arguments and metrics are the same."""
    unroll_length, num_updates = config.unroll_length, config.num_updates
    actor_period = getattr(config, "actor_period", 1)

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
            acting_params=(jax.tree.map(jnp.copy, learner.params), counter()) if actor_period > 1 else (),
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
        return select(remainder(count, actor_period) == 0, (params, count), acting_params), {"parameter_age": age}

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


def off_policy_agent(config: Any, venv: VectorEnvironment, buffer: Replay, rule: Rule, explore: Explore) -> Agent:
    """Builds an agent with a replay buffer of `Transition`s; metrics are `Mean`s over the updates, and the buffer's report."""
    num_envs, to_env_action = venv.num_envs, action_transform(venv.action_space)
    replayer = replaying(config, buffer, rule, num_envs)

    def init(key: jax.Array) -> OffPolicyState:
        params_key, env_key, actor_key, learner_key, replay_key = jax.random.split(key, 5)
        env_state, obs = venv.reset(env_key)
        begun = replayer.init(params_key, actor_key, learner_key, replay_key, obs)
        return begun._replace(carry=rule.initial_carry(num_envs), env_state=env_state, obs=obs)

    act: Any = fragment(role="actor", name="explore")(explore)

    @fragment(role="env")
    def env_step(env_state, action):
        return venv.step(env_state, to_env_action(action))

    pop_episodes = fragment(role="env", name="pop_episodes")(venv.pop_episodes)

    def iteration(state: OffPolicyState, progress: Progress) -> tuple[OffPolicyState, Metrics]:
        acting_params, begun, keys = replayer.begin(state, progress)

        def step(loop, inputs):
            env_state, obs, carry = loop
            action, next_carry = act(acting_params, actor_part(obs), *inputs, carry)
            env_state, t = env_step(env_state, action)
            item = Transition(obs, action, t.reward, t.terminated, t.truncated, t.final_obs, carry, t.present)
            return (env_state, t.obs, forget(t.terminated | t.truncated, next_carry)), item

        (env_state, obs, carry), items = jax.lax.scan(step, (state.env_state, state.obs, state.carry), keys)
        env_state, episodes = pop_episodes(env_state)
        done, metrics = replayer.finish(begun, items, progress)
        return done._replace(carry=carry, env_state=env_state, obs=obs), {**metrics, **episodes}

    def act_in_env(state: OffPolicyState, obs: Any, key: jax.Array | None, carry: Carry) -> tuple[jax.Array, Carry]:
        action, carry = rule.choose_action(state.params, obs, key, carry)
        return to_env_action(action), carry

    return Agent(
        init=init,
        iteration=iteration,
        act=act_in_env,
        axes=logical_axes(OffPolicyState, **replayer.axes, carry=P("env"), env_state=venv.axes, obs=P("env")),
        steps_per_iteration=num_envs * config.unroll_length,
        updates_per_iteration=config.num_updates,
        learning_starts=buffer.min_size,
        env=venv,
        initial_carry=rule.initial_carry,
        data={"data": buffer.data} if buffer.data else {},
    )


def epsilon_greedy(
    exploration: Annealed | PerEnv, *, num_envs: int, num_actions: int, random_steps: int
) -> Callable[..., jax.Array]:
    """Makes `(greedy [E], keys [E], steps, obs) -> actions [E]`, random with probability epsilon, and in the first steps."""

    def explore(greedy: jax.Array, keys: jax.Array, steps: Counter, obs: Any = None) -> jax.Array:
        whether, which = jax.vmap(lambda key: jax.random.split(key), out_axes=1)(keys)
        probability = jnp.where(at_least(steps, random_steps), exploration.epsilon(steps, num_envs), 1.0)
        at_random = jax.vmap(jax.random.uniform)(whether) < probability
        return jnp.where(at_random, uniform_actions(which, Discrete(num_actions), obs), greedy)

    return explore


def uniform_actions(keys: jax.Array, space: Space, obs: Any = None) -> jax.Array:
    """Draws uniform (legal) actions before `action_transform`, one key each `[E]`: floats in [-1, 1], integers from 0."""
    if (mask := mask_of(obs)) is not None:
        return jax.vmap(sample_legal)(keys, mask)
    if isinstance(space, Discrete):
        return jax.vmap(lambda key: jax.random.randint(key, (), 0, space.n, jnp.int32))(keys)
    assert isinstance(space, Box)
    if is_integers(space):
        sizes = jnp.array(num_values(space))
        return jax.vmap(lambda key: jax.random.randint(key, sizes.shape, 0, sizes, jnp.int32))(keys)
    size = math.prod(space.shape)
    return jax.vmap(lambda key: jax.random.uniform(key, (size,), minval=-1.0, maxval=1.0, dtype=jnp.float32))(keys)
