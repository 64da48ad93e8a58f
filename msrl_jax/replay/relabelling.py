"""Hindsight experience replay (Andrychowicz et al., 2017, arXiv 1707.01495): sampled steps learn of goals that were achieved.

A sampled step gets, in place of the goal that was desired, one that was achieved in its episode, and the reward of that goal.
Where an episode ends in the ring is found by bisection: every step is stored with the number of its episode, which never falls
along an environment's row. Of an episode that is partly overwritten, or not over, the steps that are held count.

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
"""Whose achieved goal a step gets: "future", its own or that of a later step, all equally probable; "final", that of the last
step; "episode", that of any step; "geometric", that of a step as far away as the discount says (Eysenbach et al., 2022, arXiv
2206.07568): the step `k` steps later with a probability in proportion to `discount ** k`."""


@entry
@dataclasses.dataclass(frozen=True)
class Relabelling:
    """How sampled steps get other goals.

    Attributes:
      goals: how goals are read and replaced, see `envs.goals.goals_of`.
      share: the probability that a sampled step gets another goal, in [0, 1]. Usual: 0.8.
      by: whose goal it gets.
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
    """The example of an item, with the number of its episode if it may be relabelled; raises ValueError if it may not."""
    if relabelling is None:
        return example
    if discount is None or not hasattr(example, "episode"):
        raise ValueError(
            "relabelling replaces goals of n-step transitions; give a msrl_jax.replay.Transition and its discount=..., or "
            "relabelling=None"
        )
    return example._replace(episode=jax.ShapeDtypeStruct((), jnp.int32))


def number_episodes(ring: Ring, held: list[Any], added: jax.Array, items: Any) -> Any:
    """Items `[T, E, ...]` with the numbers of their episodes, which go on from those that are held and wrap around.

    The lowest bit tells the last step of an episode. So an insertion reads no leaf but the one that depends on it: a leaf that
    is read and overwritten would be copied.
    """

    def newest(held: list[Any]) -> jax.Array:
        at = Indices(jnp.broadcast_to(added - 1, (ring.envs,)), jnp.arange(ring.envs, dtype=jnp.int32))
        return ring.take(held, at, jnp.int32(0), lambda item: item.episode)

    last, ends = jax.vmap(newest)(held).reshape(ring.num_envs), items.terminated | items.truncated
    number = jnp.cumsum(jnp.concatenate([((last >> 1) + (last & 1))[None], ends[:-1]]), 0, dtype=jnp.int32)
    return items._replace(episode=2 * number + ends)


def relabel(
    ring: Ring,
    relabelling: Relabelling,
    discount: float | jax.Array,
    held: list[Any],
    at: Indices,
    offset: jax.Array,
    steps: tuple[jax.Array, ...],
    around: tuple[jax.Array, jax.Array],
    key: jax.Array,
) -> tuple[Any, tuple[jax.Array, ...]]:
    """Draws which windows get another goal, and what would have happened with it.

    Args:
      ring: the ring.
      relabelling: how.
      discount: the discount factor per step, of "geometric".
      held: the leaves of a shard. `[L, E/G, ...]`
      at: the first steps of the windows. `[b]`
      offset: the steps of windows after these. `[S, b]`
      steps: the rewards of the steps, and whether they terminated or truncated an episode. `[S, b]` each
      around: the numbers of steps that the ring holds before `at` and after it. `[b]` int32 each
      key: the key with which the windows were drawn.

    Returns:
      The desired goals, new or old, `[b, ...]`; and `steps` with them. What terminates is to reach the goal, and what the old
      goal does not explain. A step that ends an episode and terminates no longer is truncated.
    """
    goals = relabelling.goals
    whether, which = jax.random.split(key_for("goals", key))
    whether = jax.random.uniform(whether, at.step.shape, jnp.float32) < relabelling.share
    chosen = _choose(ring, relabelling.by, discount, held, at, around, which)
    goal = ring.take(held, at, chosen, lambda item: goals.achieved(item.next_obs))
    desired = ring.take(held, at, jnp.int32(0), lambda item: goals.desired(item.obs))
    achieved = ring.take(held, at, offset, lambda item: goals.achieved(item.next_obs))
    of_goal = jax.vmap(jax.vmap(goals.reward), (0, None))
    _, terminated, truncated = steps
    new_reward, ends = of_goal(achieved, goal)
    ends |= terminated & ~of_goal(achieved, desired)[1]
    new = new_reward, ends, (terminated | truncated) & ~ends

    def pick(x: Any, old: Any) -> Any:
        return jax.vmap(jax.lax.select)(whether, x, old)

    return jax.tree.map(pick, goal, desired), tuple(jnp.where(whether, x, old) for x, old in zip(new, steps, strict=True))


def _choose(
    ring: Ring,
    by: Strategy,
    discount: float | jax.Array,
    held: list[Any],
    at: Indices,
    around: tuple[jax.Array, jax.Array],
    key: jax.Array,
) -> jax.Array:
    """How many steps after `at` the steps are whose achieved goals are taken. `[b]` int32"""

    def number(offset: int | jax.Array) -> jax.Array:
        return ring.take(held, at, jnp.asarray(offset), lambda item: item.episode) >> 1

    own = number(0)

    def reach(direction: int, limit: jax.Array) -> jax.Array:
        """How many steps of the same episode there are in a direction, at most `limit`. `[b]`"""
        found = jnp.zeros_like(limit)
        for bit in reversed(range((ring.steps - 1).bit_length())):
            tried = found + 2**bit
            found = jnp.where((tried <= limit) & (number(direction * tried) == own), tried, found)
        return found

    before, after = around
    after = reach(1, after)
    if by == "final":
        return after
    if by == "geometric":
        return geometric(jax.random.uniform(key, after.shape, jnp.float32), after + 1, discount)
    first = -reach(-1, before) if by == "episode" else jnp.zeros_like(after)
    return jax.random.randint(key, after.shape, first, after + 1, jnp.int32)


def geometric(fraction: jax.Array, count: jax.Array, discount: float | jax.Array) -> jax.Array:
    """The numbers `k` below `count`, with probabilities in proportion to `discount ** k`, by fractions drawn from [0, 1).

    The inverse of the distribution function `(1 - discount ** (k + 1)) / (1 - discount ** count)`. `[...]` int32
    """
    rate = jnp.log(jnp.asarray(discount, jnp.float32))
    drawn = jnp.where(rate < 0, jnp.log1p(fraction * jnp.expm1(count * rate)) / rate, fraction * count)
    return jnp.clip(drawn.astype(jnp.int32), 0, count - 1)
