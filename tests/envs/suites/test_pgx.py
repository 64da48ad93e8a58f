"""Pgx's games: names, who may move, the same steps as pgx's own, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pgx
import pytest

import msrl_jax as msrl
from msrl_jax import cli, envs
from msrl_jax.envs.masks import sample_legal
from msrl_jax.envs.suites.catalog import SUITES
from tests.support.slow import mostly_slow

FAST = ("kuhn_poker", "leduc_holdem", "tic_tac_toe")
MORE = ("backgammon", "connect_four", "othello")
LONG = ("animal_shogi", "chess", "gardner_chess", "go_19x19", "shogi")
"""Games that take minutes to compile or to end."""


@pytest.mark.slow
def test_the_games_of_two_players_are_listed(capsys):
    players = {name: pgx.make(name).num_players for name in pgx.available_envs() if name not in LONG}
    assert {name for name, count in players.items() if count == 2} | {*LONG} == {*SUITES["pgx"].own_names}
    assert {"pgx:tic_tac_toe", "pgx:go_9x9"} <= set(envs.names())
    assert cli.main(["list"]) == 0
    listed = capsys.readouterr().out
    assert "\n  pgx:connect_four\n" in listed and "pgx:2048" not in listed


def play(name, steps):
    """Random legal moves, by pgx and by this package at once, with the same keys; a game that is over begins again."""
    theirs, ours = pgx.make(name), envs.make(f"pgx:{name}")

    def step(running, key):
        state, own, obs = running
        move, play, again = jax.random.split(key, 3)
        action = sample_legal(move, state.legal_action_mask)
        player, wait = state.current_player, len(state.legal_action_mask)
        shown = {
            "player": player,
            "legal": state.legal_action_mask,
            "mask": ours.action_mask(own),
            "obs": obs,  # type: ignore
            "seen": state.observation,
            "other": theirs._observe(state, 1 - player),
        }
        state = theirs.step(state, action, play)
        stepped = ours.step(play, own, jnp.full(2, wait).at[player].set(action))
        outcome = {
            "rewards": state.rewards,
            "reward": stepped[2],
            "over": state.terminated,
            "terminated": stepped[3],
            "truncated": stepped[4],
            "last": stepped[1],
            "last_seen": state.observation,
            "next_player": state.current_player,
            "report": ours.report(stepped[0]),
        }
        fresh = theirs.init(again), *ours.reset(again)
        after = jax.tree.map(lambda a, b: jnp.where(state.terminated, a, b), fresh, (state, *stepped[:2]))
        return after, shown | outcome

    start, key = jax.random.split(jax.random.key(1))
    begun = theirs.init(start), *ours.reset(start)
    return jax.device_get(jax.jit(lambda: jax.lax.scan(step, begun, jax.random.split(key, steps))[1])())


@pytest.mark.parametrize("name", mostly_slow([*FAST, *MORE, "go_9x9", "hex"], "tic_tac_toe"))
def test_steps_are_those_of_pgx(name):
    steps = 60 if name in FAST else 400
    rows = play(name, steps)
    at, mover = np.arange(steps), rows["player"]
    assert rows["over"].sum() >= (5 if name in FAST else 1) and {*mover} == {0, 1}
    np.testing.assert_array_equal(rows["obs"][at, mover], rows["seen"])
    np.testing.assert_array_equal(rows["obs"][at, 1 - mover], rows["other"])
    np.testing.assert_array_equal(rows["last"][at, rows["next_player"]], rows["last_seen"])
    np.testing.assert_array_equal(rows["mask"][at, mover, :-1], rows["legal"])
    assert not rows["mask"][at, mover, -1].any(), "who is to move cannot wait"
    assert rows["mask"][at, 1 - mover, -1].all() and not rows["mask"][at, 1 - mover, :-1].any()
    np.testing.assert_array_equal(rows["reward"], rows["rewards"])
    assert rows["reward"].any() and not rows["reward"].sum(1).any() and not rows["reward"][~rows["over"]].any()
    np.testing.assert_array_equal(rows["terminated"], np.stack([rows["over"]] * 2, 1))
    assert not rows["truncated"].any()
    outcome, of_zero = rows["report"], rows["rewards"][:, 0]
    np.testing.assert_array_equal(outcome["player_0_wins"], of_zero > 0)
    np.testing.assert_array_equal(outcome["player_1_wins"], of_zero < 0)
    np.testing.assert_array_equal(outcome["draw"], rows["over"] & (of_zero == 0))


@pytest.mark.parametrize("name", mostly_slow([*FAST, *MORE, *LONG], "tic_tac_toe"))
def test_a_game_conforms(name):
    venv = envs.vectorize(envs.make(f"pgx:{name}"), 2)  # checks all types
    assert isinstance(venv, envs.VectorizedAgents) and venv.name == f"pgx:{name}" and venv.agents == ("player_0", "player_1")


@pytest.mark.slow
def test_both_players_of_a_game_are_trained_and_evaluated():
    result = msrl.train(
        "ippo",
        "pgx:tic_tac_toe",
        total_steps=64,
        num_envs=4,
        unroll_length=8,
        num_epochs=1,
        num_minibatches=1,
        hidden_sizes=(4,),
        eval_episodes=8,
        progress=False,
        devices=jax.devices()[:1],
    )
    returns = result.evaluation.agent_returns
    assert result.status == "finished" and result.evaluation.finished.all()
    np.testing.assert_array_equal(returns[:, 0], -returns[:, 1])
    metrics = result.evaluation.metrics
    np.testing.assert_array_equal(metrics["player_0_wins"] - metrics["player_1_wins"], returns[:, 0])
    np.testing.assert_array_equal(metrics["draw"], returns[:, 0] == 0)
    assert set(returns.ravel()) <= {-1, 0, 1} and 5 <= result.evaluation.lengths.min() <= result.evaluation.lengths.max() <= 9


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("tictactoe", {}, r"pgx has no two-player game 'tictactoe' \(did you mean 'tic_tac_toe'\?\); it has animal"),
        ("hex", {"size": 5}, r"pgx:hex has no parameter 'size'; it has none"),
        ("sparrow_mahjong", {}, r"pgx:sparrow_mahjong is not a two-player game, and only those are supported: an"),
        ("minatar-breakout", {}, r"not a two-player game.*; gymnax has MinAtar's games, such as Breakout-MinAtar"),
    ],
)
def test_what_is_no_game_of_two_players_is_refused(name, params, message):
    with pytest.raises(ValueError, match=message):
        envs.make(f"pgx:{name}", **params)
