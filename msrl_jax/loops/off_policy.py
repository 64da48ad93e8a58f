"""What the off-policy algorithms share: their state, and functions that draw batches and learn from them.

In the shape descriptions, `T` denotes the length of an unroll, `E` the number of environments, `B` the batch size and `K` the
number of updates per iteration. An iteration

1. takes `T` steps of every environment with the acting parameters,
2. updates the priorities in the buffer with the TD errors of the previous iteration, then inserts the steps,
3. draws `K` batches at once,
4. learns from the batches one after another,
5. refreshes the acting parameters every `actor_period` iterations.

The fragments are in the files of the algorithms. The buffer handles data sets, priorities and importance weights.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from msrl_jax.agents.agent import Progress
from msrl_jax.fragments.counters import Counter, advance, counter, remainder
from msrl_jax.fragments.metrics import Mean
from msrl_jax.fragments.progress import parameter_age
from msrl_jax.networks.unrolls import Carry
from msrl_jax.replay import SHARD_AXIS, Indices, ReplayBuffer, ReplayState, Sample


class Learner(NamedTuple):
    """The part of the state that an update changes; each algorithm chooses the structure of the trees."""

    params: Any  # of all trained networks
    target_params: Any
    opt_state: Any
    observations: Any = ()  # statistics of observations, if networks see standardized ones


class Batch(NamedTuple):
    """The data of one update."""

    experience: Any  # items of the buffer, such as an `NStep`, [B, ...]
    weight: jax.Array  # importance weights, 1 without priorities, [B]
    key: jax.Array  # for the randomness of the update
    update: Counter  # the index of the update, from 0; updates before the buffer was ready count too
    ready: jax.Array  # whether the buffer holds enough steps; else the batch is meaningless; bool []


class Pending(NamedTuple):
    """TD errors for the next update of the buffer's priorities."""

    indices: Indices  # the windows in the buffer, [K, B]
    td_error: jax.Array  # their errors; nan where unknown, [K, B]


class OffPolicyState(NamedTuple):
    """The state of a run, or of a team of agents, which keeps no environments."""

    params: Any
    target_params: Any  # () if nothing has a target network
    opt_state: Any
    observations: Any  # statistics of observations; () if observations are not standardized
    key: jax.Array  # of the learner
    acting_params: tuple[Any, Counter] | tuple[()]  # and the iteration of their last refresh; () if actors use the newest
    actor_keys: jax.Array  # for sampling actions, [E]
    replay: ReplayState
    replay_key: jax.Array  # for draws
    pending: Pending
    data: Any = ()  # `ReplayBuffer.data` of a buffer that mixes in a data set
    carry: Carry = ()  # the recurrent state of the actors, [E, ...]
    env_state: Any = ()
    obs: Any = ()  # for the next actions, [E, ...]

    @property
    def learner(self) -> Learner:
        """The part that updates change."""
        return Learner(self.params, self.target_params, self.opt_state, self.observations)


def initial_state(
    config: Any, buffer: ReplayBuffer, learner: Learner, actor_key: jax.Array, learner_key: jax.Array, replay_key: jax.Array
) -> OffPolicyState:
    """Makes the initial state, without environments and carries; with an `actor_period`, acting parameters are copies."""
    copy = lambda tree: jax.tree.map(jnp.copy, tree)  # a state whose leaves share an array cannot be donated
    indices = Indices(*jnp.zeros((2, config.num_updates, buffer.batch_size), jnp.int32))
    return OffPolicyState(
        **learner._replace(target_params=copy(learner.target_params))._asdict(),
        key=learner_key,
        acting_params=(copy(learner.params), counter()) if getattr(config, "actor_period", 1) > 1 else (),
        actor_keys=jax.random.split(actor_key, config.num_envs),
        replay=buffer.init(),
        replay_key=replay_key,
        pending=Pending(indices, jnp.full(indices.step.shape, jnp.nan, jnp.float32)),
    )


def state_axes(buffer: ReplayBuffer, **axes: Any) -> OffPolicyState:
    """Returns the logical axes of a state; `axes` are those of environments and carries."""
    shared = dict.fromkeys((*Learner._fields, "key", "acting_params", "replay_key"), P())
    axes = {"actor_keys": P("env"), "replay": buffer.axes, "pending": P(None, SHARD_AXIS), "data": buffer.data_axes, **axes}
    return OffPolicyState(**shared, **axes)


