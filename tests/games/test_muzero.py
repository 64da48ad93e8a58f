"""MuZero: targets and losses of an unrolled model, what a search in it finds, one update in plain formulas, what is refused."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.envs import Box, Discrete, MaskedObservation
from msrl_jax.envs.actions import action_type
from msrl_jax.envs.masks import observation_type, unmasked
from msrl_jax.games import MuZero, with_search
from msrl_jax.games.latent_model import LatentModel, latent_model
from msrl_jax.games.muzero import (
    SearchedAction,
    Unrolled,
    model_searcher,
    unroll_buffer,
    unrolled,
    unrolled_loss,
    unrolled_target,
)
from msrl_jax.games.turn_based import player_observation, vectorize_turns
from msrl_jax.networks.torso import make_torso
from msrl_jax.replay import Transition
from tests.support.agents import make_counted, make_still
from tests.support.off_policy import adam, assert_close, counting, start, wide
from tests.support.random_walk import RandomWalk
from tests.support.slow import slow_unless

E, B, M, N = 8, 16, 3, 2
SMALL = {
    "num_envs": E,
    "unroll_length": 4,
    "num_simulations": 4,
    "num_updates": 2,
    "batch_size": B,
    "replay.capacity": 512,
    "replay.n_step": N,
    "replay.learning_starts": 64,
    "model_steps": M,
    "hidden_sizes": (8,),
    "latent_size": 6,
}


def plain_rescale(x, epsilon):
    return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + epsilon * x


def plain_unrescale(x, epsilon):
    root = (np.sqrt(1 + 4 * epsilon * (np.abs(x) + 1 + epsilon)) - 1) / (2 * epsilon)
    return np.sign(x) * (root**2 - 1)


def plain_target(window, next_value, discount, num_steps, model_steps):
    """Step by step: values, rewards, whether the episode goes on, and whether what comes is known."""
    count = window.reward.shape[1]
    value, reward = np.zeros((model_steps + 1, count)), np.zeros((model_steps, count))
    lives, counts = np.zeros((2, model_steps + 1, count), bool)
    for e in range(count):
        state = "lives"
        for k in range(model_steps + 1):
            lives[k, e], counts[k, e] = state == "lives", state != "unknown"
            if state == "lives":
                factor = 1.0
                for t in range(k, k + num_steps):
                    value[k, e] += factor * window.reward[t, e]
                    factor *= discount
                    if window.terminated[t, e]:
                        break
                    if window.truncated[t, e] or t == k + num_steps - 1:
                        value[k, e] += factor * next_value[t, e]
                        break
                if k < model_steps:
                    reward[k, e] = window.reward[k, e]
                if window.terminated[k, e] or window.truncated[k, e]:
                    state = "over" if window.terminated[k, e] else "unknown"
    return value, reward, lives, counts


def test_targets_by_hand():
    """Of two windows of four steps: one terminates at its second step, the other is truncated at its first."""
    terminated = np.array([[0, 0], [1, 0], [0, 0], [0, 0]], bool)
    truncated = np.array([[0, 1], [0, 0], [0, 0], [0, 0]], bool)
    reward = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32)
    next_value = np.array([[10, 20], [30, 40], [50, 60], [70, 80]], np.float32)
    window = Transition(None, jnp.zeros((4, 2, 3)), jnp.asarray(reward), jnp.asarray(terminated), jnp.asarray(truncated), None)
    found = unrolled_target(window, jnp.asarray(next_value), discount=0.5, num_steps=2, model_steps=2)
    np.testing.assert_allclose(found.value, [[1 + 0.5 * 3, 2 + 0.5 * 20], [3, 0], [0, 0]])
    np.testing.assert_allclose(found.reward, [[1, 2], [3, 0]])
    np.testing.assert_array_equal(found.lives, [[1, 1], [1, 0], [0, 0]])
    np.testing.assert_array_equal(found.counts, [[1, 1], [1, 0], [1, 0]])


@pytest.mark.parametrize(("num_steps", "model_steps", "discount"), [(1, 1, 0.9), (3, 5, 0.9), (5, 2, -0.9)])
def test_targets_equal_a_loop_across_the_ends_of_episodes(num_steps, model_steps, discount):
    """Where players alternate, the discount factor is negative."""
    rng, length = np.random.default_rng(0), num_steps + model_steps
    reward, next_value = rng.normal(size=(2, length, 200)).astype(np.float32)
    terminated, truncated = rng.random((2, length, 200)) < 0.15
    policy = rng.dirichlet(np.ones(3), (length, 200)).astype(np.float32)
    window = Transition(None, policy, jnp.asarray(reward), jnp.asarray(terminated), jnp.asarray(truncated), None)
    target = functools.partial(unrolled_target, discount=discount, num_steps=num_steps, model_steps=model_steps)
    got = jax.jit(target)(window, jnp.asarray(next_value))
    want = plain_target(window, next_value, discount, num_steps, model_steps)
    for a, b in zip(got[1:], want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got.policy, policy[: model_steps + 1])


def test_the_loss_in_plain_formulas():
    """Predictions of the model's steps weigh `1 / M`; after the end of an episode, no policy counts."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(M + 1, B, 3)).astype(np.float32)
    value, wanted_value = rng.normal(size=(2, M + 1, B)).astype(np.float32)
    reward, wanted_reward = rng.normal(size=(2, M, B)).astype(np.float32)
    policy = rng.dirichlet(np.ones(3), (M + 1, B)).astype(np.float32)
    lives = np.cumsum(rng.random((M + 1, B)) < 0.3, 0) == 0
    counts = lives | (rng.random(B) < 0.5)
    target = Unrolled(*map(jnp.asarray, (policy, wanted_value, wanted_reward, lives, counts)))
    predicted = jnp.asarray(logits), jnp.asarray(value), jnp.asarray(reward)
    losses, stats = unrolled_loss(*predicted, target, 0.25, 3.0)
    log_prob = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    of_policy, of_value = -(policy * log_prob).sum(-1) * lives, (value - wanted_value) ** 2 / 2 * counts
    of_reward = (reward - wanted_reward) ** 2 / 2 * counts[:-1]
    want = of_policy[0] + 0.25 * of_value[0]
    want += (of_policy[1:] + 0.25 * of_value[1:] + 3 * of_reward).sum(0) / M
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    np.testing.assert_allclose(stats["policy_loss"], of_policy[0].mean(), rtol=1e-5)
    np.testing.assert_allclose(stats["reward_loss"], of_reward.mean(), rtol=1e-5)


