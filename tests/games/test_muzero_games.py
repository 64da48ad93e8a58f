"""MuZero in games of two players: who acts and is paid, what a search makes of replies, what crosses, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.data.experience import RecordedEnvironment
from msrl_jax.games import MuZero, match, minimax, with_search
from msrl_jax.games.latent_model import LatentModel
from msrl_jax.games.matches import _player_of
from msrl_jax.games.muzero import model_searcher
from msrl_jax.games.small_games import KuhnPoker
from msrl_jax.games.turn_based import OneMover, draws, vectorize_turns
from tests.support.agents import make_still
from tests.support.many_agents import Homes
from tests.support.searches import apart
from tests.support.tic_tac_toe import lost_games, perfect

GAME = "pgx:tic_tac_toe"
SMALL = {
    "num_envs": 8,
    "unroll_length": 4,
    "num_simulations": 4,
    "num_updates": 2,
    "batch_size": 16,
    "replay.capacity": 512,
    "replay.n_step": 2,
    "replay.learning_starts": 64,
    "model_steps": 2,
    "hidden_sizes": (8,),
    "latent_size": 6,
    "network": "mlp",
}


@pytest.fixture(scope="module")
def game():
    return msrl.envs.make(GAME)


def test_whoever_is_to_move_acts_sees_and_is_paid(game):
    """The first of two games is won by who began it, the second is drawn; then both begin anew."""
    venv = OneMover(vectorize_turns("muzero", game, 2), game)
    state, obs = jax.jit(venv.reset)(jax.random.key(3))
    step, plain = jax.jit(venv.step), jax.jit(game.step)
    alone = [jax.tree.map(lambda x, e=e: x[e], state.env_state) for e in range(2)]
    won, drawn = [0, 3, 1, 4, 2], [0, 1, 2, 4, 3, 5, 7, 6, 8]
    for turn in range(9):
        moves = [won[turn] if turn < 5 else None, drawn[turn]]
        for e in range(2):
            player = int(alone[e].current_player)
            np.testing.assert_array_equal(obs.obs[e], game._observe(alone[e])[player])
            np.testing.assert_array_equal(obs.action_mask[e], game.action_mask(alone[e])[player])
        if moves[0] is None:  # its next game: any legal move
            moves[0] = int(np.argmax(obs.action_mask[0]))
        state, t = step(state, jnp.array(moves))
        for e in range(2):
            alone[e], seen, *_ = plain(jax.random.key(0), alone[e], jnp.full(2, moves[e]))
            np.testing.assert_array_equal(t.final_obs.obs[e], seen[alone[e].current_player])
            if t.ended[e]:
                alone[e] = jax.tree.map(lambda x, e=e: x[e], state.env_state)
        over = [turn == 4, turn == 8]
        np.testing.assert_array_equal(t.terminated, over)
        np.testing.assert_array_equal(t.reward, [over[0], 0])
        assert not t.truncated.any()
        obs = t.obs


class Twice:
    """A game in which the second player never gets a turn."""

    agents, action_space = ("one", "two"), msrl.envs.Discrete(2)
    observation_space = msrl.envs.Box(0, 1, (1,))

    def reset(self, key):
        return jnp.int32(0), jnp.zeros((2, 1))

    def step(self, key, state, action):
        return state + 1, jnp.zeros((2, 1)), jnp.zeros(2), jnp.full(2, state >= 3), jnp.asarray(False)

    def to_move(self, state):
        return jnp.zeros_like(state)

    def action_mask(self, state):
        return jnp.array([[True, True], [True, False]])


class Unknown(Twice):
    """A game with players 1 and 2."""

    def to_move(self, state):
        return state % 2 + 1


class CutOff(Twice):
    """A game that is cut off before the turn passes."""

    def step(self, key, state, action):
        return *super().step(key, state, action)[:4], jnp.asarray(True)


class OneMove(Twice):
    """A game that ends with its only move."""

    def step(self, key, state, action):
        return *super().step(key, state, action)[:3], jnp.full(2, True), jnp.asarray(False)


def test_after_the_end_of_a_game_the_turn_need_not_pass():
    venv = OneMover(vectorize_turns("muzero", OneMove(), 2), OneMove())
    _, t = venv.step(venv.reset(jax.random.key(0))[0], jnp.zeros(2, jnp.int32))
    assert t.terminated.all() and t.reward.tolist() == [0, 0]


@pytest.mark.parametrize("game", [Twice(), Unknown(), CutOff()])
def test_the_turns_of_both_players_have_to_alternate(game):
    venv = OneMover(vectorize_turns("muzero", game, 2), game)
    state = venv.reset(jax.random.key(0))[0]
    for _ in range(2):
        state, t = venv.step(state, jnp.zeros(2, jnp.int32))
    assert np.isnan(t.reward).all()


@pytest.mark.long
def test_the_steps_of_games_are_recorded(game):
    """What both players see, and both actions, as of other algorithms for several agents."""
    venv = OneMover(vectorize_turns("muzero", RecordedEnvironment(game, 4), 2), game)
    state, obs = venv.reset(jax.random.key(0))
    player = venv.env.states(state).current_player
    after, t = venv.step(state, jnp.array([3, 4]))
    np.testing.assert_array_equal(after.rows.action[0][jnp.arange(2), player], [3, 4])
    np.testing.assert_array_equal(after.rows.action[0][jnp.arange(2), 1 - player], [9, 9])
    np.testing.assert_array_equal(after.rows.obs.obs[0][jnp.arange(2), player], obs.obs)
    np.testing.assert_array_equal(after.obs.obs[jnp.arange(2), 1 - player], t.obs.obs)


@pytest.mark.long
def test_what_a_move_lets_the_other_player_win_counts_against_it():
    """In a model of which a network knows all: a move pays, and whatever the other player replies pays that one."""
    rng = np.random.default_rng(0)
    pays, replies = rng.permuted(np.tile(np.arange(4.0), (2, 64, 1)), axis=-1).astype(np.float32)  # of the first move, [64, 4]
    config = MuZero(num_simulations=16, gumbel_scale=0.0, value_scale=1.0)

    def rescaled(x):
        return jnp.sqrt(x + 1) - 1 + config.rescale_epsilon * x

    def step(params, latent, action):
        """A latent state is what moves and replies pay, and how many moves were made."""
        number = latent[..., 8]
        paid = jnp.take_along_axis(latent[..., :4], action[..., None], axis=-1)[..., 0]
        reply = jnp.take_along_axis(latent[..., 4:8], action[..., None], axis=-1)
        reward = jnp.where(number == 0, paid, jnp.where(number == 1, latent[..., 4], 0.0))
        after = [latent[..., :4], jnp.broadcast_to(reply, (*reply.shape[:-1], 4)), number[..., None] + 1]
        return jnp.concatenate(after, -1), rescaled(reward)

    def predict(params, latent):
        return jnp.zeros((*latent.shape[:-1], 4)), jnp.where(latent[..., 8] == 1, rescaled(latent[..., 4]), 0.0)

    model = LatentModel(lambda key, obs: (), lambda params, obs: obs, step, predict)
    obs, keys = np.concatenate([pays, replies, np.zeros((64, 1), np.float32)], axis=1), jax.random.split(jax.random.key(0), 64)
    for discount, worth in ((-1.0, pays - replies), (1.0, pays + replies)):
        action, _ = jax.jit(model_searcher(config, model, 16, 0.0, discount))((), keys, obs)
        found = np.take_along_axis(worth, np.asarray(action)[:, None], 1)[:, 0]
        np.testing.assert_array_equal(found, worth.max(1))


@pytest.mark.long
def test_search_and_learning_are_apart_with_one_word(game):
    """With search where the games are and learning elsewhere, steps of who is to move go to the learner, and no game does."""
    _, up = apart(make_still("muzero", game, **SMALL))
    # A step: two views of 18 numbers and 10 legal actions, an action, 10 probabilities, a reward and two flags, of 8 games.
    assert 32 * (2 * (18 * 4 + 10) + 4 + 40 + 4 + 2) <= up <= 32 * (2 * (18 * 4 + 10) + 4 + 40 + 4 + 2) + 256


class Dice(Twice):
    """A game of chance."""

    def step(self, key, state, action):
        state, obs, *rest = super().step(key, state, action)
        return state, obs + jax.random.uniform(key), *rest


class Coin(Twice):
    """A game of chance, whose dice are a key of another kind in its state."""

    def reset(self, key):
        return jax.random.key_data(key), jnp.zeros((2, 1))

    def step(self, key, state, action):
        state, toss = jax.random.split(jax.random.wrap_key_data(state))
        reward = jnp.where(jax.random.bernoulli(toss), 1.0, -1.0) * jnp.array([1.0, -1.0])
        return jax.random.key_data(state), jnp.zeros((2, 1)), reward, jnp.full(2, True), jnp.asarray(False)

    def to_move(self, state):
        return jnp.int32(0)


class Passes(Twice):
    """A game without chance that carries its key through a loop."""

    def step(self, key, state, action):
        number, _ = jax.lax.while_loop(lambda x: x[0] < 1, lambda x: (x[0] + 1, x[1]), (jnp.int32(0), key))
        return super().step(key, state + number - 1, action)


def test_a_key_that_is_passed_on_is_no_chance():
    assert draws(Dice()) and draws(Coin()) and not draws(Passes())


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Coin(), r"muzero needs a deterministic game, but Coin\.step draws random numbers; use self_play"),
        (Dice(), r"muzero needs a deterministic game, but Dice\.step draws random numbers; use self_play"),
        (Homes(), r"muzero is for two-player games .* 'Homes' has 3 agents .* use self_play"),
        (KuhnPoker(), r"muzero is for two-player games with alternating .* but environment 'KuhnPoker'"),
    ],
)
def test_games_that_do_not_fit_are_refused(env, message):
    with pytest.raises(ValueError, match=message):
        make_still("muzero", env, **SMALL)


@pytest.mark.slow
def test_an_agent_plays_both_seats_and_searches_in_them(game, tmp_path):
    result = msrl.train("muzero", GAME, total_steps=320, eval_episodes=0, devices=jax.devices()[:1], **SMALL)
    assert set(result.history) >= {"episode_draw", "episode_player_0_wins"} and (result.evaluate(4).returns == 0).all()
    searching = with_search(msrl.Result.load(result.save(tmp_path / "run")), 8)
    assert isinstance(searching, msrl.Result) and searching.config.act_simulations == 8
    state, obs = game.reset(jax.random.key(0))
    masked = msrl.envs.MaskedObservation(obs, game.action_mask(state))
    for player in (result, searching):
        waits, moves = 1 - int(state.current_player), int(state.current_player)
        action, policy = np.asarray(player.act(masked)), np.asarray(player.probabilities(masked))
        assert action[waits] == 9 and action[moves] < 9 and policy[waits, 9] > 0.999 and policy[moves, 9] == 0
        drawn = player.act(jax.tree.map(lambda x: jnp.stack([x] * 64), masked), jax.random.key(1))
        assert drawn.shape == (64, 2) and len(set(np.asarray(drawn)[:, moves])) > 3
    assert match(game, searching, minimax(game, 1), games=2).finished.all()


@pytest.mark.slow
def test_tic_tac_toe_is_hardly_ever_lost_by_who_has_learned_its_rules(game):
    """1,000 games against perfect play, and all games that any opponent can play; of eight runs, the worst lost 21 and 2."""
    options = {
        "hidden_sizes": (128, 128),
        "latent_size": 128,
        "reward_coef": 100.0,
        "value_coef": 30.0,
        "value_scale": 0.1,
        "discount": 1.0,
        "random_share": 0.3,
        "network": "mlp",
    }
    result = msrl.train("muzero", GAME, total_steps=400_000, eval_episodes=1, devices=jax.devices()[:1], **options)
    outcome = match(game, result, perfect(), games=1000)
    games, lost = np.sum([lost_games(game, _player_of(result, game), seat=seat) for seat in (0, 1)], axis=0)
    assert outcome.losses <= 50 and outcome.finished.all() and lost <= games / 100
