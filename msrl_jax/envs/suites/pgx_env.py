"""Pgx's two-player games (https://github.com/sotetsuk/pgx; Koyamada et al. 2023, arXiv 2303.17503)."""

import io
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import spaces
from msrl_jax.envs.base import MultiAgentEnvironment, NamedEnvironment, PyTree, Stepped, output_shapes
from msrl_jax.envs.suites import common
from msrl_jax.envs.suites.catalog import SUITES


def make(name: str, **params: Any) -> MultiAgentEnvironment:
    """Makes a two-player game by its pgx name; pgx's games have no parameters."""
    full, names, pgx = f"pgx:{name}", SUITES["pgx"].own_names, common.load("pgx")
    if name in pgx.available_envs() and name not in names:
        hint = "; gymnax has MinAtar's games, such as Breakout-MinAtar" if name.startswith("minatar-") else ""
        raise ValueError(f"{full} is not a two-player game, and only those are supported: {', '.join(names)}{hint}")
    common.check_name("pgx", name, names, "two-player game")
    common.check_params(full, params, ())
    return PgxGame(pgx.make(name), full)


_NOT_SEARCHED = ("backgammon", "kuhn_poker", "leduc_holdem")
"""Games with dice or hidden cards."""


class PgxGame(NamedEnvironment):
    """A game of two players who move alternately.

    There is one more action than in the game, "wait": the only legal action of the player who is not to move. Pgx chooses at
    random who starts. Both players get their rewards at the end of the game, which terminates for both; the metrics tell who
    won, or whether it was a draw. In deterministic games with perfect information, `to_move(state)` is the player to move, 0
    or 1.
    """

    agents = ("player_0", "player_1")
    metrics = dict.fromkeys(("player_0_wins", "player_1_wins", "draw"), "last")

    def __init__(self, game: Any, name: str):
        self.game, self.name = game, name
        state, obs = output_shapes(self.reset)
        low, high = (0, 1) if state.observation.dtype == bool else (-np.inf, np.inf)
        self.observation_space = spaces.Box(low, high, obs.shape[1:])
        self.action_space = spaces.Discrete(state.legal_action_mask.shape[0] + 1)
        if game.id not in _NOT_SEARCHED:
            self.to_move = attrgetter("current_player")

    def reset(self, key: jax.Array) -> tuple[PyTree, jax.Array]:
        """Starts a game; returns the state and the observations `[2, ...]` float32, each from its player's view."""
        state = self.game.init(key)
        return state, self._observe(state)

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> Stepped:
        """Plays the action of the player to move, one of the actions `[2]`."""
        state = self.game.step(state, action[state.current_player], key)
        return state, self._observe(state), state.rewards, jnp.full(2, state.terminated), state.truncated

    render_fps = 2.0

    def render(self, state: PyTree) -> np.ndarray:
        """Returns the board."""
        try:
            import resvg_py
        except ImportError as error:
            raise ValueError(f"resvg-py, which draws {self.name}, is not installed: pip install 'msrl-jax[video]'") from error
        from PIL import Image

        picture = Image.open(io.BytesIO(bytes(resvg_py.svg_to_bytes(svg_string=state.to_svg(color_theme="light"), width=400))))
        return np.asarray(picture.convert("RGB"))

    def report(self, state: PyTree) -> dict[str, jax.Array]:
        """Who got a reward above 0 at the end of the game, or whether it was a draw."""
        has_won = state.rewards > 0
        return {"player_0_wins": has_won[0], "player_1_wins": has_won[1], "draw": state.terminated & ~has_won.any()}

    def action_mask(self, state: PyTree) -> jax.Array:
        """Returns the legal moves of the player to move, and "wait" for the other. `[2, n + 1]` bool"""
        to_move = (jnp.arange(2) == state.current_player)[:, None]
        return jnp.concatenate([to_move & state.legal_action_mask, ~to_move], axis=1)

    def _observe(self, state: PyTree) -> jax.Array:
        # As `observe(state, player)`, but without its warning that it is meant for the player to move.
        return jax.vmap(lambda player: self.game._observe(state, player))(jnp.arange(2)).astype(jnp.float32)