def test_half_of_a_gradient_goes_through_every_step_of_the_model():
    """A model that multiplies: of `p` to the third power, the slope is 1 + 1/2 + 1/4 in place of 3 where `p` is 1."""
    model = LatentModel(
        lambda key, obs: (),
        lambda params, obs: obs,
        lambda params, latent, action: (params * latent, latent[..., 0]),
        lambda params, latent: (latent, latent[..., 0]),
    )
    last = lambda p: unrolled(model, p, jnp.ones((1, 1)), jnp.zeros((M, 1), jnp.int32))[1][-1, 0]
    assert last(jnp.float32(2.0)) == 8 and jax.grad(last)(jnp.float32(1.0)) == 1 + 0.5 + 0.25


ARM = 2


def arms(config, num_actions=4):
    """The search of a config in a model in which one action is rewarded, of which its network knows nothing."""
    flat = lambda latent: (jnp.zeros((*latent.shape[:-1], num_actions)), jnp.zeros(latent.shape[:-1]))
    model = LatentModel(
        lambda key, obs: (),
        lambda params, obs: unmasked(obs),
        lambda params, latent, action: (latent, jnp.where(action == ARM, 1.0, 0.0)),
        lambda params, latent: flat(latent),
    )
    return jax.jit(
        functools.partial(model_searcher(config, model, config.num_simulations, config.gumbel_scale, config.discount), ())
    )


