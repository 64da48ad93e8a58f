"""AlphaZero: what positions are worth, what a search finds and never plays, what is learned, what crosses, what is refused."""

import itertools
import sys

import jax
import jax.numpy as jnp
import mctx
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.fragments.runtime.memory import tree_bytes
from msrl_jax.games import AlphaZero, match, with_search
from msrl_jax.games.alphazero import MoveOutcome, PlayerMove, Positions, position_worth, searcher
from msrl_jax.games.small_games import KuhnPoker
from msrl_jax.games.tree_search import cross_entropy
from msrl_jax.registry.lookup import check_env
from tests.support.agents import make_still
from tests.support.many_agents import Homes
from tests.support.runs import assert_same_state
from tests.support.tic_tac_toe import lost_games, perfect

GAME = "pgx:tic_tac_toe"
SMALL = {
    "num_envs": 8,
    "unroll_length": 4,
    "num_simulations": 4,
    "num_updates": 2,
    "batch_size": 16,
    "replay.capacity": 256,
    "hidden_sizes": (8,),
    "network": "mlp",
}


@pytest.fixture(scope="module")
def game():
    return msrl.envs.make(GAME)


def build(env, **options):
    return make_still("alphazero", env, **(SMALL | options))


def played(game, *moves):
    """The state after some moves, and what both players see."""
    state, obs = game.reset(jax.random.key(0))
    for cell in moves:
        state, obs, *_ = game.step(jax.random.key(0), state, jnp.full(2, cell))
    return state, msrl.envs.MaskedObservation(obs, game.action_mask(state))


def searched(game, states_and_obs, **options):
    """What searches with an untrained network play in some positions: for each, the action of who is to move, and examples."""
    search, network = searcher(
        msrl.algorithms.make(AlphaZero, SMALL | {"gumbel_scale": 0.0, "random_share": 0.0} | options), game
    )
    states, obs = jax.tree.map(lambda *x: jnp.stack(x), *states_and_obs)
    params = network.init(jax.random.key(0), jax.tree.map(lambda x: x[:, 0], obs))
    keys = jax.random.split(jax.random.key(1), len(states_and_obs))
    action, example, move = jax.jit(search)(params, keys, states, obs)
    np.testing.assert_array_equal(move.player, states.current_player)
    waits = np.take_along_axis(np.asarray(action), 1 - np.asarray(move.player)[:, None], 1)
    np.testing.assert_array_equal(waits, 9)
    return np.take_along_axis(np.asarray(action), np.asarray(move.player)[:, None], 1)[:, 0], example, move


class Pair:
    """A game whose first player makes both moves, and wins if the first one is 1; else the other player wins."""

    agents, action_space = ("one", "two"), msrl.envs.Discrete(2)
    observation_space = msrl.envs.Box(0, 1, (1,))

    def reset(self, key):
        return jnp.zeros(2, jnp.int32), jnp.zeros((2, 1))

    def step(self, key, state, action):
        moves, first = state
        first = jnp.where(moves == 0, action[0], first)
        reward = jnp.where(moves == 1, 2.0 * first - 1, 0.0) * jnp.array([1.0, -1.0])
        return jnp.stack([moves + 1, first]), jnp.zeros((2, 1)), reward, jnp.full(2, moves == 1), jnp.asarray(False)

    def to_move(self, state):
        return jnp.zeros((), jnp.int32)

    def action_mask(self, state):
        return jnp.array([[True, True], [True, False]])


def test_a_player_who_moves_twice_wins_for_itself():
    options = {"num_simulations": 16, "gumbel_scale": 0.0, "random_share": 0.0}
    search, network = searcher(msrl.algorithms.make(AlphaZero, SMALL | options), Pair())
    state, obs = Pair().reset(None)
    states, obs = jax.tree.map(lambda x: x[None], (state, msrl.envs.MaskedObservation(obs, Pair().action_mask(state))))
    params = network.init(jax.random.key(0), jax.tree.map(lambda x: x[:, 0], obs))
    action, example, _ = jax.jit(search)(params, jax.random.split(jax.random.key(1), 1), states, obs)
    assert action[0, 0] == 1 and example.policy[0, 1] > 0.5 and example.value[0] > 0.5


