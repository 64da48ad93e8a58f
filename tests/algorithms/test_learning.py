"""Algorithms reach the expected returns within the expected number of steps; the reasons of thresholds stand beside them.

What recipes reach is in their records, with which `tests/report/test_reproduction.py` compares new runs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import algorithms, envs
from msrl_jax.algorithms import counted
from msrl_jax.run.experiment.members import members
from tests.support.bits import Bits
from tests.support.privileged import Occluded

pytestmark = pytest.mark.slow


def curves(name, env, steps, seeds, *, at_once=False, metric="episode_return", **options):
    """Mean over the episodes that ended in each tenth of training. `[10, seeds]`"""
    single = algorithms.build(algorithms.make(name, options), envs.make(env) if isinstance(env, str) else env)
    length = steps // single.steps_per_iteration
    agent = counted(single, length)
    train = lambda key: jax.lax.scan(lambda s, _: agent.iteration(s), agent.init(key), None, length=length)[1][metric]
    keys, tenths = [jax.random.key(seed) for seed in range(seeds)], np.array_split(np.arange(length), 10)
    if at_once:
        episodes = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), jax.jit(jax.vmap(train))(jnp.stack(keys)))
        return np.array([episodes[tenth].mean(axis=0) for tenth in tenths])
    train = jax.jit(train)
    return np.array([[episodes[tenth].mean() for tenth in tenths] for episodes in map(train, keys)]).T


def greedy_returns(name, env, total_steps, seeds=3, **options):
    """Mean return of greedy episodes after training. `[seeds]`"""
    options = {"eval_episodes": 64, "progress": False} | options
    return np.asarray(msrl.train(name, env, total_steps=total_steps, seeds=seeds, **options).evaluation.mean_return)


CHAIN = "MemoryChain-bsuite:memory_length=15"  # the answer is shown once, and asked for 15 steps later


@pytest.mark.parametrize("core", ["gru", "lstm", "min_gru"])
def test_a_carry_of_ppo_makes_up_for_missing_observations(core):
    """A constant rate finds the answer, too, but loses it at times."""
    assert (curves("recurrent_ppo", CHAIN, 400_000, 3, core=core, anneal_learning_rate=True)[-1] > 0.9).all()


@pytest.mark.parametrize("core", ["gru", "lstm", "min_gru"])
def test_a_carry_of_r2d2_makes_up_for_missing_observations(core):
    assert (greedy_returns("r2d2", CHAIN, 80_000, 5, eval_episodes=500, core=core) > 0.9).all()


def test_without_a_carry_the_answer_is_a_guess():
    assert (np.abs(curves("ppo", CHAIN, 400_000, 3)[-1]) < 0.1).all()
    assert (np.abs(greedy_returns("dqn", CHAIN, 80_000, 5, eval_episodes=500)) < 0.2).all()


def final_returns(name, total_steps, policy="GPUOnly", seeds=6, **parameters):
    """Mean return of the episodes of CartPole that ended in the last tenth of training. `[seeds]`"""
    one = algorithms.get(name)().build(envs.make("CartPole-v1"))
    length = total_steps // one.steps_per_iteration
    agent = counted(members(one), length)
    state = jax.jit(agent.init)(jnp.stack([jax.random.key(seed) for seed in range(seeds)]))
    program = msrl.compile(
        agent.iteration, state, policy=msrl.policies.get(policy, **parameters), axes=agent.axes, devices=jax.devices()[:2]
    )
    _, metrics = program.run(state, length)
    assert np.all(metrics["parameter_age"][-1] == parameters.get("staleness", 0))
    return metrics["episode_return"][-(length // 10) :].mean(axis=0)


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_impala_solves_cartpole_with_actors_that_lag_behind(staleness):
    """Of 24 other seeds, 21 end above 475 with a lag of 4 or 1: 6 or fewer of 12 have then a probability of 0.2%."""
    returns = final_returns("impala", 500_000, "SingleLearnerCoarse", seeds=12, staleness=staleness)
    assert (returns >= 475).sum() >= 7


@pytest.mark.parametrize("name", ["a2c", "a3c", "impala"])
def test_a_memory_makes_up_for_missing_observations(name):
    """The mean return of five seeds in the last tenth: the answer is shown once, and asked for five steps later."""

    def returns(**fields):
        run = msrl.train(
            name, "MemoryChain-bsuite:memory_length=5", seeds=5, total_steps=150_000, eval_episodes=0, progress=False, **fields
        )
        returns = run.history["episode_return"]
        return returns[-(len(returns) // 10) :].mean(axis=0)

    assert (returns(core="gru") > 0.9).all()  # chance is 0; A3C's lowest seed is at 0.94 on some processors
    assert (np.abs(returns()) < 0.15).all()


OPTIONS = {
    "defaults": {},
    "plain": {"target": "greedy"},
    "dueling": {"dueling": True},
    "n-step": {"replay.n_step": 3},
    "prioritised": {"replay.priorities": "prioritized"},
    "c51": {"returns": "c51"},
    "munchausen": {"target": "munchausen"},
    "qr": {"returns": "qr", "learning_rate": 5e-4, "tau": 0.005},
}


@pytest.mark.parametrize(("name", "solved"), [(name, 13 if name == "defaults" else 8) for name in OPTIONS])
def test_every_option_of_dqn_solves_cartpole_and_most_seeds_do_not_forget_it(name, solved):
    """How many of 16 seeds return 475 and more over the last tenth of training.

    A seed may lose late what it knew: one in sixteen with the defaults, and more than one in four with the most forgetful
    option, priorities. With these rates, fewer than 13 and 8 have a probability of 1.5 % each.
    """
    assert (curves("dqn", "CartPole-v1", 500_000, 16, at_once=True, **OPTIONS[name])[-1] >= 475).sum() >= solved


def test_with_truncated_quantiles_the_pendulum_swings_up_on_all_of_five_seeds():
    options = {"returns": "tqc:10", "num_updates": 8, "hidden_sizes": (64, 64)}
    assert (curves("sac", "Pendulum-v1", 50_000, 5, at_once=True, **options)[-1] > -200).all()


def test_with_batch_normalization_it_swings_up_within_20000_steps():
    """With the settings of the page on algorithms."""
    options = {"target": "cross_q", "tau": 0.01, "optimizer": "adam:b1=0.5", "hidden_sizes": (64, 64)}
    assert (curves("sac", "Pendulum-v1", 20_000, 5, **options)[-1] > -200).all()


UNSEEN = {
    "unroll_length": 8,
    "num_updates": 48,
    "hidden_sizes": (64,),
    "replay.learning_starts": 1024,
    "learning_rate": 2e-3,
    "tau": 0.02,
    "discount": 0.98,
}
# With it seeds 10000 to 10002 reached -160 to -310 in 40,000 steps, without it -1,140 to -1,240.
GRU = {"core": "gru", "batch_size": 32, "burn_in": 4, "trace_length": 8}


@pytest.mark.parametrize("name", ["sac", "td3"])
def test_a_core_makes_up_for_a_speed_that_nobody_sees(name):
    env = envs.Unprivileged(Occluded(envs.make("Pendulum-v1")))
    returns = functools.partial(greedy_returns, name, env, 50_000, devices=jax.devices()[:1], **UNSEEN)
    assert (returns(**GRU) > -400).all() and (returns(batch_size=256) < -600).all()


@pytest.mark.parametrize("relabel", [0.8, 0.0])
def test_sac_finds_a_small_goal_in_a_maze(relabel):
    """The share of the episodes that reach their goal."""
    options = {"hindsight": algorithms.Hindsight(relabel) if relabel else None, "hidden_sizes": (64, 64)}
    maze = "PointMaze:maze=u,tolerance=0.05,max_steps=50"
    found = curves("sac", maze, 15_000, 5, metric="episode_success", batch_size=128, tau=0.02, **options)[-1]
    assert (found > 0.9).all() if relabel else (found < 0.9).all()


@pytest.mark.parametrize("relabel", [0.8, 0.0])
def test_dqn_flips_bits_until_they_are_those_of_the_goal(relabel):
    """The experiment of section 3.1 of arXiv 1707.01495 with 12 bits."""
    options = {"hindsight": algorithms.Hindsight(relabel) if relabel else None, "hidden_sizes": (256,)}
    found = curves("dqn", Bits(12), 20_000, 5, metric="episode_success", learning_rate=1e-3, num_updates=8, **options)[-1]
    assert (found > 0.9).all() if relabel else (found < 0.1).all()


UPDATES = {"CartPole-v1": 20_000, "Pendulum-v1": 8_000}


@functools.cache
def medium(env, seed=0):
    """20,000 steps of a policy that is half trained, DQN's or SAC's; a part of its actions is random."""
    name, enough, epsilon, options = {
        "CartPole-v1": ("dqn", 80, 0.3, {"eval_every": 1_280, "num_updates": 8}),
        "Pendulum-v1": ("sac", -400, 0.5, {"eval_every": 320, "hidden_sizes": (64, 64)}),
    }[env]
    half_trained = lambda tick: bool(tick.metrics["eval_return"] > enough)
    result = msrl.train(name, env, total_steps=100_000, seed=seed, callbacks=[half_trained], progress=False, **options)
    assert result.status == "stopped"
    return msrl.data.record(result, 20_000, epsilon=epsilon, seed=seed)


@functools.cache
def learned(algorithm, env, seed=0):
    """Mean returns of greedy episodes of five seeds. `[5]`"""
    algorithm, options = ("iql", {"critic": "of_policy"}) if algorithm == "awac" else (algorithm, {})
    return greedy_returns(algorithm, env, UPDATES[env], 5, data=medium(env, seed), seed=seed, **options)


@pytest.mark.parametrize("env", UPDATES)
@pytest.mark.parametrize("algorithm", ["cql", "iql", "awac"])
def test_medium_data_are_improved_on(algorithm, env):
    """The returns become better than those of the half-trained policy that made the data, and than those of its clone."""
    behavior, cloned, returns = medium(env).episodes.returns.mean(), learned("bc", env), learned(algorithm, env)
    assert np.mean(returns) > max(behavior, np.mean(cloned))
    assert np.sum((returns > behavior) & (returns > cloned)) >= 4


def test_ppo_runs_with_gymnasiums_half_cheetah():
    options = {
        "num_envs": 16,
        "unroll_length": 128,
        "num_epochs": 10,
        "num_minibatches": 32,
        "learning_rate": 3e-4,
        "anneal_learning_rate": True,
        "normalize_observations": True,
        "normalize_rewards": True,
    }
    result = msrl.train(
        "ppo", "gymnasium:HalfCheetah-v5", policy="MultiLearner:num_devices=1", total_steps=1_000_000, progress=False, **options
    )
    assert result.evaluate(8).mean_return > 1500
