"""Random network distillation, against NumPy and plain loops."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import algorithms, envs
from msrl_jax.agents.optimizers import make_optimizer
from msrl_jax.algorithms import Progress
from msrl_jax.fragments.counters import counter
from msrl_jax.loops.trajectory import Trajectory, advantages_and_targets
from msrl_jax.rnd import A2CRND, IMPALARND
from msrl_jax.rnd.distillation import random_network_distillation
from tests.support.random_walk import RandomWalk

T, E = 6, 16


def plain_mlp(params, x, xp):
    """Dense layers with tanh between them; the last one is linear."""
    parts = params["params"]
    layers = [parts["layers_0"][f"Dense_{i}"] for i in range(len(parts["layers_0"]))]
    for layer in layers:
        x = xp.tanh(x @ layer["kernel"] + layer["bias"])
    return x @ parts["layers_1"]["kernel"] + parts["layers_1"]["bias"]


@jax.jit
@jax.grad
def plain_slope(params, target, x, goal, counts):
    distance = ((plain_mlp(params["predictor"], x, jnp) - plain_mlp(target, x, jnp)) ** 2).mean(-1)
    error = (plain_mlp(params["value"], x, jnp)[..., 0] - goal) ** 2 / 2
    return ((distance + error) * counts).sum() / counts.sum()


def rnd(num_envs, unroll_length, **options):
    config = A2CRND(num_envs=num_envs, unroll_length=unroll_length, **options)
    venv = envs.vectorize(RandomWalk(), num_envs)
    return random_network_distillation(config, venv, make_optimizer(config, epsilon=1e-5))


def unroll(seed):
    """Observations `[T + 1, E, 3]` of three scales, one of them far out, ends of episodes, and steps that count."""
    rng = np.random.default_rng(seed)
    obs = np.float32(rng.normal(size=(T + 1, E, 3)) * [0.01, 1, 100] + [0, 5, 0])
    obs[2, 3, 1] = 1_000
    return obs, rng.random((2, T, E)) < 0.2, rng.random((T, E)) < 0.8


@pytest.mark.parametrize("absent", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.long
def test_bonus_and_update_equal_an_independent_implementation(absent):
    init, explore = rnd(E, T, hidden_sizes=(8, 6), intrinsic_coef=0.7, optimizer="sgd", learning_rate=0.05, max_grad_norm=1e6)
    state, explore = init(jax.random.key(0)), jax.jit(explore)
    first, total, sums = None, np.zeros(E), []
    for i in range(2):
        obs, ends, valid = unroll(i)
        valid = valid if absent else np.ones((T, E), bool)
        nothing = jnp.zeros((T, E))
        t = Trajectory(obs[:-1], nothing, nothing, nothing, *ends, valid if absent else None)
        before = state
        state, t, metrics = explore(state, t, obs[-1], Progress(counter(i)))
        seen = obs[:-1].reshape(-1, 3).astype(np.float64)
        first = seen if first is None else np.concatenate([first, seen])
        x = np.clip((obs - first.mean(0)) / np.sqrt(first.var(0) + 1e-8), -5, 5)
        reward = ((plain_mlp(before.params["predictor"], x, np) - plain_mlp(before.target, x, np)) ** 2).mean(-1)[1:] * valid
        for r in reward:  # sums go on over iterations and ends of episodes
            total = 0.99 * total + r
            sums.append(total)
        reward /= np.sqrt(np.var(sums) + 1e-8)
        value, advantage = plain_mlp(before.params["value"], x, np)[..., 0], np.zeros((T + 1, E))
        for k in reversed(range(T)):
            delta = reward[k] + 0.99 * value[k + 1] - value[k]
            advantage[k] = np.where(valid[k], delta + 0.99 * 0.95 * advantage[k + 1], 0)
        np.testing.assert_allclose(t.bonus, 0.7 * advantage[:-1], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(metrics["intrinsic_reward"], reward.sum() / valid.sum(), rtol=1e-4)
        gradient = plain_slope(before.params, before.target, x[:-1], value[:-1] + advantage[:-1], valid)
        after = jax.tree.map(lambda p, g: p - 0.05 * g, before.params, gradient)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), state.params, after)
        jax.tree.map(np.testing.assert_array_equal, state.target, before.target)


def test_a_bonus_is_added_to_advantages_and_not_to_what_the_critic_learns():
    obs, (terminated, truncated), _ = unroll(0)
    reward, value, after, bonus = np.float32(np.random.default_rng(1).normal(size=(4, T, E)))
    config = SimpleNamespace(normalize_advantage="none", discount=0.9, gae_lambda=0.8)
    t = Trajectory(obs[:-1], *[jnp.zeros((T, E))] * 2, reward, terminated, truncated)
    plain, value_too, target, _ = advantages_and_targets(config, t, value, after)
    got, _, same_target, _ = advantages_and_targets(config, t._replace(bonus=bonus), value, after)
    np.testing.assert_allclose(got, plain + bonus, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(same_target, target)
    np.testing.assert_allclose(target, value_too + plain, rtol=1e-6)


@pytest.mark.long
def test_with_more_environments_the_predictor_learns_from_as_much_as_with_32():
    """Of 128 environments a quarter: the losses of many draws are scattered like means over a quarter of the examples."""
    num_envs, draws = 128, 4_000
    init, explore = rnd(num_envs, 2, hidden_sizes=(4,), intrinsic_coef=1.0)
    state, nothing = init(jax.random.key(0)), jnp.zeros((2, num_envs))
    obs = np.float32(np.random.default_rng(0).normal(size=(3, num_envs, 3)))
    t = Trajectory(obs[:-1], *[nothing] * 3, *[nothing > 0] * 2)
    loss = lambda key: explore(state._replace(key=key), t, obs[-1], Progress(counter()))[2]["rnd_loss"]
    drawn = jax.jit(jax.vmap(loss))(jax.random.split(jax.random.key(1), draws))
    x = np.clip((obs[:-1] - obs[:-1].mean((0, 1))) / obs[:-1].std((0, 1)), -5, 5)
    each = ((plain_mlp(state.params["predictor"], x, np) - plain_mlp(state.target, x, np)) ** 2).mean(-1)
    np.testing.assert_allclose(drawn.mean(), each.mean(), rtol=0.01)
    np.testing.assert_allclose(drawn.var(), each.var() * (1 / (each.size / 4) - 1 / each.size), rtol=0.15)


def test_it_has_the_checks_of_the_algorithm():
    with pytest.raises(ValueError, match="A2CRND has no field 'num_epochs'"):
        algorithms.make("a2c_rnd", {"num_epochs": 2})
    with pytest.raises(ValueError, match=r"PPORND\.unroll_length=9 cannot be split into num_minibatches=2 groups"):
        algorithms.make("ppo_rnd", {"unroll_length": 9, "num_minibatches": 2})


def test_impala_rnd_refuses_replay():
    with pytest.raises(ValueError, match=r"IMPALARND\.replay_batches=4: intrinsic rewards are outdated .*; use replay"):
        IMPALARND(replay_batches=4)


@pytest.mark.slow
def test_ppo_explores_a_deep_sea_with_it_and_not_without():
    """One sequence of 20 actions in 2**20 is rewarded, by 0.99; the others cost up to 0.01."""
    env, options = msrl.envs.make("DeepSea-bsuite", size=20), {"learning_rate": 1e-3, "seeds": 3, "progress": False}
    train = lambda name: msrl.train(name, env, total_steps=100_000, eval_episodes=32, **options)
    assert (train("ppo_rnd").evaluation.mean_return > 0.9).all()
    assert (train("ppo").evaluation.mean_return < 0.01).all()