def test_a_search_finds_what_its_model_rewards():
    search = arms(MuZero(num_simulations=16, gumbel_scale=0.0, value_scale=0.1))
    action, policy = search(jax.random.split(jax.random.key(0), 3), jnp.zeros((3, 5)))
    np.testing.assert_array_equal(action, ARM)
    assert (policy.argmax(-1) == ARM).all() and (policy[:, ARM] > 0.9).all()
    np.testing.assert_allclose(policy.sum(-1), 1.0, rtol=1e-6)


@pytest.mark.slow
def test_a_search_takes_no_illegal_action_and_every_environment_has_its_own():
    """Where the rewarded action is illegal, its probability is 0; what one environment finds depends on no other."""
    search, keys = arms(MuZero(num_simulations=8, gumbel_scale=3.0)), jax.random.split(jax.random.key(0), 64)
    mask = np.random.default_rng(0).random((64, 4)) < 0.6
    mask[:, 0] = True
    action, policy = search(keys, MaskedObservation(jnp.zeros((64, 5)), jnp.asarray(mask)))
    assert mask[np.arange(64), action].all() and not np.asarray(policy)[~mask].any() and (~mask[:, ARM]).any()
    others = search(keys[::2], MaskedObservation(jnp.zeros((32, 5)), jnp.asarray(mask[::2])))
    for a, b in zip((action, policy), others, strict=True):
        np.testing.assert_allclose(a[::2], b, rtol=1e-6)


def plain_network(params, obs, actions, xp):
    """The networks written out: logits, values and rewards along actions `[M, B]`, without half gradients."""
    p = params["params"]
    layer = lambda name, x: x @ p[name]["kernel"] + p[name]["bias"]
    torso = lambda name, x: xp.maximum(x @ p[name]["Dense_0"]["kernel"] + p[name]["Dense_0"]["bias"], 0)

    def scaled(x):
        low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
        return (x - low) / (high - low + 1e-5)

    def predict(latent):
        x = torso("prediction", latent)
        return layer("policy_head", x), layer("value_head", x)[..., 0]

    latent = scaled(layer("first_latent", torso("torso", obs)))
    predictions, rewards = [predict(latent)], []
    for action in actions:
        x = torso("dynamics", xp.concatenate([latent, np.eye(p["policy_head"]["bias"].size)[action]], -1))
        rewards.append(layer("reward_head", x)[..., 0])
        latent = scaled(latent + layer("next_latent", x))
        predictions.append(predict(latent))
        if xp is jnp:
            latent = latent / 2 + jax.lax.stop_gradient(latent) / 2
    logits, values = (xp.stack(x) for x in zip(*predictions, strict=True))
    return logits, values, rewards


class Heap:
    """Two players in turns take 1 to 3 from a heap, and whoever takes the last wins; some games are cut off."""

    agents, observation_space, action_space = ("one", "two"), Box(0, 1, (3,)), Discrete(3)

    def reset(self, key):
        state = jax.random.randint(key, (), 4, 12), jnp.int32(0)
        return state, self._observe(*state)

    def step(self, key, state, action):
        heap, turn = state
        heap = jnp.maximum(heap - 1 - action[turn % 2], 0)
        reward = jnp.where(heap == 0, jnp.where(jnp.arange(2) == turn % 2, 1.0, -1.0), 0.0)
        return (heap, turn + 1), self._observe(heap, turn + 1), reward, jnp.full(2, heap == 0), turn >= 3

    def to_move(self, state):
        return state[1] % 2

    def action_mask(self, state):
        return (jnp.arange(3) == 0) | (jnp.arange(3) < state[0]) & (jnp.arange(2)[:, None] == state[1] % 2)

    def _observe(self, heap, turn):
        return jnp.broadcast_to(jnp.stack([heap / 12, heap % 4 / 4, turn / 4]), (2, 3))


