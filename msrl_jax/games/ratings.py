"""Ratings of players of one game, from round-robin matches.

In the shape descriptions, `P` is the number of players.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from msrl_jax.envs import MultiAgentEnvironment, make
from msrl_jax.fragments.support.checks import check_seed
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.games.matches import Player, match
from msrl_jax.run.evaluation.evaluate import MAX_STEPS
from msrl_jax.run.result import Result

ELO = 400 / math.log(10)  # Elo points per unit of log strength


@dataclasses.dataclass(frozen=True)
class Ratings:
    """Players of a game, with the results against each other; printed, the best comes first.

    Attributes:
      players: their names. `P` of them
      points: points of each player (rows) against each other one (columns): 1 for a win, 1/2 for a draw. shape=[P, P],
        dtype=float64
      games: number of games between them. shape=[P, P], dtype=int64
      elo: their Elo ratings. shape=[P], dtype=float64
      error: standard errors of the differences from the anchored player. shape=[P], dtype=float64
      cut: number of games cut off at `max_steps`, whose points are those of the returns so far
    """

    players: tuple[str, ...]
    points: np.ndarray
    games: np.ndarray
    elo: np.ndarray
    error: np.ndarray
    cut: int = 0

    @property
    def interval(self) -> np.ndarray:
        """Lower and upper ends of 95% intervals, 1.96 standard errors from the ratings. shape=[P, 2]"""
        return self.elo[:, None] + 1.96 * self.error[:, None] * np.array([-1, 1])

    def __repr__(self) -> str:
        rows = [("player", "Elo", "95% interval", "points", "games")]
        for i in np.argsort(-self.elo, kind="stable"):
            low, high = self.interval[i]
            ends = f"{low:.0f} to {high:.0f}" if self.error[i] else "fixed"
            rows.append((self.players[i], f"{self.elo[i]:.0f}", ends, f"{self.points[i].sum():g}", str(self.games[i].sum())))
        first_width, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = [
            "  ".join([r[0].ljust(first_width), *(text.rjust(w) for text, w in zip(r[1:], widths, strict=True))]) for r in rows
        ]
        return "\n".join([*lines, *([f"{self.cut} games were cut off at max_steps"] if self.cut else [])])


@entry
def round_robin(
    env: str | MultiAgentEnvironment,
    players: Mapping[str, Result | Player],
    games: int = 200,
    seed: int = 0,
    *,
    anchor: str | None = None,
    rating: float = 0.0,
    virtual_draws: float = 1.0,
    random_moves: int = 0,
    max_steps: int = MAX_STEPS,
) -> Ratings:
    """Rates players by a round robin; each player has the first seat in half of the games of a match.

    Args:
      env: the game, or its name.
      players: the players by name: results, which play their most probable actions, or `Player`s.
      games: number of games per match.
      seed: seed of the matches.
      anchor: name of the player whose rating is fixed; the first one if None.
      rating: the rating of that player.
      virtual_draws: as in `bradley_terry`.
      random_moves: number of steps at the start of every game with random legal actions.
      max_steps: maximum number of steps of a game.

    Returns:
      The ratings.

    Raises:
      TypeError: if players have no names, or a value is not a player.
      ValueError: if there are fewer than two players, no player is named `anchor`, or as in `match` and `bradley_terry`.
    """
    if not isinstance(players, Mapping):
        raise TypeError(f"players is a {type(players).__name__}; pass a dict of players by name")
    names = tuple(players)
    _check_arguments(names, anchor, rating, virtual_draws)
    game = make(env) if isinstance(env, str) else env
    points, cut = np.zeros((len(names), len(names))), 0
    pairs = list(itertools.combinations(range(len(names)), 2))
    seeds = np.random.default_rng(check_seed(seed)).integers(2**31, size=len(pairs))  # a different seed for each match
    for (i, j), of_match in zip(pairs, seeds, strict=True):
        one, two = players[names[i]], players[names[j]]
        m = match(game, one, two, games, int(of_match), random_moves=random_moves, max_steps=max_steps)  # type: ignore[arg-type]
        points[i, j], points[j, i] = m.wins + m.draws / 2, m.losses + m.draws / 2
        cut += int((~m.finished).sum())
    ratings = bradley_terry(names, points, anchor=anchor, rating=rating, virtual_draws=virtual_draws)
    return dataclasses.replace(ratings, cut=cut)


@entry
def bradley_terry(
    players: Sequence[str], points: np.ndarray, *, anchor: str | None = None, rating: float = 0.0, virtual_draws: float = 1.0
) -> Ratings:
    """Elo ratings by maximum likelihood (Bradley and Terry, 1952, doi:10.2307/2334029), where a draw is half a win.

    The expected share of points of a player is `1 / (1 + 10 ** (-d / 400))`, where `d` is the difference of the ratings.
    Standard errors come from the Fisher information, which counts every point as a game won or lost; draws vary less, so
    intervals tend to be too wide. Games are assumed independent; those of two deterministic players are not.

    Args:
      players: names of the players.
      points: points of each player (rows) against each other one (columns); the sum of both is the number of games. `[P, P]`
      anchor: name of the player whose rating is fixed; the first one if None.
      rating: the rating of that player.
      virtual_draws: number of draws added for every two players who met. They keep the rating of a player that won, or lost,
        all games finite; 0 gives the maximum likelihood of the games alone.

    Returns:
      The ratings.

    Raises:
      ValueError: if there are fewer than two players, no player is named `anchor`, points are not numbers of at least 0, or
        ratings are infinite: some players have no points against all others, possibly because they never met.
    """
    names = tuple(players)
    fixed = _check_arguments(names, anchor, rating, virtual_draws)
    points = np.array(points, np.float64)
    if points.shape != (len(names),) * 2 or not (np.isfinite(points) & (points >= 0)).all() or points.diagonal().any():
        raise ValueError(
            f"points have shape {points.shape}; pass finite numbers of at least 0, one for each two of {len(names)} players, "
            "and 0 for a player against itself"
        )
    games = points + points.T
    scored = points + virtual_draws / 2 * (games > 0)
    _check_finite(names, scored)
    total, free = scored + scored.T, np.arange(len(names)) != fixed
    strength = np.zeros(len(names))
    while True:
        share = 1 / (1 + np.exp(strength[None] - strength[:, None]))
        slope, weight = (scored - total * share).sum(1), total * share * (1 - share)
        information = np.diag(weight.sum(1)) - weight
        step = np.linalg.solve(information[np.ix_(free, free)], slope[free])
        largest = np.abs(step).max()
        # Newton steps increase the likelihood if no difference changes by more than 1; curvatures then change by less than e.
        strength[free] += step / max(1.0, 2 * largest)
        if largest < 1e-9:
            break
    error = np.zeros(len(names))
    error[free] = ELO * np.sqrt(np.linalg.inv(information[np.ix_(free, free)]).diagonal())
    return Ratings(names, points, np.rint(games).astype(np.int64), rating + ELO * strength, error)


def _check_arguments(names: tuple[str, ...], anchor: str | None, rating: float, virtual_draws: float) -> int:
    """Returns the number of the anchored player; raises ValueError if an argument is invalid."""
    if len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(f"players={list(names)}: pass at least two players, with different names")
    if anchor is not None and anchor not in names:
        raise ValueError(f"anchor={anchor!r}: use the name of a player: {', '.join(names)}")
    if not math.isfinite(rating):
        raise ValueError(f"rating={rating!r}: use a finite number")
    if not (math.isfinite(virtual_draws) and virtual_draws >= 0):
        raise ValueError(f"virtual_draws={virtual_draws!r}: use a finite number of at least 0")
    return 0 if anchor is None else names.index(anchor)


def _check_finite(names: tuple[str, ...], scored: np.ndarray) -> None:
    """Raises ValueError unless every player is linked to every other one by points (Ford, 1957, doi:10.2307/2308513)."""
    linked = (scored > 0) | np.eye(len(names), dtype=bool)
    for _ in names:
        linked = linked @ linked
    for i, name in enumerate(names):
        if not linked[i].all():
            unlinked = ", ".join(names[j] for j in np.flatnonzero(~linked[i]))
            raise ValueError(
                f"{name!r} has no points against {unlinked}, directly or indirectly, so ratings are infinite; use "
                "virtual_draws=1, and let all players meet"
            )