def draw(
    buffer: ReplayBuffer, replay: ReplayState, key: jax.Array, data: Any, progress: Progress, num_updates: int
) -> tuple[jax.Array, Sample, jax.Array, Mapping[str, jax.Array]]:
    """Draws `K` batches at once; returns the next key, the batches, whether the buffer is ready, and its report."""
    key, *keys = jax.random.split(key, num_updates + 1)
    sample = jax.vmap(lambda key: buffer.sample(replay, key, data, progress.fraction))(jnp.stack(keys))
    return key, sample, buffer.ready(replay), buffer.report(replay)


def learn_from(
    sample: Sample,
    ready: jax.Array,
    update: Callable[[Learner, Batch], tuple[Learner, jax.Array, Mapping[str, jax.Array]]],
    learner: Learner,
    key: jax.Array,
    progress: Progress,
    *,
    may_be_invalid: bool = False,
) -> tuple[Learner, jax.Array, Pending, dict[str, Mean]]:
    """Learns from batches one after another.

    Args:
      sample: the sampled batches. `[K, B, ...]`
      ready: whether the buffer holds enough steps. `[]` bool
      update: `(learner, batch) -> (learner, TD errors [B], statistics)`; it changes nothing if the batch is not `ready`.
      learner: the state that updates change.
      key: the key for the randomness of updates.
      progress: the progress of the run.
      may_be_invalid: whether batches may contain windows with invalid steps, whose weight is 0.

    Returns:
      The learner, the next key, the TD errors for the buffer, and the statistics averaged over the updates.
    """
    num_updates = len(sample.weight)
    key, *keys = jax.random.split(key, num_updates + 1)

    def step(learner: Learner, inputs: tuple[Any, ...]) -> tuple[Learner, tuple[jax.Array, Mapping[str, jax.Array]]]:
        batch = Batch(*inputs, ready=ready)
        learner, td_error, stats = update(learner, batch)
        if may_be_invalid:  # windows with weight 0 do not contribute
            td_error = jnp.where(batch.weight > 0, td_error, 0.0)
        return learner, (jnp.where(ready, td_error, jnp.nan), stats)

    numbers = advance(progress.times(num_updates), jnp.arange(num_updates))
    learner, (td_error, stats) = jax.lax.scan(step, learner, (sample.experience, sample.weight, jnp.stack(keys), numbers))
    count = jnp.where(ready, jnp.float32(num_updates), 0.0)
    means = jax.tree.map(lambda x: Mean(jnp.where(ready, x.sum(), 0.0), count), stats)
    # Return the indices too: a policy with staleness delays the learner's outputs, so indices and errors stay together.
    return learner, key, Pending(sample.indices, td_error), dict(means)


def apply_if(
    ready: jax.Array,
    optimizer: optax.GradientTransformationExtraArgs,
    params: Any,
    opt_state: Any,
    grads: Any,
    learning_rate: jax.Array | None,
) -> tuple[Any, Any]:
    """Returns the parameters and the optimizer state after an update; the old ones if the buffer is not `ready`."""
    updates, new_opt_state = optimizer.update(grads, opt_state, params, learning_rate=learning_rate)
    return select(ready, (optax.apply_updates(params, updates), new_opt_state), (params, opt_state))


def is_due(ready: jax.Array, count: Counter, period: int) -> jax.Array:
    """Whether the buffer is ready and `count` is a multiple of `period`. `[]` bool"""
    return ready if period == 1 else ready & (remainder(count, period) == 0)


def move_target(target_params: Any, params: Any, share: float, due: jax.Array) -> Any:
    """Moves target parameters towards parameters by a share in [0, 1] if `due`: Polyak averaging; a share of 1 copies."""
    return optax.incremental_update(params, target_params, jnp.where(due, share, 0.0))


def select(condition: jax.Array, new: Any, old: Any) -> Any:
    """Returns the leaves of `new` if the scalar `condition` holds, else those of `old`."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def refreshed(
    acting_params: tuple[Any, Counter], params: Any, progress: Progress, version: jax.Array, period: int
) -> tuple[tuple[Any, Counter], dict[str, Any]]:
    """Refreshes the acting parameters every `period` iterations; returns them and the metric `parameter_age`."""
    count = advance(progress.iteration)
    acting_params = select(remainder(count, period) == 0, (params, count), acting_params)
    return acting_params, {"parameter_age": parameter_age(progress.iteration, version)}
