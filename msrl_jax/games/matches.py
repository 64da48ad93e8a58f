"""Matches between two players: trained agents, agents that search before they move, and minimax players.

In the shape descriptions, `G` is the number of games of a match and `A` the number of actions.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax import envs
from msrl_jax.agents import schedules
from msrl_jax.envs import MultiAgentEnvironment
from msrl_jax.envs.base import PyTree, env_name
from msrl_jax.envs.masks import check_returns_not_nan, mask_of, sample_legal
from msrl_jax.fragments.runtime.executables import MemoryCheckedJit
from msrl_jax.fragments.support.checks import check_seed, shown, whole
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.games.turn_based import draws, turn_actions
from msrl_jax.registry import resolve
from msrl_jax.run.evaluation.evaluate import MAX_STEPS
from msrl_jax.run.result import Result


@dataclasses.dataclass(frozen=True)
class Player:
    """A player that plays both seats of many games in parallel; a match uses the actions of its seat.

    Attributes:
      choose: `(params, keys [G], states [G, ...], obs [G, 2, ...]) -> actions [G, 2]`, compatible with `jax.jit`. States are
        those of the game, and observations have masks if the game declares legal actions.
      params: arrays that `choose` needs.
      game: name of the only game whose states it can read; None if it can play any game.
    """

    choose: Callable[[PyTree, jax.Array, PyTree, PyTree], jax.Array]
    params: PyTree = ()
    game: str | None = None


@dataclasses.dataclass(frozen=True)
class Match:
    """The games of a match, as the first player sees them.

    Attributes:
      returns: its return in every game. shape=[G], dtype=float32
      began: whether it moved first; in games with simultaneous moves, whether it had the first seat. shape=[G], dtype=bool
      lengths: number of steps of every game. shape=[G], dtype=int32
      finished: whether the game ended within `max_steps`; otherwise, the return is that of its first steps. shape=[G],
        dtype=bool
    """

    returns: np.ndarray
    began: np.ndarray
    lengths: np.ndarray
    finished: np.ndarray

    @property
    def wins(self) -> int:
        """The number of games with a return above 0."""
        return int((self.returns > 0).sum())

    @property
    def draws(self) -> int:
        """The number of games with a return of 0."""
        return int((self.returns == 0).sum())

    @property
    def losses(self) -> int:
        """The number of games with a return below 0."""
        return int((self.returns < 0).sum())

    @property
    def score(self) -> float:
        """The share of points: 1 for a win, 1/2 for a draw."""
        return (self.wins + self.draws / 2) / len(self.returns)

    def __repr__(self) -> str:
        parts = []
        for seat, has_seat in (("first", self.began), ("second", ~self.began)):
            r = self.returns[has_seat]
            parts.append(f"moving {seat}: {(r > 0).sum()} won, {(r == 0).sum()} drawn, {(r < 0).sum()} lost")
        if unfinished := int((~self.finished).sum()):
            parts.append(f"{unfinished} cut off at max_steps")
        return f"Match({len(self.returns)} games, score {self.score:.3f}; {'; '.join(parts)})"


class _Games(NamedTuple):
    """The state of a match; `running` marks games that have not ended, `outside` those with an action out of range."""

    step: jax.Array
    env_state: PyTree
    obs: PyTree
    returns: jax.Array
    lengths: jax.Array
    running: jax.Array
    outside: jax.Array


@entry
def match(
    env: str | MultiAgentEnvironment,
    one: Result | Player,
    two: Result | Player,
    games: int = 1000,
    seed: int = 0,
    *,
    random_moves: int = 0,
    max_steps: int = MAX_STEPS,
) -> Match:
    """Plays games between two players; each has the first seat in half of them.

    Args:
      env: the game, or its name.
      one: the player whose results are returned: a run's result, which plays its most probable actions, or a `Player`.
      two: the other player.
      games: number of games, `G`; all are played in parallel.
      seed: seed of the randomness of games and players.
      random_moves: number of steps at the start of every game with random legal actions. Without them, two deterministic
        players repeat the same game.
      max_steps: maximum number of steps of a game.

    Returns:
      The results.

    Raises:
      TypeError: if a player is neither a result nor a `Player`.
      ValueError: if the game does not have two agents, a number is out of range, or an agent is for another game or recurrent.
    """
    game: Any = envs.make(env) if isinstance(env, str) else env
    if len(getattr(game, "agents", ())) != 2:
        raise ValueError(f"a match needs two players, but environment {env_name(game)!r} does not have two agents")
    games, random_moves = whole("games", games, most=2**31 - 1), whole("random_moves", random_moves, least=0)
    max_steps = whole("max_steps", max_steps, most=2**31 - 1)
    players = [p if isinstance(p, Player) else _player_of(p, game) for p in (one, two)]
    if other_games := [p.game for p in players if p.game not in (None, env_name(game))]:
        raise ValueError(f"a player of {other_games[0]!r} cannot play {env_name(game)!r}; make it for this game")
    venv = envs.vectorize(game, games)
    if random_moves and not hasattr(game.action_space, "n"):
        raise ValueError(f"random_moves={random_moves} needs discrete actions, not {game.action_space}; use random_moves=0")

    def play(params: PyTree, key: jax.Array) -> dict[str, jax.Array]:
        is_first_seat = jnp.arange(games) < (games + 1) // 2
        key, reset_key = jax.random.split(key)
        env_state, obs = venv.reset(reset_key)
        began_first = jax.vmap(game.to_move)(env_state.env_state) == 0 if hasattr(game, "to_move") else jnp.bool(True)

        def step(g: _Games) -> _Games:
            is_outside, keys = g.outside, jax.random.split(jax.random.fold_in(key, g.step), (3, games))
            player_inputs = zip(players, params, keys, strict=False)
            mine, theirs = (p.choose(x, k, g.env_state.env_state, g.obs) for p, x, k in player_inputs)
            seat = is_first_seat.reshape(-1, *(1,) * (mine.ndim - 2))
            action = jnp.stack([jnp.where(seat, mine[:, 0], theirs[:, 0]), jnp.where(seat, theirs[:, 1], mine[:, 1])], axis=1)
            if random_moves:
                random_action = at_random(game).choose((), keys[2], g.env_state.env_state, g.obs)
                action = jnp.where(g.step < random_moves, random_action, action)
            if hasattr(game.action_space, "n"):  # JAX would clamp an index that is out of range
                is_outside |= g.running & ((action < game.action_space.low) | (action > game.action_space.high)).any(-1)
            env_state, t = venv.step(g.env_state, action)
            reward = jnp.where(is_first_seat, t.reward[:, 0], t.reward[:, 1])
            returns = g.returns + jnp.where(g.running, reward, 0.0)
            return _Games(g.step + 1, env_state, t.obs, returns, g.lengths + g.running, g.running & ~t.ended, is_outside)

        none = jnp.zeros(games, bool)
        start = _Games(jnp.int32(0), env_state, obs, jnp.zeros(games), jnp.zeros(games, jnp.int32), ~none, none)
        end = jax.lax.while_loop(lambda g: g.running.any() & (g.step < max_steps), step, start)
        began = jnp.broadcast_to(began_first, (games,)) == is_first_seat
        outcome = {"returns": end.returns, "began": began, "lengths": end.lengths, "finished": ~end.running}
        return outcome | {"outside": end.outside}

    purpose, remedy = f"a match of {games:,} games in parallel", "Play fewer games, in several matches"
    program = MemoryCheckedJit(jax.jit(play), purpose, remedy)
    outcome = jax.device_get(program([p.params for p in players], jax.random.key(check_seed(seed))))
    if outside := int(outcome.pop("outside").sum()):
        raise ValueError(f"a player chose an action outside {game.action_space} in {outside} of {games} games; fix the player")
    check_returns_not_nan(game, outcome["returns"])
    return Match(**outcome)


def _player_of(result: Result, game: Any) -> Player:
    """Returns the player of a run: the most probable actions of its best member."""
    if not isinstance(result, Result):
        raise TypeError(f"a player is {shown(result)}; pass a run's result, or a Player, such as minimax(env, 3)")
    behavior, env = result.behavior, result.behavior.env
    if getattr(env, "agents", None) != game.agents or str(env.observation_space) != str(game.observation_space):
        raise ValueError(
            f"an agent of {result.experiment.name!r} was trained in {env_name(env)!r}, with observations "
            f"{env.observation_space}, but those of {env_name(game)!r} are {game.observation_space}; use agents of this game"
        )
    if behavior.agent.is_recurrent:
        raise ValueError(f"an agent of {result.experiment.name!r} is recurrent, and matches support no recurrent state")
    state = result.acting_state()

    def choose(leaves: list[jax.Array], keys: jax.Array, states: PyTree, obs: PyTree) -> jax.Array:
        return behavior.act_with_carry(behavior.restore(leaves), obs, behavior.initial_carry(1))[0]

    return Player(choose, behavior.take(state))


@entry
def with_search(result: Result, num_simulations: int | None = None, *, member: int | None = None) -> Player | Result:
    """Makes a trained agent of `alphazero` or `muzero` search before every move, without the exploration noise of training.

    Args:
      result: the result of the run.
      num_simulations: number of positions, or of model steps, per search; as in training if None.
      member: number of the population member. Required for `alphazero` with several members; for `muzero`, None keeps all.

    Returns:
      For `alphazero`, which searches with states of its game, a player for matches. For `muzero`, a result whose agent searches
      wherever it acts: in `act`, evaluations, videos and exported policies; its history and last evaluation are the run's.

    Raises:
      TypeError: if `result` is not a result.
      ValueError: if the algorithm does not search, `num_simulations` is out of range, or the member does not exist.
    """
    if not isinstance(result, Result):
        raise TypeError(f"with_search needs a run's result, not {shown(result)}")
    config = result.config
    overrides = {} if num_simulations is None else {"num_simulations": whole("num_simulations", num_simulations)}
    if hasattr(config, "act_simulations"):
        run = result if member is None else result.select(member=member)
        acts = overrides.get("num_simulations", config.num_simulations)
        experiment = run.experiment.replaced(algorithm=dataclasses.replace(run.config, act_simulations=acts))
        description = {**run.description, **experiment.to_json()}
        return dataclasses.replace(run, experiment=experiment, description=description, folder=None)
    if not hasattr(config, "search"):
        name = result.experiment.name
        raise ValueError(f"an agent of {name!r} does not search; pass its result directly to a match, or evaluate it")
    config = dataclasses.replace(config, gumbel_scale=0.0, random_share=0.0, **overrides)
    final_values = {name: schedules.at(schedule, 1.0) for name, schedule in schedules.check(config).items()}
    search = resolve.with_numbers_of(resolve.objects(config), final_values).search(result.behavior.env)

    def choose(params: PyTree, keys: jax.Array, states: PyTree, obs: PyTree) -> jax.Array:
        return search(params, keys, states, obs)[0]

    # The run may have used any devices.
    params = jax.device_put(jax.device_get(result.member_state(member).params), jax.local_devices()[0])
    return Player(choose, params, env_name(result.behavior.env))


@entry
def at_random(env: str | MultiAgentEnvironment) -> Player:
    """Makes a player that draws legal actions uniformly.

    Args:
      env: a game with discrete actions, or its name.

    Returns:
      The player.

    Raises:
      ValueError: if actions are not discrete.
    """
    game: Any = envs.make(env) if isinstance(env, str) else env
    if not hasattr(game.action_space, "n"):
        raise ValueError(f"at_random needs discrete actions, but those of {env_name(game)!r} are {game.action_space}")

    def choose(params: PyTree, keys: jax.Array, states: PyTree, obs: PyTree) -> jax.Array:
        mask = mask_of(obs)
        mask = jnp.ones((len(keys), 2, game.action_space.n), bool) if mask is None else mask
        actions = jax.vmap(lambda key, mask: jax.vmap(sample_legal)(jax.random.split(key), mask))(keys, mask)
        return actions + game.action_space.start

    return Player(choose, game=env_name(game))


@entry
def minimax(env: str | MultiAgentEnvironment, depth: int) -> Player:
    """Makes a player that searches all positions within `depth` moves; they are worth 0 unless the game is over.

    It prefers early wins, and chooses among equally good moves at random. A move costs `A ** depth` steps of the game.

    Args:
      env: a game with the methods `to_move` and `action_mask`, or its name.
      depth: number of moves, at least 1.

    Returns:
      The player.

    Raises:
      ValueError: if the depth is out of range, the game lacks these methods, or its steps draw random numbers.
    """
    game: Any = envs.make(env) if isinstance(env, str) else env
    depth = whole("depth", depth)
    if getattr(game, "to_move", None) is None or getattr(game, "action_mask", None) is None:
        raise ValueError(f"minimax needs a game with to_move(state) and action_mask(state); {env_name(game)!r} lacks them")
    if draws(game):
        raise ValueError(f"minimax needs a deterministic game, but {env_name(game)}.step draws random numbers")
    actions = jnp.arange(game.action_space.n)

    def values(key: jax.Array, state: PyTree, depth: int) -> jax.Array:
        """Returns the values of the actions for the player to move, -inf if illegal. `[A]`"""
        player = game.to_move(state)

        def after(action: jax.Array) -> jax.Array:
            child, _, reward, terminated, truncated = game.step(key, state, turn_actions(game, state, player, action))
            value = reward[player].astype(jnp.float32)
            if depth > 1:
                best = values(key, child, depth - 1).max()
                best = jnp.where(game.to_move(child) == player, best, -best)
                value += 0.99 * jnp.where(terminated.all() | truncated, 0.0, best)
            return value

        return jnp.where(game.action_mask(state)[player], jax.vmap(after)(actions), -jnp.inf)

    def choose_one(key: jax.Array, state: PyTree) -> jax.Array:
        worth = values(key, state, depth)
        return turn_actions(game, state, game.to_move(state), sample_legal(key, worth == worth.max()))

    def choose(params: PyTree, keys: jax.Array, states: PyTree, obs: PyTree) -> jax.Array:
        return jax.lax.map(lambda x: choose_one(*x), (keys, states), batch_size=16)

    return Player(choose, game=env_name(game))
