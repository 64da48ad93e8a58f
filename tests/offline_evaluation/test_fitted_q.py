"""Fitted Q evaluation against dynamic programming by hand, on any devices, and what it refuses."""

import dataclasses
import functools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import msrl_jax as msrl
from msrl_jax.cli import main
from msrl_jax.data import Dataset
from msrl_jax.envs import Box, Discrete
from msrl_jax.offline_evaluation import fitted_q as room
from msrl_jax.offline_evaluation.fitted_q import FittedQ, estimate_return, fitted_q, returns_to_go
from tests.support.acting import acting as new_agent
from tests.support.keys import key_uses, reused_keys

STATES, DISCOUNT = 4, 0.8


class Ring:
    """States in a ring, of which one ends an episode; the dynamics are in the data, so nothing steps it."""

    observation_space = Box(0.0, 1.0, (STATES,))
    action_space = Discrete(2)

    def reset(self, key):
        raise NotImplementedError

    def step(self, key, state, action):
        raise NotImplementedError


def after(state, action):
    """The next state, the reward, and whether the episode ends: one step on, or two for 0.3 less; state 3 is the goal."""
    reached = min(state + 1 + action, STATES - 1)
    return reached, float(reached == STATES - 1) - 0.3 * action, reached == STATES - 1


def ring_data(episodes=60, seed=0):
    rng, rows = np.random.default_rng(seed), []
    for _ in range(episodes):
        state, over = 0, False
        while not over:
            action = int(rng.integers(2))
            reached, reward, over = after(state, action)
            is_cut = not over and rng.random() < 0.2  # by a time limit
            rows.append((state, action, reward, over, is_cut, reached))
            state, over = reached, over or is_cut
    state, action, reward, terminated, truncated, reached = (np.array(x) for x in zip(*rows, strict=True))
    hot = np.eye(STATES, dtype=np.float32)
    return Dataset(hot[state], action, reward, terminated, truncated, hot[reached])


def value_by_hand(policy):
    """The discounted return from state 0 of a policy, a list of actions."""
    state, total, weight, over = 0, 0.0, 1.0, False
    while not over:
        state, reward, over = after(state, policy[state])
        total, weight = total + weight * reward, weight * DISCOUNT
    return total


def acting(policy):
    return lambda obs: jnp.asarray(policy)[jnp.argmax(obs, axis=-1)]


SMALL = FittedQ(discount=DISCOUNT, num_updates=600, fits=8, batch_size=64, learning_rate=0.01, hidden_sizes=(16,))


def test_a_value_is_that_of_dynamic_programming():
    found = fitted_q(Ring(), acting([0] * STATES), ring_data(), SMALL)
    assert found.value == pytest.approx(value_by_hand([0] * STATES), abs=0.03) and found.values.shape == (8,)
    low, high = found.interval
    assert low <= found.value <= high and f"({low:.4g} to {high:.4g})" in str(found)


def rows_from(*starts, rewards=None):
    """Episodes of single steps from these states, with action 0."""
    hot, rows = np.eye(STATES, dtype=np.float32), []
    for start in starts:
        for state in range(start, STATES - 1):
            rows.append((state, 0, *after(state, 0)))
    state, action, reached, reward, over = (np.array(x) for x in zip(*rows, strict=True))
    reward = reward if rewards is None else reward + np.array(rewards)
    return Dataset(hot[state], action, reward, over, np.zeros(len(rows), bool), hot[reached])


