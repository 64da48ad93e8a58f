"""Elo ratings: by hand, beside a fit by scipy, of matches that are known, and what is refused."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit

from msrl_jax.games import Player, at_random, bradley_terry, minimax, round_robin
from tests.support.many_agents import Homes

pytestmark = pytest.mark.long


def two(points, **options):
    return bradley_terry(("a", "b"), np.array([[0, points[0]], [points[1], 0]]), **options)


def test_two_players_by_hand():
    """Of 100 games, 70 won and 10 drawn: the share `p` of points is 3/4; its logit has the variance `1 / (100 p (1 - p))`."""
    found = two((75, 25), anchor="b", rating=1000, virtual_draws=0)
    np.testing.assert_allclose(found.elo, [1000 + 400 * math.log10(3), 1000])
    np.testing.assert_allclose(found.error, [400 / math.log(10) / math.sqrt(100 * 0.75 * 0.25), 0])
    low, high = found.interval[0]
    np.testing.assert_allclose([low, high], found.elo[0] + np.array([-1, 1]) * 1.96 * found.error[0])
    assert (found.games == [[0, 100], [100, 0]]).all()
    rows = [
        "player   Elo  95% interval  points  games",
        "a       1191  1112 to 1269      75    100",
        "b       1000         fixed      25    100",
    ]
    assert repr(found) == "\n".join(rows)


def test_who_won_all_games_is_rated_as_with_one_more_draw():
    found = two((20, 0), anchor="b")
    np.testing.assert_allclose(found.elo[0], 400 * math.log10(20.5 / 0.5))
    assert found.interval[0, 0] < found.elo[0] - 400  # nobody knows how much better
    np.testing.assert_allclose(two((0, 20)).elo[1], found.elo[0])  # the first one is the anchor
    message = "'b' has no points against a, directly or indirectly, so ratings are infinite; use virtual_draws=1"
    with pytest.raises(ValueError, match=message):
        two((20, 0), virtual_draws=0)


@pytest.mark.parametrize("virtual_draws", [0.0, 1.0])
def test_ratings_and_errors_are_those_of_another_fit(virtual_draws):
    """scipy minimizes the likelihood; the errors come from its second differences. Some players never met."""
    rng = np.random.default_rng(0)
    points = np.triu(rng.integers(1, 60, (6, 6)) / 2, 1)
    points += np.tril(rng.integers(1, 60, (6, 6)) / 2, -1)
    points[0, 3] = points[3, 0] = 0
    points[1, 4] = 300.0
    found = bradley_terry("abcdef", points, anchor="c", rating=1500, virtual_draws=virtual_draws)
    met = (points + points.T) > 0

    def loss(free):
        strength = np.insert(free, 2, 0.0)
        return -((points + virtual_draws / 2 * met) * np.log(expit(strength[:, None] - strength))).sum()

    best = minimize(loss, np.zeros(5), method="BFGS", options={"gtol": 1e-6}).x
    scale, h = 400 / np.log(10), 1e-3 * np.eye(5)
    np.testing.assert_allclose(np.delete(found.elo, 2), 1500 + scale * best, atol=0.01)
    curvature = [
        [(loss(best + a + b) - loss(best + a - b) - loss(best - a + b) + loss(best - a - b)) / 4e-6 for b in h] for a in h
    ]
    np.testing.assert_allclose(np.delete(found.error, 2), scale * np.sqrt(np.diag(np.linalg.inv(curvature))), rtol=1e-3)
    assert (found.elo[2], found.error[2]) == (1500, 0)


def test_far_apart_players_are_found():
    """A chain in which each wins 999,999 of a million games against the next."""
    points = np.diag(np.full(7, 1e6 - 1), 1) + np.diag(np.ones(7), -1)
    found = bradley_terry([str(i) for i in range(8)], points, virtual_draws=0)
    np.testing.assert_allclose(np.diff(found.elo), -400 * np.log10(1e6 - 1), rtol=1e-6)


def always(action):
    return Player(lambda params, keys, states, obs: jnp.full((len(keys), 2), action))


def test_all_play_all():
    """Paper beats rock, which beats scissors, which beat paper: all are equally good."""
    players = {"rock": always(0), "paper": always(1), "scissors": always(2), "rock again": always(0)}
    found = round_robin("RockPaperScissors", players, games=7)
    np.testing.assert_array_equal(found.points, [[0, 0, 7, 3.5], [7, 0, 0, 7], [0, 7, 0, 0], [3.5, 0, 7, 0]])
    assert (found.games == 7 * (1 - np.eye(4))).all() and found.elo[0] == 0
    np.testing.assert_allclose(found.elo[3], 0, atol=1e-6)
    ring = {name: players[name] for name in ("rock", "paper", "scissors")}
    np.testing.assert_allclose(round_robin("RockPaperScissors", ring, games=7, anchor="paper", rating=100).elo, 100)


def test_games_that_were_cut_off_are_told():
    """No game of Kuhn poker ends with its first move."""
    players = {name: at_random("KuhnPoker") for name in ("one", "two", "three")}
    found = round_robin("KuhnPoker", players, games=5, max_steps=1)
    assert found.cut == 15 and repr(found).endswith("\n15 games were cut off at max_steps")


@pytest.mark.slow
def test_who_looks_further_ahead_is_rated_higher():
    game = "pgx:tic_tac_toe"
    players = {"at random": at_random(game), "depth 1": minimax(game, 1), "depth 2": minimax(game, 2)}
    found = round_robin(game, players, games=100)
    assert (np.diff(found.elo) > 50).all() and found.interval[1, 0] > 0
    again = round_robin(game, players, games=100)
    np.testing.assert_array_equal(found.points, again.points)


def test_a_player_at_random_draws_legal_actions_alike():
    chosen = at_random("RockPaperScissors").choose((), jax.random.split(jax.random.key(0), 3000), (), jnp.zeros((3000, 2, 1)))
    assert chosen.shape == (3000, 2)
    np.testing.assert_allclose(np.bincount(np.ravel(chosen)) / 6000, 1 / 3, atol=0.03)


def test_what_does_not_fit_is_refused():
    rock = {"rock": always(0), "paper": always(1)}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"players": {"rock": always(0)}}, r"players=\['rock'\]: pass at least two players, with different names"),
        ({"anchor": "stone"}, "anchor='stone': use the name of a player: rock, paper"),
        ({"rating": math.nan}, "rating=nan: use a finite number"),
        ({"virtual_draws": -1}, "virtual_draws=-1: use a finite number of at least 0"),
        ({"games": 0}, "games=0: use an integer of at least 1"),
        ({"env": Homes()}, "a match needs two players, but environment 'Homes' does not have two"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            round_robin(**{"env": "RockPaperScissors", "players": rock} | options)
    with pytest.raises(TypeError, match="players is a list; pass a dict of players by name"):
        round_robin("RockPaperScissors", [always(0), always(1)])  # type: ignore[arg-type]
    for points in ([[0, 1]], [[0, -1], [1, 0]], [[1, 1], [1, 0]], [[0, np.nan], [1, 0]]):
        with pytest.raises(ValueError, match="pass finite numbers of at least 0, one for each two of 2 players, and 0 for"):
            bradley_terry(("a", "b"), np.array(points))
    with pytest.raises(ValueError, match="'a' has no points against b, directly or indirectly"):
        bradley_terry(("a", "b"), np.zeros((2, 2)))
