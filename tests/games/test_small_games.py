"""Rock-paper-scissors and Kuhn poker: their rules, and exploitability against known values."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import envs
from msrl_jax.games.small_games import KuhnPoker, KuhnState, RockPaperScissors

WAIT, PASS, BET = range(3)
KUHN = {
    (PASS, PASS): lambda high: high,
    (PASS, BET, PASS): lambda high: -1,
    (PASS, BET, BET): lambda high: 2 * high,
    (BET, PASS): lambda high: 1,
    (BET, BET): lambda high: 2 * high,
}
"""What the first player wins with each history; `high` is 1 if it has the higher card, else -1."""


@pytest.mark.parametrize("name", ["RockPaperScissors", "KuhnPoker"])
def test_the_games_are_registered_and_conform(name):
    venv = envs.vectorize(envs.make(name), 2)
    assert isinstance(venv, envs.VectorizedAgents) and name in envs.names()


def test_the_rules_of_rock_paper_scissors():
    env = RockPaperScissors()
    actions = jnp.array(list(itertools.product(range(3), repeat=2)))
    _, _, reward, terminated, truncated = jax.vmap(lambda a: env.step(jax.random.key(0), (), a))(actions)
    beats = {(1, 0), (2, 1), (0, 2)}
    want = [[((a, b) in beats) - ((b, a) in beats), ((b, a) in beats) - ((a, b) in beats)] for a, b in actions.tolist()]
    np.testing.assert_array_equal(reward, want)
    assert terminated.all() and not truncated.any()


def test_the_rules_of_kuhn_poker():
    env = KuhnPoker()
    deals = list(itertools.permutations(range(3), 2))
    games = [(deal, moves) for deal in deals for moves in itertools.product((PASS, BET), repeat=3)]

    def play(cards, moves):
        def step(state, move):
            mask, mover = env.action_mask(state), state.num_moves % 2
            action = jnp.where(jnp.arange(2) == mover, move, WAIT)
            state, obs, reward, terminated, _ = env.step(jax.random.key(0), state, action)
            return state, (mask, obs, reward, terminated)

        return jax.lax.scan(step, KuhnState(cards, jnp.zeros(3, jnp.int32), jnp.int32(0)), moves)[1]

    played = jax.jit(jax.vmap(play))(*(jnp.array(x, jnp.int32) for x in zip(*games, strict=True)))
    masks, obs, reward, terminated = map(np.asarray, played)
    for game, (cards, moves) in enumerate(games):
        (length,) = (n for n in (2, 3) if moves[:n] in KUHN)
        wins = KUHN[moves[:length]](1 if cards[0] > cards[1] else -1)
        np.testing.assert_array_equal(reward[game, :length], [[0, 0]] * (length - 1) + [[wins, -wins]])
        np.testing.assert_array_equal(terminated[game, :length], [[False] * 2] * (length - 1) + [[True] * 2])
        for t in range(length):
            np.testing.assert_array_equal(masks[game, t, t % 2], [False, True, True])
            np.testing.assert_array_equal(masks[game, t, 1 - t % 2], [True, False, False])
            for player in range(2):
                seen = np.eye(2)[player].tolist() + np.eye(3)[cards[player]].tolist()
                seen += [float(move == kind) for move in (*moves[: t + 1], 0, 0)[:3] for kind in (PASS, BET)]
                np.testing.assert_array_equal(obs[game, t, player], seen)


def test_the_cards_of_kuhn_poker_are_dealt_evenly():
    cards = jax.vmap(lambda key: KuhnPoker().reset(key)[0].cards)(jax.random.split(jax.random.key(0), 3000))
    counts = np.bincount(np.asarray(cards) @ [3, 1], minlength=9).reshape(3, 3)
    assert (np.diag(counts) == 0).all() and (counts[~np.eye(3, dtype=bool)] > 400).all()


def test_information_states_are_what_players_observe_when_they_act():
    env = KuhnPoker()
    obs, mask = env.information_states()
    assert (np.asarray(mask) == [False, True, True]).all() and mask.shape == (2, 6, 3)
    histories = {0: [(), (PASS, BET)], 1: [(PASS,), (BET,)]}
    for player, own in histories.items():
        for state, (moves, card) in enumerate(itertools.product(own, range(3))):
            seen = np.eye(2)[player].tolist() + np.eye(3)[card].tolist()
            seen += [float(move == kind) for move in (*moves, 0, 0, 0)[:3] for kind in (PASS, BET)]
            np.testing.assert_array_equal(obs[player, state], seen)
    assert RockPaperScissors().information_states().shape == (2, 1, 1)


def kuhn(first, second):
    """A table from the probabilities of bets for jack, queen, king: at the start, after pass and bet; after pass, after bet."""
    bets = np.array([first, second], float).reshape(2, 6)
    return np.stack([np.zeros((2, 6)), 1 - bets, bets], axis=-1)


def test_exploitability_of_kuhn_poker():
    """Known values: OpenSpiel's for random play; Kuhn (1950) for the equilibria, one for each alpha."""
    env, third = KuhnPoker(), 1 / 3
    assert env.exploitability(kuhn([[0.5] * 3] * 2, [[0.5] * 3] * 2)) == pytest.approx(0.4583333, abs=1e-7)
    second = [[third, 0, 1], [0, third, 1]]
    for alpha in (0, 0.1, third):
        first = [[alpha, 0, 3 * alpha], [0, alpha + third, 1]]
        assert env.exploitability(kuhn(first, second)) == pytest.approx(0, abs=1e-12)
    assert env.exploitability(kuhn([[0.5, 0, 1], [0, 0.5 + third, 1]], second)) > 0.01  # alpha above 1/3
    # Who always passes loses 1 whenever the other one bets, so both best responses win 1: NashConv is 2.
    assert env.exploitability(kuhn([[0] * 3] * 2, [[0] * 3] * 2)) == pytest.approx(1)


def test_exploitability_of_rock_paper_scissors():
    env, rock = RockPaperScissors(), [1, 0, 0]
    assert env.exploitability(np.full((2, 1, 3), 1 / 3)) == pytest.approx(0, abs=1e-12)
    assert env.exploitability([[rock], [rock]]) == 1
    assert env.exploitability([[rock], [[1 / 3] * 3]]) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (np.full((2, 6, 3), 1 / 3), r"player 0 in its information state 0 is .*; pass .* of the legal actions \[1, 2\]"),
        (np.full((2, 6, 3), 0.5) * [0, 1, 0.5], r"player 0 in its information state 0 .* sum to 1"),
        (np.full((6, 3), 0.5), r"the policy has shape \(6, 3\); pass probabilities of shape \(2, 6, 3\)"),
    ],
)
def test_what_is_no_policy_is_refused(policy, message):
    with pytest.raises(ValueError, match=message):
        KuhnPoker().exploitability(policy)
