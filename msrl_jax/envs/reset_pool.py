"""`ResetPool`: resets at a fraction of their cost, for environments whose resets cost more than their steps.

A vectorized environment computes a reset in every step of every copy, because a program without branches has to. Here every
copy has a spare first state, which it takes when its episode ends, and in each step only one of `ratio` adjacent copies gets a
new spare, in turns; of fewer copies, one gets it every few steps. (Craftax's optimistic resets, Matthews et al. 2024, arXiv
2402.16801, share fresh states among the copies instead, so copies whose episodes end in the same step may get the same state.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax._checks import whole
from msrl_jax.envs.agents.base import has_agents
from msrl_jax.envs.base import Environment, PyTree, env_name
from msrl_jax.envs.wrappers import EnvironmentWrapper
from msrl_jax.fragments.metrics import Mean


@dataclass(frozen=True)
class ResetPool(EnvironmentWrapper):
    """An environment whose copies compute a new first state only every `ratio` steps.

    The first states of episodes have the distribution that `reset` gives them. But if an episode is shorter than `ratio` steps,
    the next one of the same copy may begin in the same state again; the metric `repeated_starts` is the share of such episodes.
    With `ratio=1` there are none, and the run is the one without a pool, bit for bit.

    Attributes:
      env: the environment, of one agent.
      ratio: steps between two resets of a copy. Their greatest common divisor with the number of copies is how many adjacent
        copies share the resets. If that is less than `ratio`, not every step computes resets: a branch decides, in which the
        devices of a run agree. (A run of several members has no such branch, so each step computes resets there.)
    """

    env: Environment
    ratio: int = 16

    def __post_init__(self):
        whole(f"ResetPool of {env_name(self.env)}: ratio", self.ratio)
        if has_agents(self.env):
            raise TypeError(f"ResetPool takes environments of one agent, and {env_name(self.env)} has several; leave it out")


def ratio_of(env: Any) -> int:
    """The `ratio` of a `ResetPool` that is the environment, or that wrappers have inside; 1 if there is none."""
    while env is not None:
        if isinstance(env, ResetPool):
            return env.ratio
        env = getattr(env, "env", None)
    return 1


class Spares(NamedTuple):
    """The spare first states of copies.

    Attributes:
      first: the state and the observation with which each environment's next episode begins. `[E, ...]`
      used: whether an episode has begun with the spare. `[E]` bool
      turn: steps since the first copy of a group got a spare, below `ratio`; the same for all copies. `[E]` int32
      starts: number of episodes that began since `pop_repeats`, but the first. `[E]` float32
      repeats: number of these that began with a used spare. `[E]` float32
    """

    first: tuple[PyTree, PyTree]
    used: jax.Array
    turn: jax.Array
    starts: jax.Array
    repeats: jax.Array


def fill(first: tuple[PyTree, PyTree]) -> Spares:
    """New spares that no episode has begun with; `first` are states and observations of `reset`. `[E, ...]`"""
    zero = jnp.zeros(jax.tree.leaves(first)[0].shape[0])
    return Spares(first, zero > 0, zero.astype(jnp.int32), zero, zero)


def renew(
    reset: Callable[..., tuple[PyTree, PyTree]], spares: Spares, arguments: tuple[PyTree, ...], ratio: int, group: int
) -> Spares:
    """Gives a new spare to one copy of each group, if it is the turn of one.

    Groups of adjacent copies that are on one device need no communication.

    Args:
      reset: makes the state and the observation of one copy.
      spares: the spares.
      arguments: the arguments of `reset` for each copy. `[E, ...]`
      ratio: steps between two resets of a copy.
      group: size of a group; it divides the number of copies and `ratio`.

    Returns:
      The spares before the copies take them.
    """

    def grouped(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0] // group, group, *x.shape[1:])

    turn, period = grouped(spares.turn)[:, 0], ratio // group

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return jax.vmap(lambda row, i, x: row.at[i].set(x))(grouped(old), turn // period, new).reshape(old.shape)

    def renewed(spares: Spares) -> Spares:
        chosen = jax.tree.map(lambda x: jax.vmap(lambda row, i: row[i])(grouped(x), turn // period), arguments)
        first = jax.tree.map(put, spares.first, jax.vmap(reset)(*chosen))
        return spares._replace(first=first, used=put(spares.used, jnp.zeros(turn.shape, bool)))

    due = jnp.any(turn % period == 0)
    spares = renewed(spares) if period == 1 else jax.lax.cond(due, renewed, lambda spares: spares, spares)
    return spares._replace(turn=(spares.turn + 1) % ratio)


def take(spares: Spares, done: jax.Array) -> Spares:
    """Counts the copies that begin an episode with their spare. `[E]` bool"""
    starts, repeats = spares.starts + done, spares.repeats + (done & spares.used)
    return spares._replace(used=spares.used | done, starts=starts, repeats=repeats)


def pop_repeats(spares: Spares) -> tuple[Spares, dict[str, Mean]]:
    """Returns the share of episodes since the last call that began with a used spare, and resets the counts."""
    zero = jnp.zeros_like(spares.starts)
    share = Mean(jnp.sum(spares.repeats), jnp.sum(spares.starts))
    return spares._replace(starts=zero, repeats=zero), {"repeated_starts": share}
