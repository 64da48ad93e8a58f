"""`ResetPool`: first states of episodes that are computed ahead, for resets that cost more than steps."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax.envs.base import Environment, PyTree, env_name, has_agents
from msrl_jax.envs.wrappers import EnvironmentWrapper
from msrl_jax.fragments.metrics import Mean
from msrl_jax.fragments.support.checks import whole
from msrl_jax.fragments.support.tracebacks import entry

_SPARE = 0x73706172  # derives the key of a spare state from the key that a copy splits


@entry
@dataclass(frozen=True)
class ResetPool(EnvironmentWrapper):
    """Computes a new first state of each copy only every `ratio` steps, for resets that cost more than steps.

    A vectorized environment computes a reset in every step of every copy, because a program without branches has to. Here
    every copy has a spare first state, which it uses when its episode ends, and in each step only one of `ratio` adjacent
    copies, in rotation, gets a new spare; with fewer copies, one gets a new spare every few steps. (Craftax's optimistic
    resets, Matthews et al. 2024, arXiv 2402.16801, share new states among the copies instead, so copies whose episodes end in
    the same step may get the same state.)

    The first states of episodes have the same distribution as with `reset`. But if an episode is shorter than `ratio` steps,
    the next episode of the same copy may start in the same state; the metric `repeated_starts` is the share of such episodes.
    With `ratio=1` there are none, and the run is bit-identical to one without a pool.

    Attributes:
      env: the environment, with one agent.
      ratio: number of steps between two resets of a copy. The greatest common divisor of `ratio` and the number of copies is
        the number of adjacent copies that share resets. If it is less than `ratio`, only some steps compute resets, in a
        branch on which all devices of a run agree. (With several population members, every step computes resets.)
    """

    env: Environment
    ratio: int = 16

    def __post_init__(self):
        whole(f"ResetPool of {env_name(self.env)}: ratio", self.ratio)
        if has_agents(self.env):
            raise TypeError(f"ResetPool needs a single-agent environment, and {env_name(self.env)} has several; remove it")


class Spares(NamedTuple):
    """The spare first states of copies whose environment is a `ResetPool`. `[E, ...]`"""

    first: tuple[PyTree, PyTree]  # the state and the observation that the next episode starts with
    used: jax.Array  # bool: whether an episode has started with the spare
    turn: jax.Array  # int32: steps since the first copy of a group got a spare, below `ratio`; the same for all copies
    starts: jax.Array  # float32: number of episodes started since `pop_episodes`, except the first
    repeats: jax.Array  # float32: number of these that started with a used spare


def first_spares(reset: Callable[..., tuple[PyTree, PyTree]], keys: jax.Array, source: Any) -> Spares:
    """Returns the spares of copies that start with these keys `[E]`."""
    first = jax.vmap(lambda key, source: reset(jax.random.fold_in(key, _SPARE), source))(keys, source)
    zero = jnp.zeros(len(keys), jnp.float32)
    return Spares(first, zero > 0, zero.astype(jnp.int32), zero, zero)


def refill(reset: Callable[..., tuple[PyTree, PyTree]], spares: Spares, arguments: tuple[PyTree, ...], ratio: int) -> Spares:
    """Renews the spare of one copy of each group by `reset(*arguments)`, if due."""
    group = math.gcd(len(spares.turn), ratio)

    def split_groups(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0] // group, group, *x.shape[1:])

    turn, period = split_groups(spares.turn)[:, 0], ratio // group

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        return jax.vmap(lambda row, i, x: row.at[i].set(x))(split_groups(old), turn // period, new).reshape(old.shape)

    def renew(spares: Spares) -> Spares:
        due_arguments = jax.tree.map(lambda x: jax.vmap(lambda row, i: row[i])(split_groups(x), turn // period), arguments)
        first = jax.tree.map(write, spares.first, jax.vmap(reset)(*due_arguments))
        return spares._replace(first=first, used=write(spares.used, jnp.zeros(turn.shape, bool)))

    due = jnp.any(turn % period == 0)
    spares = renew(spares) if period == 1 else jax.lax.cond(due, renew, lambda spares: spares, spares)
    return spares._replace(turn=(spares.turn + 1) % ratio)


def count_starts(spares: Spares, ended: jax.Array) -> Spares:
    """Counts the episodes that start, after those that `ended` `[E]` bool, with spares that are used from now on."""
    starts, repeats = spares.starts + ended, spares.repeats + (ended & spares.used)
    return spares._replace(used=spares.used | ended, starts=starts, repeats=repeats)


def pop_starts(spares: Spares) -> tuple[Spares, Mean]:
    """Returns the share of episodes that started with a used spare; its counts start again from 0."""
    zero = jnp.zeros_like(spares.starts)
    return spares._replace(starts=zero, repeats=zero), Mean(jnp.sum(spares.repeats), jnp.sum(spares.starts))