@pytest.mark.long
@pytest.mark.parametrize("env", [slow_unless(False, RandomWalk(), id="alone"), pytest.param(Heap(), id="game")])
def test_one_update_equals_an_independent_implementation(env):
    """Values of the target network make the targets; losses and gradients are those of the networks written out.

    In a game, a step's successor is of the other player, so its worth counts with the other sign.
    """
    options = {"num_updates": 1, "learning_rate": 3e-3, "value_coef": 0.5, "reward_coef": 2.0}
    config, is_game = msrl.algorithms.make(MuZero, SMALL | options), isinstance(env, Heap)
    seen = player_observation(vectorize_turns("muzero", env, E)) if is_game else observation_type(env)
    agent = config.build(env)
    iterate = counting(agent, 100)
    state = start(agent, 6, iterate)
    keys = iter(jax.random.split(jax.random.key(1), 64))
    far = lambda params: jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape), params)
    state = state._replace(params=far(state.params), target_params=far(state.target_params))
    after, metrics = iterate(state, 6)
    choice = SearchedAction(action_type(env.action_space), jax.ShapeDtypeStruct((env.action_space.n,), jnp.float32))  # type: ignore[arg-type]
    buffer = unroll_buffer(seen, choice, config)
    sample = jax.jit(buffer.sample)(after.replay, jax.random.split(state.replay_key, 2)[1])
    window = jax.tree.map(np.asarray, sample.experience)
    window = window._replace(obs=unmasked(window.obs), next_obs=unmasked(window.next_obs))
    assert window.reward.shape == (M + N, B) and window.terminated.any() and window.truncated.any()
    np.testing.assert_allclose(window.action.policy.sum(-1), 1.0, rtol=1e-5)

    epsilon = config.rescale_epsilon
    _, next_value, _ = plain_network(wide(state.target_params), np.float64(window.next_obs), (), np)
    next_value = plain_unrescale(next_value[0], epsilon)
    value, reward, lives, counts = plain_target(window, next_value, -config.discount if is_game else config.discount, N, M)

    def loss(params):
        logits, values, rewards = plain_network(params, window.obs[0], window.action.action[:M], jnp)
        total = 0.0
        for k in range(M + 1):
            policy_loss = -(window.action.policy[k] * jax.nn.log_softmax(logits[k])).sum(-1)
            value_loss = (values[k] - plain_rescale(value[k], epsilon)) ** 2 / 2
            losses = lives[k] * policy_loss + config.value_coef * counts[k] * value_loss
            if k:
                losses += config.reward_coef * counts[k - 1] * (rewards[k - 1] - plain_rescale(reward[k - 1], epsilon)) ** 2 / 2
            total += losses.mean() / (M if k else 1)
        return total

    gradient = jax.jit(jax.grad(loss))(state.params)
    want = adam(state.params, state.opt_state, gradient, config, left=1 - 6 / 100)
    assert_close(after.params, want)
    moved = jax.tree.map(lambda old, new: (1 - config.tau) * old + config.tau * new, wide(state.target_params), want)
    assert_close(after.target_params, moved)
    assert np.isfinite([metrics[n].total for n in ("policy_loss", "value_loss", "reward_loss", "entropy", "value")]).all()


