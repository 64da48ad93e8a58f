"""Small two-player zero-sum games with exact exploitability.

A policy of a game is a table of probabilities `[2, I, n]`: for each player and each of its `I` information states (what it
knows when it acts), the probabilities of its `n` actions. `information_states` returns the observations of these states, so
that a trained agent can fill the table.

`exploitability` is half of what both players together would gain by a best response to the other's policy: (max u_0(b, p_1) +
max u_1(p_0, b)) / 2, which is 0 exactly in a Nash equilibrium. This is OpenSpiel's convention; its NashConv is twice as large
(Lanctot et al. 2019, arXiv 1908.09453).
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from msrl_jax.envs import spaces
from msrl_jax.envs.base import MaskedObservation, NamedEnvironment, Stepped

_PLAYERS = ("player_0", "player_1")


class RockPaperScissors(NamedEnvironment):
    """Both players choose simultaneously: 0 rock, 1 paper, 2 scissors. The winner gets 1, the loser -1, after one step."""

    name = "RockPaperScissors"
    agents = _PLAYERS
    observation_space = spaces.Box(0, 1, (1,))
    action_space = spaces.Discrete(3)
    payoffs = np.array([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]])
    """Payoffs of the first player: rows are its actions, columns the second player's. `[3, 3]`"""

    def reset(self, key: jax.Array) -> tuple[tuple[()], jax.Array]:
        """Starts an episode; the observations `[2, 1]` are always 0."""
        return (), jnp.zeros((2, 1), jnp.float32)

    def step(self, key: jax.Array, state: tuple[()], action: jax.Array) -> Stepped:
        """Plays the game with the actions `[2]`."""
        payoff = jnp.asarray(self.payoffs, jnp.float32)[action[0], action[1]]
        return (), jnp.zeros((2, 1), jnp.float32), jnp.stack([payoff, -payoff]), jnp.ones(2, bool), jnp.asarray(False)

    def information_states(self) -> jax.Array:
        """Returns the observations in the information states of each player. `[2, I=1, 1]` float32"""
        return jnp.zeros((2, 1, 1), jnp.float32)

    def exploitability(self, policy: ArrayLike) -> float:
        """Returns the players' mean gain by best responses to a policy `[2, I=1, 3]`; at most 1, float64.

        Raises ValueError unless the policy has probabilities.
        """
        one, two = _check_policy(policy, np.ones((2, 1, 3), bool))[:, 0]
        return float(((self.payoffs @ two).max() + (-one @ self.payoffs).max()) / 2)


class KuhnState(NamedTuple):
    """The cards `[2]` int32 (0 jack, 1 queen, 2 king), and the moves so far `[3]` int32 (0 none yet, 1 pass, 2 bet)."""

    cards: jax.Array
    moves: jax.Array
    num_moves: jax.Array


