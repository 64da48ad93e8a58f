"""Tic-tac-toe solved in plain Python, and a player who takes its best moves; and all games that a player may play."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import MaskedObservation
from msrl_jax.envs.masks import sample_legal
from msrl_jax.games import Player

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


@functools.cache
def solved(own, other):
    """The value to who is to move, and its best moves; both have sets of cells. All lines of play, without pruning."""
    if any(set(line) <= other for line in LINES):
        return -1, ()
    free = [cell for cell in range(9) if cell not in own | other]
    if not free:
        return 0, ()
    values = {cell: -solved(other, own | {cell})[0] for cell in free}
    best = max(values.values())
    return best, tuple(cell for cell, value in values.items() if value == best)


@functools.cache
def tables():
    """For every position by its number to base 3 (0 empty, 1 own, 2 the other's): which moves are best, and the value."""
    best, value = np.zeros((3**9, 9), bool), np.zeros(3**9, np.int32)
    solved(frozenset(), frozenset())
    todo, seen = [(frozenset(), frozenset())], set()
    while todo:
        own, other = position = todo.pop()
        if position in seen:
            continue
        seen.add(position)
        number = sum(3**c for c in own) + 2 * sum(3**c for c in other)
        value[number], moves = solved(own, other)
        best[number, list(moves)] = True
        if moves:
            todo += [(other, own | {cell}) for cell in range(9) if cell not in own | other]
    assert len(seen) == 5478, "all positions of the game"
    return best, value


def number(state):
    """The number of a position, as who is to move sees it. `[...]`"""
    own = state._x.board == state._x.color[..., None]
    cell = jnp.where(state._x.board < 0, 0, jnp.where(own, 1, 2))
    return (cell * 3 ** jnp.arange(9)).sum(-1)


def perfect():
    """A player who takes one of the best moves at random."""

    def choose(params, keys, states, obs):
        best = jnp.asarray(tables()[0])[number(states)]
        action = jax.vmap(sample_legal)(keys, best)
        return jnp.where(jnp.arange(2) == states.current_player[:, None], action[:, None], 9)

    return Player(choose)


def at_random():
    """A player who takes a legal move at random."""
    both = jax.vmap(lambda key, mask: jax.vmap(sample_legal)(jax.random.split(key), mask))
    return Player(lambda params, keys, states, obs: both(keys, obs.action_mask))


def lost_games(game, player, seat):
    """Of all games that may happen against a player without randomness who moves first (`seat` 0) or second: all, and lost."""
    size = 256
    observe = jax.vmap(lambda s: type(game)._observe(game, s))
    masks = jax.vmap(game.action_mask)

    @jax.jit
    def move(params, states):
        keys = jax.random.split(jax.random.key(0), size)
        action = player.choose(params, keys, states, MaskedObservation(observe(states), masks(states)))
        return jnp.take_along_axis(action, states.current_player[:, None], 1)[:, 0]

    @jax.jit
    def after(states, action):
        return jax.vmap(lambda s, a: game.step(jax.random.key(0), s, jnp.full(2, a))[0])(states, action)

    start = game.reset(jax.random.key(0))[0]
    states, total, lost = jax.tree.map(lambda x: np.asarray(x)[None], start), 0, 0
    ours = int(start.current_player) ^ seat
    for turn in range(9):
        count = len(states.current_player)
        if not count:
            break
        if turn % 2 == seat:
            rows = [np.arange(i, i + size) % count for i in range(0, count, size)]
            chosen = [move(player.params, jax.tree.map(lambda x, r=r: x[r], states)) for r in rows]
            action = np.concatenate(chosen)[:count]
        else:
            legal = np.asarray(states.legal_action_mask)
            which, action = np.nonzero(legal)
            states = jax.tree.map(lambda x, w=which: x[w], states)
        rows = np.resize(np.arange(len(action)), -(-len(action) // size) * size).reshape(-1, size)
        parts = [after(jax.tree.map(lambda x, r=r: x[r], states), jnp.asarray(action[r])) for r in rows]
        count = len(action)
        states = jax.tree.map(lambda *x, n=count: np.concatenate(x)[:n], *parts)
        over = np.asarray(states.terminated)
        total, lost = total + over.sum(), lost + (states.rewards[over, ours] < 0).sum()
        states = jax.tree.map(lambda x, o=over: x[~o], states)
    return int(total), int(lost)
