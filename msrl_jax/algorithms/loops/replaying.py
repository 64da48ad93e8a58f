"""What an off-policy algorithm does besides stepping environments: act, store steps in a replay buffer, learn from batches.

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
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from msrl_jax.algorithms.base import Metrics
from msrl_jax.algorithms.loops.acting import parameter_age, parameter_version
from msrl_jax.algorithms.loops.optimizer import descend
from msrl_jax.algorithms.networks.cores import Carry
from msrl_jax.counters import Counter, advance, counter, remainder
from msrl_jax.fragments import fragment
from msrl_jax.metrics import Mean
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


LEARNER_AXES = dict.fromkeys((*Learner._fields, "iteration", "updates", "key"), P())
"""The logical axes of a learner's fields in the state of a run: none, each device of the learner holds them whole."""


class Batch(NamedTuple):
    """The data of one update.

    Attributes:
      experience: items of the buffer, such as an `NStep`. shape=(B, ...)
      weight: importance weights, 1 without priorities. shape=(B,)
      key: key for the randomness of the update. shape=()
    """

    experience: Any
    weight: jax.Array
    key: jax.Array


class Progress(NamedTuple):
    """The progress of a run at an update.

    Attributes:
      iteration: iterations done. shape=()
      update: updates done, those before the buffer was ready included. shape=()
      ready: whether the buffer holds enough steps; if not, the batch has no meaning. shape=(), dtype=bool
    """

    iteration: Counter
    update: Counter
    ready: jax.Array


