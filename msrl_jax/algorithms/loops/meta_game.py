"""The game between past policies: a payoff matrix over pairs, and the equilibrium that weighs them.

Lanctot et al., 2017, arXiv 1711.00832 (PSRO). In the shape descriptions, `K` is the number of places for past policies.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_ROUNDS = 2048
"""Rounds of the replicator dynamics."""

_EXPLORATION = 0.1
"""Share of opponents that are drawn uniformly, so that all pairs meet."""


class Standings(NamedTuple):
    """What is known of the games between past policies, and of the current one against them.

    Attributes:
      payoff: the mean return of one policy against another. shape=(K, K)
      weights: the equilibrium of that game. shape=(K,)
      total: the sum of the current policy's returns against each, since the last policy entered. shape=(K,)
      games: their number. shape=(K,)
    """

    payoff: jax.Array
    weights: jax.Array
    total: jax.Array
    games: jax.Array


def no_games(size: int) -> Standings:
    """Standings of no policy."""
    zero = jnp.zeros(size)
    return Standings(jnp.zeros((size, size)), zero, zero, zero)


def enter(standings: Standings, slot: jax.Array, filled: jax.Array) -> Standings:
    """Adds the current policy to the game, with its results against the others.

    Args:
      standings: the standings, with the results of the current policy.
      slot: its place, of which it may drive out another policy. `[]` int32
      filled: the number of policies, it included. `[]` int32

    Returns:
      The standings, with new weights and no results of the next policy.
    """
    size = standings.games.shape[0]
    row = jnp.where(standings.games > 0, standings.total / jnp.maximum(standings.games, 1), 0.0)
    payoff = standings.payoff.at[slot].set(row).at[:, slot].set(-row).at[slot, slot].set(0.0)
    there = jnp.arange(size) < filled
    return no_games(size)._replace(payoff=payoff, weights=replicator_dynamics(payoff, there))


def draw(standings: Standings, key: jax.Array, filled: jax.Array, count: int) -> jax.Array:
    """Draws opponents by their weights, a tenth of them uniformly.

    Args:
      standings: the standings.
      key: the random numbers.
      filled: the number of policies, at least 1. `[]` int32
      count: the number of opponents, `G`.

    Returns:
      Their places. `[G]` int32
    """
    there = jnp.arange(standings.games.shape[0]) < filled
    probability = (1 - _EXPLORATION) * standings.weights + _EXPLORATION * there / filled
    return jax.random.categorical(key, jnp.log(probability), shape=(count,)).astype(jnp.int32)


def replicator_dynamics(payoff: jax.Array, there: jax.Array, rounds: int = _ROUNDS) -> jax.Array:
    """An approximate equilibrium of a symmetric game whose payoffs sum to zero.

    The mean over the rounds of discrete replicator dynamics, which are multiplicative weights (Freund and Schapire, 1999): the
    best reply to it gains at most `sqrt(2 log(K) / rounds)` of the largest payoff.

    Args:
      payoff: the row's payoff against the column, antisymmetric. `[K, K]`
      there: whether there is such a policy. `[K]` bool
      rounds: the number of rounds.

    Returns:
      The probability of each policy; 0 where there is none. `[K]`
    """
    both = there[:, None] & there
    scaled = jnp.where(both, payoff / jnp.maximum(jnp.max(jnp.abs(payoff), initial=0.0, where=both), 1e-8), 0.0)
    rate = jnp.sqrt(8 * jnp.log(jnp.maximum(there.sum(), 2)) / rounds) / 2  # for payoffs from -1 to 1

    def step(logits: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        mixture = jax.nn.softmax(jnp.where(there, logits, -jnp.inf))
        return logits + rate * (scaled @ mixture), mixture

    _, mixtures = jax.lax.scan(step, jnp.zeros(there.shape), None, length=rounds)
    return mixtures.mean(0)
