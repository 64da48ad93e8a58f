"""Replay buffers of environment steps: uniform or prioritized, of single steps, n-step transitions or sequences."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from msrl_jax._compat import Tracer
from msrl_jax.envs import JointObservation, MaskedObservation
from msrl_jax.envs.privileged import PrivilegedObservation
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.replay import sum_tree
from msrl_jax.replay.base import (
    SHARD_AXIS,
    Indices,
    NStep,
    ReplayBuffer,
    ReplayState,
    Sample,
    add_saturating,
    bytes_on_devices,
    check_numbers,
)
from msrl_jax.replay.relabelling import Relabelling, number_episodes, relabel, with_episodes
from msrl_jax.replay.ring import Ring, Storage, make_ring


class Priorities(NamedTuple):
    """The state of prioritized sampling, per shard."""

    tree: sum_tree.Tree  # over the windows. `[G, nodes]` of each level
    largest: jax.Array  # the largest priority so far, which new windows get. `[G]`


@entry
def uniform(
    example: Any,
    *,
    capacity: int,
    num_envs: int,
    unroll_length: int,
    batch_size: int,
    length: int = 1,
    stride: int = 1,
    discount: float | None = None,
    min_size: int | None = None,
    shards: int | None = None,
    storage: Storage | None = None,
    relabelling: Relabelling | None = None,
) -> ReplayBuffer:
    """Makes a buffer that samples windows uniformly (Lin, 1992; Mnih et al., 2015).

    Args:
      example: one step of one environment: a pytree of arrays or of `jax.ShapeDtypeStruct`; its values do not matter.
      capacity: maximum number of steps of all environments; rounded down to whole insertions, see `ReplayBuffer.capacity`.
      num_envs: number of environments, `E`.
      unroll_length: number of steps per environment of one insertion, `T`.
      batch_size: number of windows per batch, `B`.
      length: number of steps per window, `S`. Windows never span the gap between the newest and the oldest step.
      stride: windows start at every `stride`-th step; use half of `length` for sequences that overlap by half.
      discount: if given, a window is folded into the n-step transition of its first step, with n = `length`; the example
        must then have the fields of `Transition`, and the batch is an `NStep`. Only two observations of a window are read.
      min_size: number of steps of all environments that the buffer must hold to be `ready`; by default, enough for a batch.
      shards: `G`, the maximum number of devices to split the buffer over; a divisor of `num_envs` and `batch_size`. Samples
        depend on it. By default the greatest common divisor of the two and 8.
      storage: codecs by names on the paths of the example's leaves, such as `{"obs": "uint8"}`. With `"frame_stack(n)"` for
        `obs` and `next_obs` of a `Transition`, each frame of stacked observations is kept once; windows of steps whose frames
        are gone have weight 0.
      relabelling: how to relabel sampled n-step transitions with goals that were achieved later; None does not relabel.

    Returns:
      The buffer.

    Raises:
      ValueError: if sizes are incompatible or exceed the devices' memory, or if a codec cannot pack its leaves.
    """
    ring = make_ring(
        with_episodes(example, relabelling, discount),
        capacity=capacity,
        num_envs=num_envs,
        unroll_length=unroll_length,
        batch_size=batch_size,
        length=length,
        stride=stride,
        min_size=min_size,
        shards=shards,
        storage=storage,
        discount=discount,
    )

    def draw(state: ReplayState, keys: jax.Array) -> tuple[Indices, jax.Array]:
        begin, count = ring.oldest(state.added, state.filled)

        def draw_shard(key: jax.Array) -> Indices:
            window = jax.random.randint(key, (ring.batch_size // ring.shards,), 0, jnp.maximum(count * ring.envs, 1), jnp.int32)
            return Indices((begin + window // ring.envs * ring.stride) % ring.modulus, window % ring.envs)

        probability = 1 / jnp.maximum(count.astype(jnp.float32) * ring.num_envs, 1.0)
        return jax.vmap(draw_shard)(keys), jnp.full((ring.shards, ring.batch_size // ring.shards), probability)

    return _replay(ring, discount, relabelling, draw)


@entry
def prioritized(
    example: Any,
    *,
    capacity: int,
    num_envs: int,
    unroll_length: int,
    batch_size: int,
    length: int = 1,
    stride: int = 1,
    discount: float | None = None,
    min_size: int | None = None,
    shards: int | None = None,
    storage: Storage | None = None,
    relabelling: Relabelling | None = None,
    alpha: float = 0.6,
    epsilon: float = 1e-6,
    beta: float | None = None,
) -> ReplayBuffer:
    """Makes a buffer that draws windows in proportion to `(|TD error| + epsilon) ** alpha` (Schaul et al., 2016).

    This is the proportional variant of arXiv 1511.05952: each shard draws one window from each of `B / G` equal parts of its
    sum of priorities. New windows get the shard's largest priority so far. `Sample.weight` corrects for the probabilities.

    Args:
      example: as in `uniform`, like all arguments except the last three.
      alpha: 0 samples uniformly, 1 in proportion to the errors. Usual: 0.5 to 0.9.
      epsilon: added to errors, so that every window can be drawn. Usual: 1e-6 to 1e-2.
      beta: exponent of `importance_weights` in `Sample.weight`; it rises to 1 with the `fraction` passed to `sample`. None
        makes all weights 1. Usual: 0.4 to 0.6.

    Returns:
      The buffer.

    Raises:
      ValueError: as in `uniform`, if `alpha` or `beta` is negative, or if `epsilon` is not above 0.
    """
    check_numbers(alpha=alpha, epsilon=epsilon, beta=0.0 if beta is None else beta)
    if not epsilon:
        raise ValueError("epsilon=0 never draws a window again if its TD error was 0; use a small number such as 1e-6")
    ring = make_ring(
        with_episodes(example, relabelling, discount),
        capacity=capacity,
        num_envs=num_envs,
        unroll_length=unroll_length,
        batch_size=batch_size,
        length=length,
        stride=stride,
        min_size=min_size,
        shards=shards,
        storage=storage,
        discount=discount,
    )
    rows, per_shard = ring.steps // ring.stride, ring.batch_size // ring.shards

    def init() -> Priorities:
        levels = tuple(jnp.zeros((ring.shards, len(x)), jnp.float32) for x in sum_tree.init(rows * ring.envs))
        return Priorities(levels, jnp.ones(ring.shards, jnp.float32))

    def insert(state: ReplayState, added: jax.Array, filled: jax.Array) -> Priorities:
        # Add the windows that an insertion completes, and remove those that it overwrites. Both start in the last T + S - 1
        # steps: the newest S - 1 steps are in the slots of overwritten windows.
        priorities: Priorities = state.priorities
        span = ring.unroll_length + ring.length - 1
        age = (added - 1) % ring.stride + 1 + jnp.arange(-(-span // ring.stride), dtype=jnp.int32) * ring.stride
        is_complete = (age >= ring.length) & (age <= filled)
        first = (added - age) % ring.steps // ring.stride * ring.envs
        first = jnp.where(age <= span, first, sum_tree.NOWHERE)
        values = jnp.where(is_complete, priorities.largest[:, None], 0.0)[..., None]
        values = jnp.broadcast_to(values, (*values.shape[:2], ring.envs))
        tree = jax.vmap(sum_tree.write, (0, None, 0))(priorities.tree, first, values)
        return Priorities(tree, priorities.largest)

    def draw(state: ReplayState, keys: jax.Array) -> tuple[Indices, jax.Array]:
        begin = (state.added - state.filled) % ring.modulus

        def draw_shard(tree: sum_tree.Tree, key: jax.Array) -> tuple[Indices, jax.Array]:
            leaf, value = sum_tree.draw(tree, key, per_shard)
            row, env = leaf // ring.envs, leaf % ring.envs
            # The step that this slot holds.
            step = (begin + (row * ring.stride - begin) % ring.steps) % ring.modulus
            total = sum_tree.total(tree)
            return Indices(step, env), jnp.where(total > 0, value / (ring.shards * total), 1.0)

        return jax.vmap(draw_shard)(state.priorities.tree, keys)

    def weigh(probability: jax.Array, fraction: jax.Array | float) -> jax.Array:
        if beta is None:
            return jnp.ones_like(probability)
        return importance_weights(probability, beta + (1 - beta) * fraction)

    def update(state: ReplayState, indices: Indices, td_error: jax.Array) -> ReplayState:
        shapes = {x.shape for x in (*indices, td_error)}
        if len(shapes) > 1 or td_error.shape[-1:] != (ring.batch_size,):
            raise ValueError(
                f"update needs indices and TD errors of whole batches, [..., {ring.batch_size}], but got "
                f"{sorted(shapes)}; do not reorder a sampled batch"
            )
        if td_error.ndim > 1:
            steps = (Indices(*indices), td_error)
            return jax.lax.scan(lambda state, batch: (update(state, *batch), None), state, steps)[0]
        value = (jnp.abs(td_error) + epsilon) ** alpha
        age = (state.added - indices.step) % ring.modulus
        keep = (age >= ring.length) & (age <= state.filled) & jnp.isfinite(value)
        leaf = indices.step % ring.steps // ring.stride * ring.envs + indices.env % ring.envs
        leaf = jnp.where(keep, leaf, sum_tree.NOWHERE).reshape(ring.shards, per_shard)
        value = jnp.where(keep, value, 0.0).reshape(ring.shards, per_shard)
        tree = jax.vmap(sum_tree.write)(state.priorities.tree, leaf, value[..., None])
        largest = jnp.maximum(state.priorities.largest, value.max(1))
        return state._replace(priorities=state.priorities._replace(tree=tree, largest=largest))

    axes = Priorities(tree=P(SHARD_AXIS), largest=P(SHARD_AXIS))  # pyright: ignore[reportArgumentType]
    return _replay(ring, discount, relabelling, draw, weigh, init, insert, update, axes)


def importance_weights(probability: jax.Array, beta: float | jax.Array) -> jax.Array:
    """Loss weights that correct for sampling probabilities, relative to the largest weight in the batch.

    Schaul et al., 2016, arXiv 1511.05952, section 3.4: `(N * P(i)) ** -beta / max_j w_j`, in which `N` cancels. The largest
    weight is that of the whole batch, over all shards.

    Args:
      probability: sampling probabilities. `[B]`
      beta: 0 for no correction, 1 for full correction; usually annealed from 0.4 to 1.

    Returns:
      The weights, at most 1. `[B]`
    """
    chex.assert_rank(probability, 1)
    return (probability.min() / probability) ** beta


def fold(
    reward: jax.Array, terminated: jax.Array, truncated: jax.Array, discount: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums the rewards of windows `[S, ...]` up to the first end of an episode (Sutton & Barto, 2018, eq. 7.1).

    Returns the discounted sum, the position of its last step (int32), and the weight of its successor's value, 0 after a
    terminated step. `[...]`
    """
    chex.assert_equal_shape((reward, terminated, truncated))
    chex.assert_type((terminated, truncated), bool)
    ends = terminated | truncated
    lives = jnp.concatenate([jnp.ones_like(ends[:1]), jnp.cumsum(ends[:-1], 0) == 0])
    steps = jnp.arange(len(reward), dtype=jnp.int32).reshape(-1, *[1] * (reward.ndim - 1))
    total = jnp.where(lives, jax.lax.pow(jnp.float32(discount), steps) * reward, 0.0).sum(0)
    last = lives.sum(0, dtype=jnp.int32) - 1
    return total, last, jnp.where((terminated & lives).any(0), 0.0, jax.lax.pow(jnp.float32(discount), last + 1))


