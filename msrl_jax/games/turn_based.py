"""Games of two players who move in turns, as the player to move sees them: an environment in which one agent acts.

In the shape descriptions, `E` denotes the number of games.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax._compat import drop_unused, jaxprs_in
from msrl_jax.envs import TimeStep, VectorizedAgents, vectorize_agents
from msrl_jax.envs.base import Stepped, emitted, env_name, is_on_host
from msrl_jax.envs.check_types import check_types, show
from msrl_jax.envs.masks import fault
from msrl_jax.envs.wrappers import EnvironmentWrapper

_DRAWING = {"random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform"}
"""The primitives that make random numbers of keys, typed ones and others."""


@dataclasses.dataclass(frozen=True)
class Turns(EnvironmentWrapper):
    """A game whose global state is who is to move, which is then known before a reset, too.

    The rewards of a move are nan if it was the turn of neither player.
    """

    env: Any

    def step(self, key: jax.Array, state: Any, action: Any) -> Stepped:
        """Plays a move."""
        player = self.env.to_move(state)
        state, obs, reward, terminated, truncated = self.env.step(key, state, action)
        return state, obs, no_such_player(reward, (player != 0) & (player != 1)), terminated, truncated

    def global_state(self, state: Any) -> jax.Array:  # type: ignore[override]
        """The player to move. `[1]` float32"""
        return self.env.to_move(state)[None].astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class OneMover:
    """Parallel copies of a game in which whoever is to move acts: observations, actions and rewards are of that player.

    What follows a move is seen by the other player, so its worth to the one who moved is that to the other with the sign
    changed. A game in which one player moves twice in a row gets a reward of nan.

    Attributes:
      env: the copies, by `vectorize_turns`.
      game: the game.
    """

    env: VectorizedAgents
    game: Any

    def reset(self, key: jax.Array) -> tuple[Any, Any]:
        """Starts all games; returns the state and what the players to move see. `[E, ...]`"""
        state, obs = self.env.reset(key)
        return state, of_player(obs, self._to_move(state))

    def step(self, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        """Plays a move in every game, `[E]`, and begins games that ended anew."""
        before = self._to_move(state)
        action = jax.vmap(lambda *x: turn_actions(self.game, *x))(self.env.states(state), before, action)
        state, t = self.env.step(state, action)
        after, terminated = t.final_state[:, 0].astype(jnp.int32), t.terminated.all(-1)
        reward = moved_twice(jnp.where(before == 0, *t.reward.T), (after == before) & ~terminated)
        obs, final_obs = of_player(t.obs, self._to_move(state)), of_player(t.final_obs, after)
        return state, TimeStep(obs, reward, terminated, t.truncated, final_obs)

    def _to_move(self, state: Any) -> jax.Array:
        return jax.vmap(self.game.to_move)(self.env.states(state))


def vectorize_turns(name: str, env: Any, num_envs: int) -> VectorizedAgents:
    """Makes parallel copies of a game, wrapped in `Turns`; raises what `check_turns` raises."""
    check_turns(name, env)
    if hasattr(env, "vectorize") and hasattr(env, "env"):  # what records the steps of the copies
        return dataclasses.replace(env, env=Turns(env.env)).vectorize(num_envs)
    return vectorize_agents(Turns(env), num_envs)  # type: ignore[arg-type]


def check_turns(name: str, env: Any) -> None:
    """Raises ValueError unless both players see the whole state of a game, and move in turns; `name` is the algorithm's."""
    game = env_name(env)
    if is_on_host(env):
        raise ValueError(
            f"{name} searches in games whose states can be tried out or asked who is to move, but environment {game!r} is "
            "simulated on the host, where states cannot be tried out; write the game in JAX, or use ippo or self_play"
        )
    missing = [
        f"no method {method}(state)" for method in ("to_move", "action_mask") if not callable(getattr(env, method, None))
    ]
    if len(env.agents) != 2 or missing:
        raise ValueError(
            f"{name} is for games of two players who move in turns and see the whole state, but environment {game!r} has "
            f"{' and '.join([f'{len(env.agents)} agents', *missing])}; use self_play, ippo or mappo, or another game"
        )
    check_types(env, several=True)
    state, _ = emitted(env.reset)
    player = jax.eval_shape(lambda state: env.to_move(state), state)
    if not isinstance(player, jax.ShapeDtypeStruct) or player.shape or player.weak_type or player.dtype.kind not in "iu":
        raise ValueError(f"{game}.to_move returned {show(player)}; return an array int32[], 0 or 1")
    if any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(state)):
        raise ValueError(
            f"{name} searches in games without chance, but the state of environment {game!r} holds a key; use self_play, "
            "or leave the key out of the state"
        )
    if draws(env):
        raise ValueError(f"{name} searches in games without chance, but {game}.step draws random numbers; use self_play")


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


def turn_actions(game: Any, state: Any, player: jax.Array, action: jax.Array) -> jax.Array:
    """The action of the player to move, 0 or 1, and a legal one of the other, who waits. `[2]` int32"""
    return jnp.where(jnp.arange(2) == player, action, game.action_mask(state).argmax(-1)).astype(jnp.int32)


def draws(game: Any) -> bool:
    """Whether what a step of a game of two players returns depends on numbers that the step draws: a game of chance."""
    key, state, action = jax.eval_shape(lambda: (key := jax.random.key(0), game.reset(key)[0], jnp.zeros(2, jnp.int32)))
    used = drop_unused(jax.make_jaxpr(game.step)(key, state, action).jaxpr)
    return any(eqn.primitive.name in _DRAWING for body in jaxprs_in(used) for eqn in body.eqns)


@fault("has a to_move(state) that returned neither 0 nor 1")
def no_such_player(reward: jax.Array, happened: jax.Array) -> jax.Array:
    """The reward, or nan if it was the turn of a player who is neither 0 nor 1."""
    return reward + jax.lax.sqrt(-happened.astype(jnp.float32))


@fault("let a player move twice in a row (turns alternate in games for muzero; not in those for alphazero)")
def moved_twice(reward: jax.Array, happened: jax.Array) -> jax.Array:
    """The reward, or nan if the player who moved is to move again, where turns have to alternate."""
    return reward + jax.lax.sqrt(-happened.astype(jnp.float32))
