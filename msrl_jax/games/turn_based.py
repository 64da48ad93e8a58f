"""Two-player games with alternating moves, as seen by the player to move: an environment with one acting agent.

In the shape descriptions, `E` denotes the number of games.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax._compat import drop_unused, equations_in
from msrl_jax.envs import TimeStep, VectorizedAgents, vectorize_agents
from msrl_jax.envs.base import PyTree, Stepped, env_name, is_on_host, output_shapes
from msrl_jax.envs.check_types import check_types, show
from msrl_jax.envs.masks import fault
from msrl_jax.envs.wrappers import EnvironmentWrapper
from msrl_jax.fragments.support.random_keys import is_key

_DRAWING = {"random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform"}
"""The primitives that draw random numbers from keys, typed or not."""


@dataclasses.dataclass(frozen=True)
class Turns(EnvironmentWrapper):
    """A game whose global state is the player to move, which is then also known before a reset.

    The rewards of a move are nan if it is neither player's turn.
    """

    env: Any

    def step(self, key: jax.Array, state: PyTree, action: Any) -> Stepped:
        """Plays a move."""
        player = self.env.to_move(state)
        state, obs, reward, terminated, truncated = self.env.step(key, state, action)
        return state, obs, no_such_player(reward, (player != 0) & (player != 1)), terminated, truncated

    def global_state(self, state: PyTree) -> jax.Array:  # type: ignore[override]
        """Returns the player to move. `[1]` float32"""
        return self.env.to_move(state)[None].astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class OneMover:
    """Parallel copies of a game with one agent, the player to move: it gets the observations and rewards, and acts.

    The next state is seen by the other player, so its value for the mover is the negative of that player's value. If one
    player moves twice in a row, the reward is nan.

    Attributes:
      env: the copies, from `vectorize_turns`.
      game: the game.
    """

    env: VectorizedAgents
    game: Any

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Starts all games; returns the state and the observations of the players to move. `[E, ...]`"""
        state, obs = self.env.reset(key)
        return state, of_player(obs, self._to_move(state))

    def step(self, state: PyTree, action: jax.Array) -> tuple[PyTree, TimeStep]:
        """Plays a move in every game, `[E]`, and restarts games that ended."""
        player = self._to_move(state)
        action = jax.vmap(lambda *x: turn_actions(self.game, *x))(self.env.states(state), player, action)
        state, t = self.env.step(state, action)
        next_player, terminated = t.final_state[:, 0].astype(jnp.int32), t.terminated.all(-1)
        reward = moved_twice(jnp.where(player == 0, *t.reward.T), (next_player == player) & ~terminated)
        obs, final_obs = of_player(t.obs, self._to_move(state)), of_player(t.final_obs, next_player)
        return state, TimeStep(obs, reward, terminated, t.truncated, final_obs)

    def _to_move(self, state: PyTree) -> jax.Array:
        return jax.vmap(self.game.to_move)(self.env.states(state))


def vectorize_turns(name: str, env: Any, num_envs: int) -> VectorizedAgents:
    """Makes parallel copies of a game, wrapped in `Turns`; raises the same errors as `check_turns`."""
    check_turns(name, env)
    if hasattr(env, "vectorize") and hasattr(env, "env"):  # an environment that records the steps of its copies
        return dataclasses.replace(env, env=Turns(env.env)).vectorize(num_envs)
    return vectorize_agents(Turns(env), num_envs)  # type: ignore[arg-type]


def check_turns(name: str, env: Any) -> None:
    """Raises ValueError unless a game has perfect information and alternating moves; `name` is the algorithm's."""
    game = env_name(env)
    if is_on_host(env):
        raise ValueError(
            f"{name} needs a game whose states it can search, but environment {game!r} is simulated on the host, where states "
            "cannot be searched; write the game in JAX, or use ippo or self_play"
        )
    missing_methods = [
        f"no method {method}(state)" for method in ("to_move", "action_mask") if not callable(getattr(env, method, None))
    ]
    if len(env.agents) != 2 or missing_methods:
        raise ValueError(
            f"{name} is for two-player games with alternating moves and perfect information, but environment {game!r} has "
            f"{' and '.join([f'{len(env.agents)} agents', *missing_methods])}; use self_play, ippo or mappo, or another game"
        )
    check_types(env, several=True)
    state, _ = output_shapes(env.reset)
    player = jax.eval_shape(lambda state: env.to_move(state), state)
    if not isinstance(player, jax.ShapeDtypeStruct) or player.shape or player.weak_type or player.dtype.kind not in "iu":
        raise ValueError(f"{game}.to_move returned {show(player)}; return an array int32[], 0 or 1")
    if any(is_key(x) for x in jax.tree.leaves(state)):
        raise ValueError(
            f"{name} needs a deterministic game, but the state of environment {game!r} contains a key; use self_play, "
            "or remove the key from the state"
        )
    if draws(env):
        raise ValueError(f"{name} needs a deterministic game, but {game}.step draws random numbers; use self_play")


def player_observation(env: VectorizedAgents) -> PyTree:
    """Shapes and dtypes of one player's observation, with its legal actions."""
    _, obs = output_shapes(env.reset)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), obs)


def of_player(obs: PyTree, player: jax.Array) -> PyTree:
    """Selects the observation of a player `[...]` from those of both `[..., 2, ...]`."""

    def pick(x: jax.Array) -> jax.Array:
        first, second = jnp.moveaxis(x, player.ndim, 0)
        return jnp.where((player == 0).reshape(*player.shape, *(1,) * (first.ndim - player.ndim)), first, second)

    return jax.tree.map(pick, obs)


def turn_actions(game: Any, state: PyTree, player: jax.Array, action: jax.Array) -> jax.Array:
    """Returns the action of the player to move, 0 or 1, and a legal one of the waiting player. `[2]` int32"""
    return jnp.where(jnp.arange(2) == player, action, game.action_mask(state).argmax(-1)).astype(jnp.int32)


def draws(game: Any) -> bool:
    """Whether the results of a step depend on random numbers that it draws, i.e. whether it is a game of chance."""
    key, state, action = jax.eval_shape(lambda: (key := jax.random.key(0), game.reset(key)[0], jnp.zeros(2, jnp.int32)))
    needed_jaxpr = drop_unused(jax.make_jaxpr(game.step)(key, state, action).jaxpr)
    return any(eqn.primitive.name in _DRAWING for eqn in equations_in(needed_jaxpr))


@fault("has a to_move(state) that returned neither 0 nor 1")
def no_such_player(reward: jax.Array, happened: jax.Array) -> jax.Array:
    """Returns the reward, or nan if the player to move is neither 0 nor 1."""
    return reward + jax.lax.sqrt(-happened.astype(jnp.float32))


@fault("let a player move twice in a row (turns alternate in games for muzero; not in those for alphazero)")
def moved_twice(reward: jax.Array, happened: jax.Array) -> jax.Array:
    """Returns the reward, or nan if the player who moved is to move again, although moves must alternate."""
    return reward + jax.lax.sqrt(-happened.astype(jnp.float32))
