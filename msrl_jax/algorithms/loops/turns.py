"""Games of two players who move in turns, as the player to move sees them: an environment in which one agent acts.

In the shape descriptions, `E` denotes the number of games.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.envs import TimeStep, VectorizedAgents, vectorize_agents
from msrl_jax.envs.base import emitted, env_name, is_on_host
from msrl_jax.envs.masks import moved_twice, turn_actions
from msrl_jax.envs.wrappers import EnvironmentWrapper


@dataclass(frozen=True)
class Turns(EnvironmentWrapper):
    """A game whose global state is who is to move, which is then known before a reset, too."""

    env: Any

    def global_state(self, state: Any) -> jax.Array:  # type: ignore[override]
        """The player to move. `[1]` float32"""
        return self.env.to_move(state)[None].astype(jnp.float32)


@dataclass(frozen=True)
class OneMover:
    """Parallel games of `Turns` in which whoever is to move acts: observations, actions and rewards are of that player.

    What follows a move is seen by the other player, so its worth to the one who moved is that to the other with the sign
    changed. A game in which one player moves twice in a row gets a reward of nan.
    """

    env: VectorizedAgents

    def reset(self, key: jax.Array) -> tuple[Any, Any]:
        """Starts all games; returns the state and what the players to move see. `[E, ...]`"""
        state, obs = self.env.reset(key)
        return state, of_player(obs, self._to_move(state))

    def step(self, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        """Plays a move in every game, `[E]`, and begins games that ended anew."""
        before, game = self._to_move(state), self.env.env
        action = jax.vmap(lambda *x: turn_actions(game, *x))(state.env_state, before, action)
        state, t = self.env.step(state, action)
        after, terminated = t.final_state[:, 0].astype(jnp.int32), t.terminated.all(-1)
        reward = moved_twice(jnp.where(before == 0, *t.reward.T), (after == before) & ~t.ended)
        obs, final_obs = of_player(t.obs, self._to_move(state)), of_player(t.final_obs, after)
        return state, TimeStep(obs, reward, terminated, t.truncated, final_obs)

    def _to_move(self, state: Any) -> jax.Array:
        return jax.vmap(self.env.env.to_move)(state.env_state)  # type: ignore[attr-defined]


def vectorize_turns(name: str, env: Any, num_envs: int) -> VectorizedAgents:
    """Makes parallel copies of a game, wrapped in `Turns`; raises what `check_turns` raises."""
    check_turns(name, env)
    return vectorize_agents(Turns(env), num_envs)  # type: ignore[arg-type]


def check_turns(name: str, env: Any) -> None:
    """Raises ValueError unless both players see the whole state of a game, and move in turns; `name` is the algorithm's."""
    game = env_name(env)
    if is_on_host(env):
        raise ValueError(
            f"{name} searches in games whose states can be tried out or asked who is to move, but environment {game!r} is "
            "simulated on the host, where states cannot be tried out; write the game in JAX, or use ippo or self_play"
        )
    if len(env.agents) != 2 or getattr(env, "to_move", None) is None or getattr(env, "action_mask", None) is None:
        raise ValueError(
            f"{name} is for games of two players who move in turns and see the whole state, but environment {game!r} has "
            f"{len(env.agents)} agents and not both methods to_move(state) and action_mask(state); use self_play, ippo or mappo"
        )
    state, _ = emitted(env.reset)
    if any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(state)):
        raise ValueError(
            f"{name} searches in games without chance, but the state of environment {game!r} holds a key; use self_play"
        )


def player_observation(env: VectorizedAgents) -> Any:
    """Shapes and dtypes of what one player of a game sees, with its legal actions."""
    _, obs = emitted(env.reset)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), obs)


def of_player(obs: Any, player: jax.Array) -> Any:
    """What a player `[...]` sees, of the observations of both `[..., 2, ...]`."""

    def pick(x: jax.Array) -> jax.Array:
        first, second = jnp.moveaxis(x, player.ndim, 0)
        return jnp.where((player == 0).reshape(*player.shape, *(1,) * (first.ndim - player.ndim)), first, second)

    return jax.tree.map(pick, obs)