class KuhnPoker(NamedEnvironment):
    """Poker with three cards and one bet (Kuhn 1950).

    Both players pay 1 and get a card. They move alternately, starting with the first player. An action is 0 wait, 1 pass or 2
    bet: the player to move passes or bets, and the other must wait. After a bet, betting is a call (the higher card wins 2),
    and passing is a fold (the player who bet wins 1). After two passes, the higher card wins 1.

    An observation has 11 numbers: the player (2), its card (3), and pass or bet for each of the three moves (6).
    """

    name = "KuhnPoker"
    agents = _PLAYERS
    observation_space = spaces.Box(0, 1, (11,))
    action_space = spaces.Discrete(3)

    def reset(self, key: jax.Array) -> tuple[KuhnState, jax.Array]:
        """Deals the cards; returns the state and the first observations `[2, 11]`."""
        cards = jax.random.permutation(key, jnp.arange(3, dtype=jnp.int32))[:2]
        state = KuhnState(cards, jnp.zeros(3, jnp.int32), jnp.int32(0))
        return state, self._observe(state)

    def step(self, key: jax.Array, state: KuhnState, action: jax.Array) -> Stepped:
        """Plays the action of the player to move, one of the actions `[2]`."""
        cards, moves, count = state
        bets = action[count % 2] == 2
        moves = moves.at[count].set(jnp.where(bets, 2, 1))
        faces_bet = moves[jnp.maximum(count - 1, 0)] == 2
        is_over = (count > 0) & (faces_bet | ~bets)
        folded = is_over & faces_bet & ~bets
        winner = jnp.where(folded, (count + 1) % 2, jnp.argmax(cards))
        amount = jnp.where(is_over, jnp.where(faces_bet & bets, 2.0, 1.0), 0.0)
        reward = jnp.where(jnp.arange(2) == winner, amount, -amount)
        state = KuhnState(cards, moves, count + 1)
        return state, self._observe(state), reward, jnp.full(2, is_over), jnp.asarray(False)

    def action_mask(self, state: KuhnState) -> jax.Array:
        """Pass and bet for the player to move, wait for the other. `[2, 3]` bool"""
        to_move = (jnp.arange(2) == state.num_moves % 2)[:, None]
        return to_move == (jnp.arange(3) > 0)

    def information_states(self) -> MaskedObservation:
        """Returns the observations `[2, I=6, 11]` float32 in the information states, and the legal actions `[2, I, 3]` bool.

        The first player's states are those at the start, then those after its pass and a bet; the second player's are those
        after a pass, then those after a bet. Each has one state per card: jack, queen, king.
        """
        histories = (((0, 0, 0), (1, 2, 0)), ((1, 0, 0), (2, 0, 0)))
        states = [
            [KuhnState(jnp.full(2, card), jnp.array(moves), jnp.int32(sum(m > 0 for m in moves))) for moves, card in pairs]
            for pairs in (itertools.product(moves, range(3)) for moves in histories)
        ]
        obs = [[self._observe(s)[player] for s in player_states] for player, player_states in enumerate(states)]
        masks = [[self.action_mask(s)[player] for s in player_states] for player, player_states in enumerate(states)]
        return MaskedObservation(
            *(jnp.stack([jnp.stack(player_states) for player_states in arrays]) for arrays in (obs, masks))
        )

    def exploitability(self, policy: ArrayLike) -> float:
        """Returns the players' mean gain by best responses to a policy `[2, I=6, 3]`; 11/24 for random play, float64.

        Raises ValueError unless the policy has probabilities of legal actions in the states of `information_states`.
        """
        legal = np.broadcast_to([False, True, True], (2, 6, 3))
        one, two = (p[:, 2].reshape(2, 3) for p in _check_policy(policy, legal))
        pure = np.array(list(itertools.product([0.0, 1.0], repeat=6))).reshape(-1, 2, 3)  # contains a best response
        return float((_kuhn_value(pure, two[None]).max() - _kuhn_value(one[None], pure).min()) / 2)

    def _observe(self, state: KuhnState) -> jax.Array:
        player_and_card = jnp.concatenate(
            [jnp.eye(2, dtype=jnp.float32), jax.nn.one_hot(state.cards, 3, dtype=jnp.float32)], axis=1
        )
        moves = jax.nn.one_hot(state.moves - 1, 2, dtype=jnp.float32).reshape(-1)
        return jnp.concatenate([player_and_card, jnp.broadcast_to(moves, (2, 6))], axis=1)


def _kuhn_value(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Returns the first player's expected payoff, given probabilities of bets `[N, 2, 3]` in the states of
    `information_states`.
    """
    values = []
    for a, b in itertools.permutations(range(3), 2):
        high = 1 if a > b else -1
        bets, calls = one[:, 0, a], one[:, 1, a]
        bets_after_pass, calls_bet = two[:, 0, b], two[:, 1, b]
        after_pass = (1 - bets_after_pass) * high + bets_after_pass * (calls * 2 * high - (1 - calls))
        after_bet = calls_bet * 2 * high + (1 - calls_bet)
        values.append((1 - bets) * after_pass + bets * after_bet)
    return np.mean(values, axis=0)


def _check_policy(policy: ArrayLike, legal: np.ndarray) -> np.ndarray:
    """Returns the policy in float64; raises ValueError unless it has probabilities of legal actions."""
    policy = np.asarray(policy, np.float64)
    if policy.shape != legal.shape:
        raise ValueError(f"the policy has shape {policy.shape}; pass probabilities of shape {legal.shape}")
    rows = ~np.isclose(policy.sum(-1), 1, atol=1e-5) | (policy < 0).any(-1) | ((policy > 1e-5) & ~legal).any(-1)
    if rows.any():
        player, state = (int(i) for i in np.argwhere(rows)[0])
        raise ValueError(
            f"the policy of player {player} in its information state {state} is {policy[player, state]}; pass probabilities of "
            f"the legal actions {np.flatnonzero(legal[player, state]).tolist()} that sum to 1"
        )
    policy = np.where(legal, policy, 0)
    return policy / policy.sum(-1, keepdims=True)