def _replay(
    ring: Ring,
    discount: float | None,
    relabelling: Relabelling | None,
    draw: Callable[[ReplayState, jax.Array], tuple[Indices, jax.Array]],
    weigh: Callable[[jax.Array, Any], jax.Array] = lambda probability, fraction: jnp.ones_like(probability),
    priorities: Callable[[], Any] = tuple,
    new_priorities: Callable[[ReplayState, jax.Array, jax.Array], Any] = lambda state, added, filled: (),
    update: Callable[[ReplayState, Indices, jax.Array], ReplayState] = lambda state, indices, td_error: state,
    axes: Any = None,
) -> ReplayBuffer:
    """Makes a buffer from its ring and its sampling functions; the defaults are those of a uniform buffer.

    `draw` returns the windows of each shard with their probabilities `[G, B / G]`, `weigh` their weights, `priorities` the
    initial priorities, and `new_priorities` those after an insertion; `axes` is a prefix tree of the priorities.
    """

    def init() -> ReplayState:
        added, filled = jnp.int32(0), jnp.int32(0)  # separate arrays, so that both can be donated
        return ReplayState(ring.empty(), added, filled, jnp.zeros(ring.shards, jnp.int32), priorities())

    def insert(state: ReplayState, items: Any) -> ReplayState:
        if relabelling is not None:
            items = number_episodes(ring, state.items, state.added, items)
        leaves, lost = ring.insert(state.items, state.added, items)
        added = (state.added + ring.unroll_length) % ring.modulus
        filled = jnp.minimum(state.filled + ring.unroll_length, ring.steps)
        return ReplayState(leaves, added, filled, add_saturating(state.lost, lost), new_priorities(state, added, filled))

    def offsets(indices: Indices) -> jax.Array:
        """Returns the offsets of the steps of windows. `[S, b]`"""
        return jnp.broadcast_to(jnp.arange(ring.length, dtype=jnp.int32)[:, None], (ring.length, len(indices.step)))

    def read(leaves: list[Any], indices: Indices, *relabel_args: Any) -> Any:
        if discount is None:
            return ring.take(leaves, indices, jnp.int32(0) if ring.length == 1 else offsets(indices), lambda item: item)
        offset = offsets(indices)
        ends = ring.take(leaves, indices, offset, lambda item: (item.terminated, item.truncated))
        reward = ring.take(leaves, indices, offset, lambda item: item.reward)
        goal: Any = None
        if relabelling is not None:
            goal, (reward, *ends) = relabel(
                ring, relabelling, discount, leaves, indices, offset, (reward, *ends), *relabel_args
            )
        reward, last, weight = fold(reward, *ends, discount=discount)
        if last.ndim > 1:  # several agents; one whose sum ends earlier has terminated and needs no successor
            last = last.max(-1)
        obs, action = ring.take(leaves, indices, jnp.int32(0), lambda item: (item.obs, item.action))
        next_obs = ring.take(leaves, indices, last, lambda item: item.next_obs)
        if relabelling is not None:
            obs, next_obs = (relabelling.goals.replace(x, goal) for x in (obs, next_obs))
        return NStep(obs, action, reward, weight, next_obs)

    def valid(leaves: list[Any], indices: Indices) -> jax.Array:
        """Whether all steps of a window are valid, including those after the end of an episode."""
        return ring.valid(leaves, indices, offsets(indices)).all(0)

    windowed = discount is None and ring.length > 1

    def merge_shards(x: jax.Array, dim: int = 0) -> jax.Array:
        """Merges the shards of a batch: `[..., G, B / G, ...]` with `dim` leading dimensions becomes `[..., B, ...]`."""
        return x.reshape(*x.shape[:dim], ring.batch_size, *x.shape[dim + 2 :])

    def sample(state: ReplayState, key: jax.Array, data: Any = (), fraction: jax.Array | float = 0.0) -> Sample:
        if not isinstance(state.filled, Tracer) and int(state.filled) < ring.length:
            raise ValueError(
                f"the buffer holds {state.filled} steps of each environment, but a window is length={ring.length} steps long; "
                f"insert {ring.length} before sampling, and learn once `ready(state)`"
            )
        keys = jax.random.split(key, ring.shards)
        indices, probability = draw(state, keys)
        relabel_args = ()
        if relabelling is not None:
            around = indices.step - (state.added - state.filled), state.added - 1 - indices.step
            relabel_args = tuple(x % ring.modulus for x in around), keys
        experience = jax.vmap(read, out_axes=1 if windowed else 0)(state.items, indices, *relabel_args)
        experience = jax.tree.map(lambda x: merge_shards(x, int(windowed)), experience)
        env = indices.env + ring.envs * jnp.arange(ring.shards, dtype=jnp.int32)[:, None]
        probability = merge_shards(probability)
        weight = weigh(probability, fraction)
        if ring.may_be_invalid:
            weight = jnp.where(merge_shards(jax.vmap(valid)(state.items, indices)), weight, 0.0)
        return Sample(experience, Indices(merge_shards(indices.step), merge_shards(env)), probability, weight)

    def windows(state: ReplayState) -> jax.Array:
        return ring.oldest(state.added, state.filled)[1]

    def size(state: ReplayState) -> jax.Array:
        return jnp.minimum(windows(state), jnp.iinfo(jnp.int32).max // ring.num_envs) * ring.num_envs

    def report(state: ReplayState) -> dict[str, jax.Array]:
        metrics = {"replay_size": windows(state).astype(jnp.float32) * ring.num_envs}
        return metrics | ({"replay_lost": state.lost.sum(dtype=jnp.float32)} if any(ring.codecs) else {})

    capacity = ring.steps * ring.num_envs
    state_axes: Any = ReplayState(P(SHARD_AXIS), *[P()] * 2, lost=P(SHARD_AXIS), priorities=axes or P())  # pyright: ignore
    return ReplayBuffer(
        init=init,
        insert=insert,
        sample=sample,
        update=update,
        size=size,
        ready=lambda state: state.filled >= ring.min_steps,
        report=report,
        axes=state_axes,
        capacity=capacity,
        min_size=ring.min_steps * ring.num_envs,
        batch_size=ring.batch_size,
        nbytes=bytes_on_devices(init, ring.shards, f"a buffer of capacity={capacity} steps", capacity),
        shards=ring.shards,
        may_be_invalid=ring.may_be_invalid,
    )


def storage_of(codec: str | None, obs: Any) -> dict[str, str | None] | None:
    """Returns the `storage` of a buffer whose observations have a codec; their masks and other fields have none."""
    no_codecs: dict[str, str | None] = {}
    while isinstance(obs, JointObservation | MaskedObservation | PrivilegedObservation):
        no_codecs |= dict.fromkeys(obs._fields[1:])
        obs = obs.obs
    return None if codec is None else {"obs": codec, "next_obs": codec, **no_codecs}