def test_what_a_position_was_worth():
    """Against a walk from every position through what followed, with turns in any order, and every kind of end."""
    rng = np.random.default_rng(0)
    length, count, discount = 12, 60, 0.9
    player, after = rng.integers(2, size=(2, length, count))
    random, terminated, truncated = rng.random((3, length, count)) < np.array([0.1, 0.15, 0.1])[:, None, None]
    reward, estimate, next_value = rng.normal(size=(3, length, count)).astype(np.float32)
    found = position_worth(
        jnp.asarray(estimate),
        PlayerMove(jnp.asarray(player), jnp.asarray(random)),
        MoveOutcome(*map(jnp.asarray, (reward, terminated, truncated)), obs=(), player=jnp.asarray(after)),  # type: ignore[arg-type]
        jnp.asarray(next_value),
        discount,
    )
    for e in range(count):
        for start in range(length):
            total, weight = 0.0, 1.0  # to the first player
            for t in range(start, length):
                side = 1 if player[t, e] == 0 else -1
                if random[t, e]:
                    total += weight * side * estimate[t, e]
                    break
                total += weight * reward[t, e]
                weight *= discount
                if terminated[t, e]:
                    break
                if truncated[t, e] or t == length - 1:
                    total += weight * (1 if after[t, e] == 0 else -1) * next_value[t, e]
                    break
            np.testing.assert_allclose(found[start, e], total if player[start, e] == 0 else -total, rtol=1e-4, atol=1e-5)


def test_the_policy_loss_leaves_illegal_actions_out():
    logits = np.array([[0.5, -np.inf, 1.0], [-np.inf, 2.0, -np.inf]], np.float32)
    target = np.array([[0.25, 0.0, 0.75], [0.0, 1.0, 0.0]], np.float32)
    loss, slope = jax.vmap(jax.value_and_grad(cross_entropy, 1))(target, logits)
    log_prob = np.array([0.5, 1.0]) - np.log(np.exp(0.5) + np.exp(1.0))
    np.testing.assert_allclose(loss, [-(0.25 * log_prob[0] + 0.75 * log_prob[1]), 0.0], rtol=1e-6)
    np.testing.assert_allclose(slope[0], [np.exp(log_prob[0]) - 0.25, 0.0, np.exp(log_prob[1]) - 0.75], rtol=1e-5)
    np.testing.assert_allclose(slope[1], 0.0, atol=1e-7)


@pytest.mark.long
def test_an_untrained_search_wins_at_once_where_it_can(game):
    """For both players, and where the other one threatens to win as well."""
    wins = {(0, 3, 1, 4): 2, (0, 3, 8, 4, 1): 5, (4, 0, 8, 2, 7): 1, (0, 1, 4, 2): 8}
    action, example, _ = searched(game, [played(game, *moves) for moves in wins], num_simulations=32)
    np.testing.assert_array_equal(action, list(wins.values()))
    np.testing.assert_array_equal(np.argmax(example.policy, -1), list(wins.values()))
    np.testing.assert_allclose(example.value, 1.0)


@pytest.mark.slow
def test_illegal_moves_are_neither_played_nor_learned(game):
    """In positions after random moves, with noise, and with random moves."""
    rng = np.random.default_rng(0)
    positions = 2 * [played(game, *rng.permutation(9)[:n]) for n in (0, 1, 2, 3, 4, 4, 3, 2)]
    action, example, move = searched(game, positions, gumbel_scale=3.0, random_share=0.5)
    legal = np.asarray([state.legal_action_mask for state, _ in positions])
    assert np.take_along_axis(legal, action[:, None], 1).all() and 4 <= move.random.sum() <= 12
    assert (np.asarray(example.policy)[:, :9][~legal] == 0).all() and (np.asarray(example.policy)[:, 9] == 0).all()
    np.testing.assert_allclose(example.policy.sum(-1), 1.0, rtol=1e-5)


@pytest.mark.slow
def test_games_that_end_in_an_unroll_are_worth_what_they_brought(game):
    """In the buffer: the last mover of a game wins or fills the board, and the signs of the positions before alternate."""
    agent = build(game, unroll_length=24, replay=Positions(1024), random_share=0.0, gumbel_scale=5.0)
    after, metrics = jax.jit(agent.iteration)(jax.jit(agent.init)(jax.random.key(0)))
    items = jax.tree.map(lambda x: np.moveaxis(x, 1, 2).reshape(8, -1, *x.shape[3:])[:, :24], after.replay.items)
    obs, _, _, value = jax.tree.leaves(jax.device_get(items))
    pieces, games = obs.sum((2, 3, 4)), 0
    for e in range(8):
        starts = np.flatnonzero(pieces[e] == 0)
        for begin, end in itertools.pairwise(starts):
            np.testing.assert_array_equal(pieces[e, begin:end], np.arange(end - begin))
            won = value[e, end - 1]
            assert won == 1 or (won == 0 and end - begin == 9)
            np.testing.assert_array_equal(value[e, begin:end], won * (-1.0) ** np.arange(end - begin - 1, -1, -1))
            games += 1
    assert games >= 8 and metrics["episode_length"].count >= games and np.isfinite(metrics["episode_return"].total)
    assert after.replay.filled == 24 and metrics["replay_size"] == 8 * 24


