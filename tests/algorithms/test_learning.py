"""PPO, recurrent and not, reaches the expected returns within the expected number of steps."""

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import algorithms, envs
from msrl_jax.algorithms import counted

pytestmark = pytest.mark.slow


def returns(env, total_steps, seeds, name="ppo", **overrides):
    """Mean return of the episodes that ended in each tenth of training. `[seeds, 10]`"""
    one = algorithms.build(algorithms.get(name)(**overrides), envs.make(env) if isinstance(env, str) else env)
    length = total_steps // one.steps_per_iteration
    agent = counted(one, length)
    train = jax.jit(lambda state: jax.lax.scan(lambda s, _: agent.iteration(s), state, None, length=length)[1])
    curves = []
    for seed in range(seeds):
        episodes = train(jax.jit(agent.init)(jax.random.key(seed)))["episode_return"]
        curves.append([episodes[tenth].mean() for tenth in np.array_split(np.arange(length), 10)])
    return np.array(curves)


def test_defaults_solve_cartpole_on_nine_of_ten_seeds():
    assert (returns("CartPole-v1", 500_000, 10)[:, -1] >= 475).sum() >= 9


def test_the_default_curve_of_cartpole_rises_early_and_stays():
    run = msrl.train("ppo", "CartPole-v1", seed=10_000, seeds=5, total_steps=500_000, chunk=2, progress=False)
    for curve in np.asarray(run.history["episode_return"]).T:
        first = np.argmax(curve >= 475)
        assert curve[first] >= 475 and first < len(curve) / 3 and curve[first:].min() > 400


def test_pendulum_swings_up():
    options = {"normalize_observations": True, "normalize_rewards": True, "discount": 0.95, "entropy_coef": 0.0}
    curves = returns("Pendulum-v1", 300_000, 3, **options)
    assert (curves[:, -1] > -300).all()


def test_breakout_improves_from_images():
    options = {"num_envs": 64, "unroll_length": 32, "hidden_sizes": (128,), "activation": "relu"}
    curve = returns("Breakout-MinAtar", 300_000, 1, **options)[0]
    assert curve[0] < 2 and curve[-1] > 5


CHAIN = {"env": envs.make("MemoryChain-bsuite", memory_length=15), "total_steps": 400_000, "seeds": 3}


@pytest.mark.parametrize("core", ["gru", "lstm", "min_gru"])
def test_a_carry_makes_up_for_missing_observations(core):
    """The answer is shown once, and asked for 15 steps later; a constant rate finds it, too, but loses it at times."""
    curves = returns(**CHAIN, name="recurrent_ppo", core=core, anneal_learning_rate=True)
    assert (curves[:, -1] > 0.9).all()


def test_without_a_carry_the_answer_is_a_guess():
    assert (np.abs(returns(**CHAIN)[:, -1]) < 0.1).all()
