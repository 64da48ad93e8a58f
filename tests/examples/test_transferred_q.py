"""Transferred Q-learning: its Lasso, its MDPs, its estimates, and what it claims, under every policy with equal bits."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from examples import transferred_q as example
from tests.support.keys import key_uses, reused_keys

pytestmark = pytest.mark.long

SMALL = example.Setting(
    sources=8, source_episodes=40, target_episodes=8, episodes_per_iteration=4, coordinates=5, relevant=2, changed=1, stages=2
)
EIGHT = ("SingleLearnerCoarse", "GPUOnly", "SingleLearnerFine", "Environments", "MultiLearner", "Central")


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def test_the_lasso_meets_its_optimality_conditions():
    """Where a coefficient is not 0, the gradient of the squares is the penalty against its sign; elsewhere it is no larger."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 30)), rng.normal(size=20)
    gram, moment = x.T @ x / 20, x.T @ y / 20
    for penalty in (0.05, 0.2):
        b = np.asarray(example.lasso(jnp.asarray(gram), jnp.asarray(moment), penalty))
        gradient, used = gram @ b - moment, b != 0
        assert 0 < used.sum() < 30
        np.testing.assert_allclose(gradient[used], -penalty * np.sign(b[used]), rtol=0, atol=1e-9)
        assert np.abs(gradient).max() <= penalty + 1e-9


def test_optimal_q_is_what_dynamic_programming_finds_over_all_states():
    setting = dataclasses.replace(SMALL, coordinates=3, stages=3)
    task, _ = example.draw_tasks(3, setting)
    states = np.array(list(itertools.product([-1.0, 1.0], repeat=3)))
    following = np.zeros(8)
    for stage in (2, 1, 0):
        q = np.empty((8, 2))
        for (i, state), (a, action) in itertools.product(enumerate(states), enumerate((-1, 1))):
            x = np.concatenate([[1], state, [action], action * state])
            chances = (1 + states[:, 0] * (x @ task.step[stage])) / 8  # of the next state; the sum over four of each is 1
            assert np.isclose(chances.sum(), 1) and (chances >= 0).all()
            q[i, a] = x @ task.reward[stage] + chances @ following
        found = example.action_values(jnp.asarray(states), jnp.asarray(example.optimal_q(task)[stage]))
        np.testing.assert_allclose(found.T, q, rtol=1e-12, atol=1e-12)
        following = q.max(1)


def descend(x, y, penalty):
    """The Lasso by coordinate descent."""
    b = np.zeros(x.shape[1])
    for _ in range(5000):
        for j in range(len(b)):
            z = x[:, j] @ (y - x @ b) / len(y) + b[j]
            b[j] = np.sign(z) * max(abs(z) - penalty, 0)
    return b


def design(data, task, stage):
    states, actions = np.asarray(data.states[task, :, stage]), np.asarray(data.actions[task, :, stage])[:, None]
    return np.hstack([np.ones_like(actions), states, actions, actions * states])


def test_the_estimate_is_that_of_the_paper_written_out():
    state = example.initial_state(0, SMALL, 3)
    target = jax.tree.map(lambda x: x[:1], example.initial_state(1, SMALL, 1).sources)
    found = example.estimate_backward(state.sources, target, jnp.array([0.3, 0.2]))
    following = np.zeros(12)
    for stage in (1, 0):
        tasks = [(state.sources, 0), (state.sources, 1), (state.sources, 2), (target, 0)]
        x = [design(data, task, stage) for data, task in tasks]
        y = []
        for data, task in tasks:
            after = np.asarray(data.states[task, :, stage + 1])
            after = np.hstack([np.ones((len(after), 1)), after])
            value = after @ following[:6] + np.abs(after @ following[6:])
            y.append(np.asarray(data.rewards[task, :, stage]) + value)
        pooled = descend(np.vstack(x), np.hstack(y), 0.3 * np.sqrt(np.log(12) / 160))
        following = pooled + descend(x[-1], y[-1] - x[-1] @ pooled, 0.2 * np.sqrt(np.log(12) / 40))
        np.testing.assert_allclose(found[stage], following, rtol=0, atol=1e-7)


def outcome(setting, policy, devices, seed=0):
    state = example.initial_state(seed, setting, setting.sources)
    program = msrl.compile(
        example.make_iteration(setting),
        state,
        policy=msrl.policies.get(policy),
        axes=example.AXES,
        devices=jax.devices()[:devices],
    )
    after, metrics = program.run(state, setting.target_episodes // setting.episodes_per_iteration)
    return jax.device_get((after.target, after.estimate, metrics))


@pytest.fixture(scope="module")
def on_one_device():
    with jax.enable_x64(True):
        return outcome(SMALL, "GPUOnly", 1)


def test_no_key_is_used_twice():
    iteration = example.make_iteration(SMALL)
    uses = key_uses(lambda: jax.lax.scan(lambda state, _: iteration(state), example.initial_state(0, SMALL, 3), length=2))
    assert reused_keys(uses) == [] and sum(use.kind == "drawn from" for use in uses) > 50


@pytest.mark.parametrize("policy", [EIGHT[0], *(pytest.param(policy, marks=pytest.mark.slow) for policy in EIGHT[1:])])
def test_eight_devices_compute_the_bits_of_one(policy, on_one_device):
    assert np.any(on_one_device[1])
    jax.tree.map(np.testing.assert_array_equal, outcome(SMALL, policy, 8), on_one_device)


@pytest.mark.slow
@pytest.mark.parametrize("policy", EIGHT)
@pytest.mark.parametrize("seed", range(5))
def test_eight_devices_compute_the_bits_of_one_at_the_sizes_of_the_page(policy, seed):
    setting = dataclasses.replace(example.ONLINE, target_episodes=60)
    jax.tree.map(np.testing.assert_array_equal, outcome(setting, policy, 8, seed), outcome(setting, "GPUOnly", 1, seed))


def test_without_sources_the_estimate_is_the_lasso_of_the_target():
    state = example.initial_state(0, SMALL, 0)
    target = jax.tree.map(lambda x: x[:1], example.initial_state(1, SMALL, 1).sources)
    found = example.estimate_backward(state.sources, target, jnp.array([0.3, 0.0]))[1]
    expected = descend(design(target, 0, 1), np.asarray(target.rewards[0, :, 1]), 0.3 * np.sqrt(np.log(12) / 40))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7)


@pytest.mark.slow
def test_more_sources_bring_smaller_errors_than_the_target_alone_or_the_pooled_estimate():
    error = example.run(example.OFFLINE, range(5), example.SOURCES)["error"][..., -1]
    uncorrected = dataclasses.replace(example.OFFLINE, correction_weight=1e9)
    pooled = example.run(uncorrected, range(5), (16,))["error"][:, 0, -1]
    assert (np.diff(error.mean(0)) < 0).all(), "falls with the number of sources"
    assert (error[:, -1] < error[:, 0]).all() and error[:, -1].mean() < 0.7 * error[:, 0].mean(), "below the target alone"
    assert error[:, -1].mean() < 0.85 * pooled.mean(), "and below the estimate that is not corrected"


@pytest.mark.slow
def test_sources_lower_the_regret():
    regret = example.run(example.ONLINE, range(5), (0, 16))["regret"].sum(-1)
    assert (regret[:, 1] < regret[:, 0]).all() and regret[:, 1].mean() < 0.85 * regret[:, 0].mean()