@pytest.mark.long
def test_learning_follows_the_search(game):
    """Both losses fall, and the network becomes more certain."""
    agent = build(
        game,
        num_envs=32,
        unroll_length=8,
        num_simulations=16,
        num_updates=16,
        batch_size=64,
        replay=Positions(4096),
        learning_rate=3e-3,
        hidden_sizes=(32,),
    )
    run = jax.jit(lambda s: jax.lax.scan(lambda s, _: agent.iteration(s), s, None, length=40))
    _, metrics = run(jax.jit(agent.init)(jax.random.key(0)))
    for name in ("policy_loss", "value_loss", "entropy"):
        assert metrics[name][-5:].mean() < 0.85 * metrics[name][1:6].mean(), name


def test_trees_take_what_is_said(game, monkeypatch):
    """The bytes that are checked against the memory are those of mctx's trees."""
    found, search = [], mctx.gumbel_muzero_policy

    def spy(*args, **kwargs):
        out = search(*args, **kwargs)
        found.append(tree_bytes(out.search_tree))
        return out

    monkeypatch.setattr(mctx, "gumbel_muzero_policy", spy)
    search_of_game, network = searcher(msrl.algorithms.make(AlphaZero, SMALL), game)
    states, obs = jax.tree.map(lambda x: x[None], played(game))
    params = jax.eval_shape(network.init, jax.random.key(0), jax.tree.map(lambda x: x[:, 0], obs))
    jax.eval_shape(search_of_game, params, jax.random.split(jax.random.key(1), 1), states, obs)
    monkeypatch.setattr("msrl_jax.games.tree_search.device_memory", lambda devices: 1)
    with pytest.raises(ValueError, match=r"num_simulations=4: the search trees .* take ([\d,]+) bytes") as error:
        msrl.algorithms.build(msrl.algorithms.make(AlphaZero, SMALL | {"num_envs": 1, "batch_size": 4}), game)
    said = int(str(error.value).split(" take ")[1].split(" bytes")[0].replace(",", ""))
    assert said <= found[0] <= 1.1 * said


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        (GAME, {"num_simulations": 10**9}, r"num_simulations=1000000000: the search trees of num_envs=8 .* use num_simul"),
        (GAME, {"replay.capacity": 8}, r"AlphaZero, whose positions are the buffer's steps: capacity=8 holds 0 steps"),
        (GAME, {"replay.storage": "bool"}, r"storage="),
        ("pgx:leduc_holdem", {}, r"two-player games with alternating moves .* 'pgx:leduc_holdem' .* use self_play"),
        (KuhnPoker(), {}, r"alternating moves and perfect information, but environment 'KuhnPoker' has 2 agents"),
        (Homes(), {}, r"environment 'Homes' has 3 agents"),
    ],
)
def test_what_does_not_fit_is_refused(env, options, message):
    env = msrl.envs.make(env) if isinstance(env, str) else env
    with pytest.raises(ValueError, match=message):
        build(env, **options)


def test_what_a_search_cannot_use_is_refused(game, monkeypatch):
    with pytest.raises(ValueError, match=r"AlphaZero\.num_simulations=0: use an integer of at least 1"):
        AlphaZero(num_simulations=0)
    with pytest.raises(TypeError, match=r"'alphazero' trains several agents, but environment 'CartPole-v1' has one"):
        check_env(AlphaZero, msrl.envs.make("CartPole-v1"))

    class Hosted(type(game)):
        on_host = True

    with pytest.raises(ValueError, match="simulated on the host, where states cannot be searched"):
        build(Hosted(game.game, game.name))
    monkeypatch.setitem(sys.modules, "mctx", None)
    with pytest.raises(ImportError, match=r"mctx, which is not installed; install it with: pip install 'msrl-jax\[search\]'"):
        build(game)


@pytest.mark.slow
def test_a_run_goes_on_exactly(tmp_path):
    options = {**SMALL, "total_steps": 10 * 32, "actor_period": 2, "eval_episodes": 1}
    whole = msrl.train("alphazero", GAME, **options)
    stopped = msrl.train("alphazero", GAME, **options, out=tmp_path, chunk=1, callbacks=[lambda tick: tick.iteration >= 5])
    assert stopped.history["iteration"][-1] == 5
    resumed = msrl.train(out=tmp_path, resume=True)
    assert_same_state(resumed.state, whole.state)


@pytest.mark.slow
def test_tic_tac_toe_is_never_lost(game):
    """With search: 1,000 games against perfect play, and all games that any opponent can play, on both sides."""
    result = msrl.train("alphazero", GAME, total_steps=409_600, random_share=0.2, network="mlp", eval_episodes=1)
    player = with_search(result)
    outcome = match(game, player, perfect(), games=1000)
    assert outcome.losses == 0 and outcome.finished.all()
    assert lost_games(game, player, seat=0)[1] == lost_games(game, player, seat=1)[1] == 0