@pytest.mark.long
@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0.9, 1.0), slow_unless(False, 0.9, 0.3, 0.6)])
def test_the_first_steps_are_random_and_of_later_ones_a_share(share, low, high):
    """How many actions of the buffer are what a search nearly certain of them prefers."""
    options = {"value_scale": 100.0, "gumbel_scale": 0.0, "random_share": share, "anneal_learning_rate": False}
    agent = make_counted("muzero", RandomWalk(), **SMALL | options)
    run = jax.jit(lambda key: jax.lax.scan(lambda s, _: agent.iteration(s), agent.init(key), length=16)[0])
    items = jax.tree.map(lambda x: np.moveaxis(np.asarray(x), 1, 0), run(jax.random.key(0)).inner.replay.items)
    (action,) = (x for x in items if x.dtype == np.int32)
    (policy,) = (x for x in items if x.shape[-1:] == (3,) and np.allclose(x[:64].sum(-1), 1, atol=1e-5))
    same = (policy.argmax(-1) == action)[:64]
    assert same[:8].mean() < 0.6 and low <= same[8:].mean() <= high


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"act_simulations": 10**9}, r"MuZero\.act_simulations=1000000000: the search trees of .* use act_simulations="),
        ({"num_simulations": 10**9}, r"MuZero\.num_simulations=1000000000: the search trees of num_envs=8 .* use num_simul"),
        ({"replay.capacity": 32}, r"MuZero: .* a window is length=5 steps long; .*\(model_steps \+ n_step are"),
        ({"act_simulations": -1}, r"MuZero\.act_simulations=-1: use an integer of at least 0"),
        ({"num_simulations": 0}, r"MuZero\.num_simulations=0: use an integer of at least 1"),
        ({"network": msrl.algorithms.CustomNetworks(actor=None)}, r"network=CustomNetworks\(\.\.\.\) does not support a model"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(options, message):
    with pytest.raises(ValueError, match=message) as error:
        make_still("muzero", msrl.envs.make("CartPole-v1"), **SMALL | options)
    assert "\n" not in str(error.value)


def test_environments_that_do_not_fit_are_refused(monkeypatch):
    with pytest.raises(TypeError, match=r"MuZero values each of a finite number of actions, got .* for a Box of floats use"):
        MuZero().build(msrl.envs.make("Pendulum-v1"))
    monkeypatch.setitem(sys.modules, "mctx", None)
    with pytest.raises(ImportError, match=r"muzero searches with mctx, which is not installed; install it with: pip install"):
        MuZero().build(msrl.envs.make("CartPole-v1"))


@pytest.mark.slow
def test_an_agent_searches_outside_of_training_if_asked(tmp_path):
    """What it plays is the search of training without noise; after a short run, it earns much more than its network alone."""
    result = msrl.train("muzero", "CartPole-v1", total_steps=10_000, seed=10001, eval_episodes=1, devices=jax.devices()[:1])
    searching = with_search(result)
    assert isinstance(searching, msrl.Result) and searching.config.act_simulations == result.config.num_simulations == 16
    assert searching.evaluate(episodes=50).returns.mean() > 2 * result.evaluate(episodes=50).returns.mean()

    config, env = result.config, msrl.envs.make("CartPole-v1")
    obs = jax.random.normal(jax.random.key(0), (64, 4))
    actions = msrl.envs.Discrete(2)
    model = latent_model(make_torso(env.observation_space, config), actions, latent_size=config.latent_size)
    search = model_searcher(config, model, 16, 0.0, config.discount)
    action, policy = jax.jit(search)(result.state.params, jax.random.split(jax.random.key(1), 64), obs)
    assert (np.asarray(searching.act(obs)) == action).mean() > 0.95  # some actions are equally good, up to rounding
    np.testing.assert_allclose(searching.probabilities(obs), policy, atol=0.02)
    drawn = searching.act(jnp.broadcast_to(obs[0], (4000, 4)), jax.random.key(2))
    np.testing.assert_allclose(np.bincount(drawn, minlength=2) / 4000, searching.probabilities(obs[0]), atol=0.03)

    fewer = with_search(result, 3)
    assert isinstance(fewer, msrl.Result)
    loaded = msrl.Result.load(fewer.save(tmp_path / "run"))
    assert loaded.config.act_simulations == 3 and result.config.act_simulations == 0
    with pytest.raises(ValueError, match="num_simulations=0: use an integer of at least 1"):
        with_search(result, 0)
    with pytest.raises(ValueError, match="member=1: this run has only member 0"):
        with_search(result, member=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "options", "steps", "wanted"),
    [("CartPole-v1", {}, 200_000, 475), ("Catch-bsuite", {"reward_coef": 30}, 150_000, 0.95)],
)
def test_what_the_page_claims_is_reached_on_all_of_five_seeds(env, options, steps, wanted):
    for seed in range(5):
        result = msrl.train(
            "muzero", env, total_steps=steps, seed=seed, progress=False, eval_episodes=1, devices=jax.devices()[:1], **options
        )
        assert result.evaluate(episodes=100).returns.mean() >= wanted