@dataclasses.dataclass(frozen=True)
class Rule:
    """What an algorithm learns from a batch.

    Attributes:
      init: `(key, obs [..., *observation_shape]) -> Learner`; only the shapes of observations matter.
      update: `(learner, batch, progress) -> (learner, TD errors [B], statistics)`. If the progress is not `ready`, the learner
        must not change: give `progress.ready` to the fragment of `make_apply_update`, and a share of 0 to `polyak_update`.
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


class Replayer(NamedTuple):
    """The state of an off-policy algorithm, without that of its environments.

    Attributes:
      params: parameters of all trained networks.
      target_params: parameters of the target networks.
      opt_state: states of the optimizers.
      iteration: iterations done, counted by the learner. shape=()
      updates: updates done, as in `Progress`. shape=()
      key: the learner's key. shape=()
      acting_params: the acting parameters, and the learner's iteration at their last refresh; `()` if the newest parameters
        always act.
      steps: environment steps taken, counted by the actors. shape=()
      actor_keys: one key per environment, which samples actions. shape=(E,)
      replay: state of the buffer.
      replay_key: the buffer's key, for draws. shape=()
      pending: TD errors for the buffer.
      data: `Replay.data` of a buffer that mixes in a data set; `()` without one.
    """

    params: Any
    target_params: Any
    opt_state: Any
    iteration: Counter
    updates: Counter
    key: jax.Array
    acting_params: tuple[Any, Counter] | tuple[()]
    steps: Counter
    actor_keys: jax.Array
    replay: ReplayState
    replay_key: jax.Array
    pending: Pending
    data: Any


class Replaying(NamedTuple):
    """The steps of an off-policy algorithm, which call fragments.

    Attributes:
      init: `(params_key, actor_key, learner_key, replay_key, obs [..., *observation_shape]) -> Replayer`.
      begin: `(replayer) -> (acting_params, replayer, keys)`, with the keys and the numbers of steps
        before each of `T` steps, as an `Explore` function takes them.
      finish: `(replayer, items [T, E, ...]) -> (replayer, metrics)`: stores the steps, and learns.
      axes: logical axes of the state, field by field.
    """

    init: Callable[..., Replayer]
    begin: Callable[[Replayer], tuple[Any, Replayer, tuple[jax.Array, Counter]]]
    finish: Callable[[Replayer, Transition], tuple[Replayer, Metrics]]
    axes: Mapping[str, Any]


def replaying(
    buffer: Replay,
    rule: Rule,
    *,
    num_envs: int,
    unroll_length: int,
    num_updates: int,
    refresh_period: int = 1,
) -> Replaying:
    """Builds the steps of an off-policy algorithm.

    Args:
      buffer: the buffer, of items like `Transition`.
      rule: what the agent learns from a batch.
      num_envs: number of environments, `E`.
      unroll_length: steps of every environment per iteration, `T`.
      num_updates: updates per iteration, `K`.
      refresh_period: iterations between two refreshes of the acting parameters.

    Returns:
      The steps. Their metrics are the statistics of the rule, as `Mean`s over the updates (without samples until the buffer is
      ready); `parameter_age`, the age of the acting parameters in iterations; and the report of the buffer.
    """

    def init(
        params_key: jax.Array, actor_key: jax.Array, learner_key: jax.Array, replay_key: jax.Array, obs: Any
    ) -> Replayer:
        learner = rule.init(params_key, obs)
        nowhere = Indices(*jnp.zeros((2, num_updates, buffer.batch_size), jnp.int32))
        nothing = jnp.full((num_updates, buffer.batch_size), jnp.nan, jnp.float32)
        return Replayer(
            **learner._asdict(),
            iteration=counter(),
            updates=counter(),
            key=learner_key,
            # A copy: a state in which two leaves are one array cannot be donated.
            acting_params=(jax.tree.map(jnp.copy, learner.params), counter()) if refresh_period > 1 else (),
            steps=counter(),
            actor_keys=jax.random.split(actor_key, num_envs),
            replay=buffer.init(),
            replay_key=replay_key,
            pending=Pending(nowhere, nothing),
            data=(),
        )

    @fragment(role="actor")
    def draw_keys(keys, steps):
        keys = jax.vmap(lambda key: jax.random.split(key, unroll_length + 1), out_axes=1)(keys)
        steps_before = advance(steps, jnp.arange(unroll_length) * num_envs)
        return keys[0], keys[1:], steps_before, advance(steps, num_envs * unroll_length)

    @fragment(role="buffer")
    def insert(replay, pending, items):
        return buffer.insert(buffer.update(replay, pending.indices, pending.td_error), items)

    @fragment(role="buffer")
    def sample_batches(replay, key, data):
        key, *keys = jax.random.split(key, num_updates + 1)
        sample = jax.vmap(lambda key: buffer.sample(replay, key, data))(jnp.stack(keys))
        return key, sample, buffer.ready(replay), buffer.report(replay)

    @fragment(role="learner")
    def learn(learner, iteration, updates, version, key, sample, ready):
        key, *keys = jax.random.split(key, num_updates + 1)

        def step(learner, inputs):
            update, batch = inputs
            learner, td_error, stats = rule.update(learner, batch, Progress(iteration, update, ready))
            if buffer.may_be_absent:  # nothing is to be learned from these windows
                td_error = jnp.where(batch.weight > 0, td_error, 0.0)
            return learner, (jnp.where(ready, td_error, jnp.nan), stats)

        batches = Batch(sample.experience, sample.weight, jnp.stack(keys))
        numbers = advance(updates, jnp.arange(num_updates))
        learner, (td_error, stats) = jax.lax.scan(step, learner, (numbers, batches))
        done = jnp.where(ready, jnp.float32(num_updates), 0.0)
        means = jax.tree.map(lambda x: Mean(jnp.where(ready, x.sum(), 0.0), done), stats)
        # The learner returns the indices too: a policy with staleness delays a learner's outputs, so they stay with their
        # errors.
        pending = Pending(sample.indices, td_error)
        metrics = {**means, "parameter_age": parameter_age(iteration, version)}
        return learner, advance(iteration), advance(updates, num_updates), key, pending, metrics

    @fragment(role="learner")
    def refresh(acting_params, params, iteration):
        return select(remainder(iteration, refresh_period) == 0, (params, iteration), acting_params)

    def begin(state: Replayer) -> tuple[Any, Replayer, tuple[jax.Array, Counter]]:
        acting_params, _ = state.acting_params or (state.params, None)
        actor_keys, keys, steps_before, steps = draw_keys(state.actor_keys, state.steps)
        return acting_params, state._replace(actor_keys=actor_keys, steps=steps), (keys, steps_before)

    def finish(state: Replayer, items: Transition) -> tuple[Replayer, Metrics]:
        _, taken_at = state.acting_params or (None, state.iteration)
        replay = insert(state.replay, state.pending, items)
        replay_key, sample, ready, report = sample_batches(replay, state.replay_key, state.data)
        learner = Learner(state.params, state.target_params, state.opt_state)
        learner, count, updates, key, pending, metrics = learn(
            learner, state.iteration, state.updates, parameter_version(taken_at), state.key, sample, ready
        )
        after = state._replace(
            **learner._asdict(),
            iteration=count,
            updates=updates,
            key=key,
            acting_params=refresh(state.acting_params, learner.params, count) if state.acting_params else (),
            replay=replay,
            replay_key=replay_key,
            pending=pending,
        )
        return after, {**metrics, **report}

    axes = {
        **LEARNER_AXES,
        "acting_params": P(),
        "steps": P(),
        "actor_keys": P("env"),
        "replay": buffer.axes,
        "replay_key": P(),
        "pending": P(None, SHARD_AXIS),
        "data": buffer.data_axes,
    }
    return Replaying(init, begin, finish, axes)


def make_apply_update(optimizer: optax.GradientTransformation) -> Callable[..., tuple[Any, Any]]:
    """Makes the fragment that applies a gradient if the buffer is ready.

    Args:
      optimizer: the optimizer, without a learning rate.

    Returns:
      `(params, opt_state, grads, learning_rate, ready) -> (params, opt_state)`.
    """

    @fragment(role="server")
    def apply_update(params, opt_state, grads, learning_rate, ready):
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        return select(ready, (descend(params, updates, learning_rate), new_opt_state), (params, opt_state))

    return apply_update


@fragment(role="server")
def polyak_update(target_params: Any, params: Any, share: jax.Array) -> Any:
    """Moves target parameters towards parameters by a share in [0, 1]: Polyak averaging, or a copy if it is 1."""
    return optax.incremental_update(params, target_params, share)


def select(condition: jax.Array, new: Any, old: Any) -> Any:
    """The leaves of `new` if the scalar `condition` holds, else those of `old`."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