@pytest.mark.long
def test_each_fit_values_the_first_observations_of_its_own_episodes():
    """An episode from state 0 is worth 0.64 and one from state 2 is worth 1: fits that drew more of the latter are higher."""
    starts = np.array([0, 2] * 4)
    found = fitted_q(Ring(), acting([0] * STATES), rows_from(*starts), SMALL, seed=1)
    drawn = np.random.default_rng(1).integers(len(starts), size=(8, len(starts)))
    worth = np.where(starts[drawn] == 0, DISCOUNT**2, 1.0).mean(1)
    assert worth.std() > 0.04
    np.testing.assert_allclose(found.values, worth, atol=0.03)
    # The deviation of bootstrapped values is the standard error of the estimate.
    half = stats.t.ppf(0.975, 7) * found.values.std(ddof=1)
    np.testing.assert_allclose(found.interval, found.values.mean() + np.array([-half, half]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*still changed")
def test_a_fit_sees_nothing_of_an_episode_that_it_has_not_drawn():
    """The drawn episodes differ in length, so that those of most fits are filled up, with row 0."""
    starts, settings = (0, 2, 1, 0), dataclasses.replace(SMALL, num_updates=20)
    plain, other = (
        fitted_q(Ring(), acting([0] * STATES), rows_from(*starts, rewards=[extra, *[0] * 8]), settings, seed=0)
        for extra in (0.0, 0.3)
    )
    drawn = np.random.default_rng(0).integers(len(starts), size=(8, len(starts)))
    has_first = (drawn == 0).any(1)
    counts = np.array([3, 1, 2, 3])[drawn].sum(1)
    assert has_first.any() and (~has_first & (counts < counts.max())).any()
    np.testing.assert_array_equal((plain.values != other.values), has_first)


@pytest.fixture
def iteration(monkeypatch):
    """One iteration of fits whose episodes differ in length, and the state before it."""
    compiled = []

    def stop(iteration, state, **_):
        compiled.append((iteration, state))
        raise InterruptedError

    monkeypatch.setattr(room, "compile", stop)
    with pytest.raises(InterruptedError):
        fitted_q(Ring(), acting([0] * STATES), rows_from(0, 2), SMALL)
    return compiled[0]


def test_no_minibatch_is_drawn_twice(iteration):
    step, state = iteration
    uses = key_uses(lambda state: jax.lax.scan(lambda state, _: step(state), state, length=2), state)
    assert reused_keys(uses) == [] and sum(use.kind == "drawn from" for use in uses) >= 2 * SMALL.fits


def test_no_padding_is_drawn(iteration):
    step, state = iteration
    is_padding = np.arange(state.order.shape[1]) >= state.counts[:, None]
    assert is_padding.any()
    count = len(state.rows.reward)
    rows = jax.tree.map(lambda x: np.append(x, x[:1], axis=0), state.rows)
    rows.reward[count] = np.nan
    _, metrics = jax.jit(step)(state._replace(order=np.where(is_padding, count, state.order), rows=rows))
    assert np.isfinite(metrics["loss"])


@pytest.fixture(scope="module")
def briefly():
    settings = dataclasses.replace(SMALL, num_updates=100)
    return functools.partial(fitted_q, Ring(), acting([1, 0, 0, 0]), ring_data(), settings, seed=3)


@pytest.fixture(scope="module")
def on_one_device(briefly):
    return briefly(devices=jax.devices()[:1])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*still changed")
@pytest.mark.parametrize("policy", ["MultiLearner", pytest.param("SingleLearnerCoarse", marks=pytest.mark.slow)])
def test_fits_are_the_same_under_every_policy(policy, briefly, on_one_device):
    found = briefly(policy=policy)
    # Products of eight fits at once and of one are rounded otherwise, 100 times.
    np.testing.assert_allclose(found.values, on_one_device.values, rtol=1e-5)


def test_returns_to_go_stop_at_the_ends_of_episodes():
    data = ring_data(2)
    got, length = returns_to_go(data, 0.5), data.episodes.length[0]
    assert got[0] == pytest.approx(sum(0.5**i * r for i, r in enumerate(data.reward[:length])))
    assert got[-1] == data.reward[-1] and got[length - 1] == data.reward[length - 1]


@pytest.mark.slow
def test_rewards_of_any_size():
    data = ring_data()
    huge = dataclasses.replace(data, reward=data.reward * np.float32(3e38))  # their sums are no float32
    found = fitted_q(Ring(), acting([1, 1, 0, 0]), huge, dataclasses.replace(SMALL, fits=2))
    assert found.value == pytest.approx(3e38 * value_by_hand([1, 1, 0, 0]), abs=0.03 * 3e38)


@pytest.mark.slow
def test_fits_that_are_not_done_warn():
    with pytest.warns(UserWarning, match=r"still changed by .* use FittedQ with a larger num_updates or tau"):
        found = fitted_q(Ring(), acting([0] * STATES), ring_data(), dataclasses.replace(SMALL, num_updates=400, tau=0.005))
    assert found.change > 0.05 * found.value


@pytest.mark.slow
def test_a_trained_policy_is_valued_from_a_file_of_its_steps(tmp_path):
    small = {"num_envs": 4, "unroll_length": 32, "num_minibatches": 2, "eval_episodes": 0}
    pendulum, path = msrl.train("ppo", "Pendulum-v1", total_steps=512, progress=False, **small), tmp_path / "played.npz"
    data = msrl.data.record(pendulum, 1600, path, num_envs=8)
    settings = FittedQ(num_updates=600, fits=4, batch_size=64, discount=0.9, tau=0.5)
    found = estimate_return(pendulum, path, settings)
    assert found.values.shape == (4,) and found.discount == 0.9
    # Pendulum's rewards are from -16.3 to 0, so values are within these over 1 - discount.
    assert -163 < found.value < -10 and found.interval[0] < found.value < found.interval[1]
    again = estimate_return(pendulum, data, settings)
    np.testing.assert_array_equal(found.values, again.values)


@pytest.mark.long
def test_the_command_estimates_from_data(tmp_path, capsys, monkeypatch):
    estimate = room.estimate_return

    def shorter(result, source, settings, **options):
        return estimate(result, source, dataclasses.replace(settings, num_updates=1000, tau=0.05), **options)

    monkeypatch.setattr(room, "estimate_return", shorter)
    small = {"num_envs": 8, "unroll_length": 8, "num_minibatches": 2, "hidden_sizes": (8,), "eval_episodes": 0}
    small |= {"progress": False, "policy": "GPUOnly:num_devices=1"}
    msrl.train("ppo", "CartPole-v1", total_steps=256, out=tmp_path / "run", **small)
    run, played = str(tmp_path / "run"), str(tmp_path / "played.npz")
    assert main(["record", run, "--steps", "400", "--out", played]) == 0
    capsys.readouterr()
    assert main(["estimate", run, "--data", played, "--discount", "0.5", "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["discount"] == 0.5 and len(outcome["values"]) == 8
    assert outcome["value"] == pytest.approx(2, abs=0.1)  # CartPole: a reward of 1 a step
    assert main(["estimate", run]) == 2 and "--data" in capsys.readouterr().err


def result_of(name):
    """A run of an algorithm that has not trained."""
    behavior, _ = new_agent(name, "CartPole-v1")
    return SimpleNamespace(behavior=behavior, experiment=SimpleNamespace(name=name))


def test_what_cannot_be_estimated():
    data, env, act = ring_data(), Ring(), acting([0] * STATES)
    numbers = [("discount", 1.0), ("discount", "x"), ("fits", 1), ("tau", 0), ("learning_rate", None), ("num_updates", 0.5)]
    for name, value in [*numbers, ("hidden_sizes", 8), ("layer_norm", "no"), ("activation", "foo"), ("network", "foo")]:
        with pytest.raises(ValueError, match=rf"FittedQ\.{name}={value!r}: use"):
            FittedQ(**{name: value})
    with pytest.raises(TypeError, match=r"pass a msrl_jax\.offline_evaluation\.FittedQ"):
        fitted_q(env, act, data, {"discount": 0.9})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="single episode"):
        fitted_q(env, act, ring_data(1), SMALL)
    ppo = result_of("ppo")
    with pytest.raises(TypeError, match="from_episodes"):
        estimate_return(ppo, [{"obs": [1]}])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="obs of the data set is outside the observation_space"):
        estimate_return(ppo, data)
    with pytest.raises(ValueError, match=r"nowhere\.npz"):
        estimate_return(ppo, "nowhere.npz")
    with pytest.raises(ValueError, match="is recurrent"):
        estimate_return(result_of("recurrent_ppo"), data)
