"""Matches: who sits where, what is counted, and players that look ahead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.games import Player, match, minimax, with_search
from tests.support.many_agents import Homes
from tests.support.tic_tac_toe import at_random, number, perfect, solved, tables

pytestmark = pytest.mark.long

GAME = "pgx:tic_tac_toe"


def always(action):
    """A player of rock, paper, scissors who plays one of them."""
    return Player(lambda params, keys, states, obs: jnp.full((len(keys), 2), action))


def test_paper_beats_rock_in_both_seats():
    outcome = match("RockPaperScissors", always(1), always(0), games=7)
    assert (outcome.wins, outcome.draws, outcome.losses, outcome.score) == (7, 0, 0, 1.0)
    np.testing.assert_array_equal(outcome.began, [True] * 4 + [False] * 3)
    np.testing.assert_array_equal(outcome.lengths, 1)
    shown = "Match(7 games, score 1.000; moving first: 4 won, 0 drawn, 0 lost; moving second: 3 won, 0 drawn, 0 lost)"
    assert repr(outcome) == shown
    lost = match("RockPaperScissors", always(0), always(1), games=4)
    assert (lost.wins, lost.losses, lost.score) == (0, 4, 0.0)


def test_perfect_play_draws_with_itself_and_never_loses():
    assert solved(frozenset(), frozenset())[0] == 0
    with_itself = match(GAME, perfect(), perfect(), games=100)
    assert with_itself.draws == 100 and (with_itself.lengths == 9).all() and 20 < with_itself.began.sum() < 80
    against = match(GAME, perfect(), at_random(), games=200)
    assert against.losses == 0 and against.wins > 150
    other = match(GAME, at_random(), perfect(), games=200)
    assert other.wins == 0 and other.losses > 150


def test_first_moves_may_be_random():
    """Perfect play loses once the other one's advantage is large enough; games without ends are cut off."""
    apart = match(GAME, perfect(), perfect(), games=300, random_moves=4)
    assert apart.wins > 20 and apart.losses > 20
    cut = match(GAME, perfect(), perfect(), games=4, max_steps=3)
    assert not cut.finished.any() and (cut.lengths == 3).all() and "4 cut off at max_steps" in repr(cut)


@pytest.mark.slow
def test_looking_ahead_finds_what_is_there():
    """With three moves: every win in two moves of one's own; the rest is worth 0 to it."""
    game = msrl.envs.make(GAME)
    states, obs = jax.vmap(game.reset)(jax.random.split(jax.random.key(0), 64))
    key = jax.random.key(1)
    for _ in range(4):
        key, now = jax.random.split(key)
        action = jax.vmap(lambda k, m: jax.random.categorical(k, jnp.where(m, 0.0, -jnp.inf)))(
            jax.random.split(now, 64), states.legal_action_mask
        )
        states = jax.vmap(lambda s, a: game.step(jax.random.key(0), s, jnp.full(2, a))[0])(states, action)
    chosen = jax.jit(minimax(game, 3).choose)((), jax.random.split(key, 64), states, obs)
    move = np.take_along_axis(np.asarray(chosen), np.asarray(states.current_player)[:, None], 1)[:, 0]
    wins = 0
    for i in range(64):
        own = frozenset(np.flatnonzero(np.asarray(states._x.board[i]) == states._x.color[i]).tolist())
        other = frozenset(np.flatnonzero(np.asarray(states._x.board[i]) == 1 - states._x.color[i]).tolist())
        if states.terminated[i]:
            continue
        at_once = [c for c in range(9) if c not in own | other and solved(other, own | {c}) == (-1, ())]
        assert move[i] not in own | other
        if at_once:
            assert move[i] in at_once
            wins += 1
    assert wins > 5


def test_who_cannot_play_is_refused():
    game = msrl.envs.make(GAME)
    with pytest.raises(ValueError, match="a match needs two players, but environment 'Homes' does not have two"):
        match(Homes(), always(0), always(0))
    with pytest.raises(ValueError, match="games=0: use an integer of at least 1"):
        match(game, perfect(), perfect(), games=0)
    with pytest.raises(ValueError, match="max_steps=0: use an integer of at least 1"):
        match("RockPaperScissors", always(0), always(0), max_steps=0)
    with pytest.raises(ValueError, match=r"a player chose an action outside Discrete\(3\) in 4 of 4 games"):
        match("RockPaperScissors", always(3), always(0), games=4)
    with pytest.raises(TypeError, match="a player is 3; pass a run's result, or a Player"):
        match(game, perfect(), 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="with_search needs a run's result, not 3"):
        with_search(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"minimax needs a game with to_move\(state\) .* 'KuhnPoker' lacks them"):
        minimax("KuhnPoker", 2)
    with pytest.raises(ValueError, match="a player of 'pgx:tic_tac_toe' cannot play 'RockPaperScissors'; make it for"):
        match("RockPaperScissors", always(0), minimax(game, 2))
    with pytest.raises(ValueError, match="depth=0: use an integer of at least 1"):
        minimax(game, 0)


@pytest.mark.slow
def test_a_trained_agent_plays_with_and_without_search():
    small = {"num_envs": 16, "unroll_length": 8, "hidden_sizes": (16,), "network": "mlp", "eval_episodes": 0}
    result = msrl.train(
        "alphazero",
        GAME,
        total_steps=16 * 8 * 8,
        num_simulations=16,
        num_updates=8,
        batch_size=64,
        replay="positions:2048",
        learning_rate="linear:3e-3:1e-3",
        discount=0.99,
        **small,
    )
    alone, searching = match(GAME, result, at_random(), games=200), match(GAME, with_search(result), at_random(), games=200)
    assert alone.finished.all() and searching.score > max(alone.score, 0.8)
    with pytest.raises(ValueError, match="a player of 'pgx:tic_tac_toe' cannot play 'KuhnPoker'"):
        match("KuhnPoker", with_search(result), always(0))
    other = msrl.train("self_play", GAME, total_steps=16 * 8, num_opponents=2, **small)
    assert match(GAME, other, at_random(), games=20).finished.all()
    with pytest.raises(ValueError, match=r"was trained in 'pgx:tic_tac_toe', with observations .* of 'KuhnPoker' are"):
        match("KuhnPoker", other, other)
    with pytest.raises(ValueError, match="an agent of 'self_play' does not search; pass its result directly to a match"):
        with_search(other)
    with pytest.raises(ValueError, match="num_simulations=0: use an integer of at least 1"):
        with_search(result, 0)


def test_numbers_of_positions():
    game = msrl.envs.make(GAME)
    state = game.reset(jax.random.key(0))[0]
    assert number(state) == 0 and tables()[0][0].all()
    state = game.step(jax.random.key(0), state, jnp.full(2, 4))[0]
    assert number(state) == 2 * 3**4 and tables()[1][2 * 3**4] == 0
    np.testing.assert_array_equal(np.flatnonzero(tables()[0][2 * 3**4]), [0, 2, 6, 8])  # a corner
