"""Hindsight experience replay (HER; Andrychowicz et al., 2017, arXiv 1707.01495): relabels sampled steps with achieved goals.

The desired goal of a sampled step is replaced by a goal that was achieved in the same episode, and the reward is recomputed.
Bisection finds where an episode ends in the ring: every step is stored with the number of its episode, which never decreases
along an environment's row. If an episode is partly overwritten, or not over, the stored steps are used.

In the shape descriptions, `b` is the number of windows that a shard draws, and `S` the length of a window.
"""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from msrl_jax.envs.goals import Goals
from msrl_jax.fragments.support.random_keys import key_for
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.replay.base import Indices
from msrl_jax.replay.ring import Ring

Strategy = Literal["future", "final", "episode", "geometric"]
"""The step whose achieved goal is used: "future", the same or a later step, uniformly; "final", the last step; "episode", any
step; "geometric", the step `k` steps later with a probability in proportion to `discount ** k` (Eysenbach et al., 2022, arXiv
2206.07568)."""


@entry
@dataclasses.dataclass(frozen=True)
class Relabelling:
    """How to relabel sampled steps with other goals.

    Attributes:
      goals: functions that read and replace goals, see `envs.goals.goals_of`.
      share: the probability that a sampled step is relabelled, in [0, 1]. Usual: 0.8.
      by: the step whose achieved goal it gets.
    """

    goals: Goals
    share: float = 0.8
    by: Strategy = "future"

    def __post_init__(self):
        if not 0 <= self.share <= 1:
            raise ValueError(f"Relabelling: share={self.share!r}; use a number in [0, 1]")
        if self.by not in get_args(Strategy):
            raise ValueError(f"Relabelling: by={self.by!r}; use one of {', '.join(get_args(Strategy))}")


def with_episodes(example: Any, relabelling: Relabelling | None, discount: float | None) -> Any:
    """Returns the example of an item, with an episode number if it is relabelled; raises ValueError if it cannot be
    relabelled.
    """
    if relabelling is None:
        return example
    if discount is None or not hasattr(example, "episode"):
        raise ValueError(
            "relabelling replaces goals of n-step transitions; pass a msrl_jax.replay.Transition and its discount=..., or "
            "relabelling=None"
        )
    return example._replace(episode=jax.ShapeDtypeStruct((), jnp.int32))


def number_episodes(ring: Ring, leaves: list[Any], added: jax.Array, items: Any) -> Any:
    """Adds episode numbers to items `[T, E, ...]`; they continue those in the buffer and wrap around.

    The lowest bit marks the last step of an episode. Insertion therefore reads only the leaf that it writes these numbers to: a
    leaf that is read and overwritten would be copied.
    """

    def newest(leaves: list[Any]) -> jax.Array:
        indices = Indices(jnp.broadcast_to(added - 1, (ring.envs,)), jnp.arange(ring.envs, dtype=jnp.int32))
        return ring.take(leaves, indices, jnp.int32(0), lambda item: item.episode)

    last, ends = jax.vmap(newest)(leaves).reshape(ring.num_envs), items.terminated | items.truncated
    number = jnp.cumsum(jnp.concatenate([((last >> 1) + (last & 1))[None], ends[:-1]]), 0, dtype=jnp.int32)
    return items._replace(episode=2 * number + ends)


def relabel(
    ring: Ring,
    relabelling: Relabelling,
    discount: float | jax.Array,
    leaves: list[Any],
    indices: Indices,
    offset: jax.Array,
    steps: tuple[jax.Array, ...],
    around: tuple[jax.Array, jax.Array],
    key: jax.Array,
) -> tuple[Any, tuple[jax.Array, ...]]:
    """Chooses windows to relabel, and computes their goals, rewards and episode ends.

    Args:
      ring: the ring.
      relabelling: how to relabel.
      discount: the discount factor per step, for "geometric".
      leaves: the leaves of a shard. `[L, E/G, ...]`
      indices: the first steps of the windows. `[b]`
      offset: the offsets of the steps of windows from these. `[S, b]`
      steps: the rewards, `terminated` and `truncated` of the steps. `[S, b]` each
      around: the numbers of steps that the ring holds before and after `indices`. `[b]` int32 each
      key: the key with which the windows were drawn.

    Returns:
      The desired goals, new or old, `[b, ...]`; and `steps` for these goals. A step terminates if it reaches the goal, or if it
      terminated for a reason other than the old goal. A step that ends an episode but no longer terminates is truncated.
    """
    goals = relabelling.goals
    mask_key, choice_key = jax.random.split(key_for("goals", key))
    is_relabelled = jax.random.uniform(mask_key, indices.step.shape, jnp.float32) < relabelling.share
    goal_offset = _choose_offset(ring, relabelling.by, discount, leaves, indices, around, choice_key)
    goal = ring.take(leaves, indices, goal_offset, lambda item: goals.achieved(item.next_obs))
    desired = ring.take(leaves, indices, jnp.int32(0), lambda item: goals.desired(item.obs))
    achieved = ring.take(leaves, indices, offset, lambda item: goals.achieved(item.next_obs))
    rewards_of = jax.vmap(jax.vmap(goals.reward), (0, None))
    _, terminated, truncated = steps
    new_reward, ends = rewards_of(achieved, goal)
    ends |= terminated & ~rewards_of(achieved, desired)[1]
    new = new_reward, ends, (terminated | truncated) & ~ends

    def pick(x: Any, old: Any) -> Any:
        return jax.vmap(jax.lax.select)(is_relabelled, x, old)

    return jax.tree.map(pick, goal, desired), tuple(jnp.where(is_relabelled, x, old) for x, old in zip(new, steps, strict=True))


def _choose_offset(
    ring: Ring,
    strategy: Strategy,
    discount: float | jax.Array,
    leaves: list[Any],
    indices: Indices,
    around: tuple[jax.Array, jax.Array],
    key: jax.Array,
) -> jax.Array:
    """Returns how many steps after `indices` the step is whose achieved goal is used. `[b]` int32"""

    def number(offset: int | jax.Array) -> jax.Array:
        return ring.take(leaves, indices, jnp.asarray(offset), lambda item: item.episode) >> 1

    episode = number(0)

    def reach(direction: int, limit: jax.Array) -> jax.Array:
        """Returns the number of steps of the same episode in a direction, at most `limit`. `[b]`"""
        distance = jnp.zeros_like(limit)
        for bit in reversed(range((ring.steps - 1).bit_length())):
            candidate = distance + 2**bit
            distance = jnp.where((candidate <= limit) & (number(direction * candidate) == episode), candidate, distance)
        return distance

    num_before, num_after = around
    num_after = reach(1, num_after)
    if strategy == "final":
        return num_after
    if strategy == "geometric":
        return geometric(jax.random.uniform(key, num_after.shape, jnp.float32), num_after + 1, discount)
    first = -reach(-1, num_before) if strategy == "episode" else jnp.zeros_like(num_after)
    return jax.random.randint(key, num_after.shape, first, num_after + 1, jnp.int32)


def geometric(fraction: jax.Array, count: jax.Array, discount: float | jax.Array) -> jax.Array:
    """Maps fractions from [0, 1) to numbers `k` below `count`, with probabilities in proportion to `discount ** k`.

    The inverse of the distribution function `(1 - discount ** (k + 1)) / (1 - discount ** count)`. `[...]` int32
    """
    rate = jnp.log(jnp.asarray(discount, jnp.float32))
    number = jnp.where(rate < 0, jnp.log1p(fraction * jnp.expm1(count * rate)) / rate, fraction * count)
    return jnp.clip(number.astype(jnp.int32), 0, count - 1)
