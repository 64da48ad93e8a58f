"""Tasks of tables draw with the probabilities that they say, as do distributions of them; bad tables are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import envs, meta

TRANSITIONS = np.array([[[0.5, 0.5, 0], [0, 0.25, 0.75]], [[1, 0, 0], [0, 1, 0]], [[0, 0, 1], [0.1, 0.2, 0.7]]])
REWARDS = np.array([[0.0, 1], [2, 3], [-1, 5]])


def test_an_mdp_is_an_environment():
    report = envs.check(meta.TabularMDP(TRANSITIONS, REWARDS))
    assert report.ok, report


def test_an_mdp_moves_and_pays_as_its_tables_say():
    env, num = meta.TabularMDP(TRANSITIONS, REWARDS, noise=0.5), 4000
    keys = jax.random.split(jax.random.key(0), num)
    step = jax.jit(jax.vmap(env.step, (0, None, None)))
    for state, action in ((0, 0), (0, 1), (1, 0), (2, 1)):
        after, obs, reward, terminated, truncated = step(keys, jnp.int32(state), jnp.int32(action))
        np.testing.assert_array_equal(after, obs)
        assert not terminated.any() and not truncated.any()
        shares = np.bincount(after, minlength=3) / num
        np.testing.assert_allclose(shares, TRANSITIONS[state, action], atol=4 * 0.5 / np.sqrt(num))
        assert (shares[TRANSITIONS[state, action] == 0] == 0).all()
        assert abs(reward.mean() - REWARDS[state, action]) < 4 * 0.5 / np.sqrt(num) and abs(reward.std() - 0.5) < 0.05


def test_a_state_of_probability_0_never_follows(monkeypatch):
    """Also at the ends of the range of uniform numbers; thirds and the like do not sum to 1 in float32."""
    parts = np.random.default_rng(0).dirichlet(np.ones(7), 50)
    env = meta.TabularMDP(np.pad(parts, ((0, 0), (1, 42)))[:, None], np.zeros((50, 1)))
    for number in (0.0, np.nextafter(np.float32(1), np.float32(0))):
        monkeypatch.setattr(jax.random, "uniform", lambda key, *_, number=number, **__: jnp.float32(number))
        after = jax.vmap(lambda state: env.step(jax.random.key(0), state, 0)[0])(jnp.arange(50))
        assert ((after >= 1) & (after <= 7)).all()


def test_an_arm_pays_as_often_as_it_says():
    env, keys = meta.BernoulliBandit([0.2, 0.9]), jax.random.split(jax.random.key(0), 4000)
    for arm, success in enumerate((0.2, 0.9)):
        reward = jax.vmap(lambda key, arm=arm: env.step(key, jnp.int32(0), jnp.int32(arm))[2])(keys)
        assert set(np.unique(reward)) == {0, 1} and abs(reward.mean() - success) < 0.03


@pytest.mark.parametrize("uniform_rewards", [False, True])
def test_random_mdps_are_distributed_as_they_say(uniform_rewards):
    draw = meta.random_mdps(4, 2, concentration=0.5, uniform_rewards=uniform_rewards)
    found = jax.vmap(draw)(jax.random.split(jax.random.key(0), 3000))
    np.testing.assert_allclose(found["transitions"].sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(found["transitions"].mean((0, 1, 2)), 0.25, atol=0.01)
    np.testing.assert_allclose(found["transitions"].var(), 0.25 * 0.75 / 3, rtol=0.05)  # Dirichlet of four 0.5
    rewards = found["rewards"]
    assert abs(rewards.mean() - 1) < 0.03 and abs(rewards.std() - 1) < 0.03
    assert (jnp.abs(rewards - 1).max() < np.sqrt(3) + 1e-6) == uniform_rewards
    assert found["transitions"].shape == (3000, 4, 2, 4) and rewards.dtype == jnp.float32


def test_random_bandits_are_uniform():
    found = jax.vmap(meta.random_bandits(3))(jax.random.split(jax.random.key(0), 3000))["success"]
    np.testing.assert_allclose(np.quantile(found, [0.1, 0.5, 0.9], axis=0), [[0.1] * 3, [0.5] * 3, [0.9] * 3], atol=0.03)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: meta.TabularMDP(TRANSITIONS, REWARDS[:2]), r"transitions \[3, 2, 3\] and rewards \[2, 2\] do not match"),
        (lambda: meta.TabularMDP(2 * TRANSITIONS, REWARDS), "each row must sum to 1"),
        (lambda: meta.TabularMDP(TRANSITIONS, REWARDS * np.nan), "use finite rewards"),
        (lambda: meta.TabularMDP(TRANSITIONS, REWARDS, noise=-1), "noise of at least 0, not -1"),
        (lambda: meta.BernoulliBandit([0.5, 1.5]), "must be probabilities"),
        (lambda: meta.random_mdps(2, 2, concentration=0), "concentration=0 must be finite and above 0"),
        (lambda: meta.random_bandits(0), "num_arms"),
    ],
)
def test_what_is_no_task_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
