import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import algorithms
from msrl_jax.agents.agent import innermost
from msrl_jax.envs import Box, Discrete, TimeStep
from msrl_jax.envs.base import WithoutStatistics
from msrl_jax.fragments.counters import to_int
from msrl_jax.run.evaluation.evaluate import Behavior, Evaluation, make_evaluator
from msrl_jax.run.loop.hooks import evaluation_key
from tests.support.runs import plain
from tests.support.training_envs import Lottery


@pytest.fixture(scope="module")
def lottery(tiny):
    env = Lottery(short=1, long=40)
    agent = algorithms.get("ppo")(**tiny).build(env)
    return Behavior(agent, env), jax.jit(agent.init)(jax.random.key(0))


def test_every_environment_counts_one_whole_episode(lottery):
    actor, state = lottery
    evaluation = make_evaluator(actor, 64)(state, jax.random.key(1))
    # Counting whatever episodes end first would give almost only short ones: 40 of them end before a long one does.
    assert set(evaluation.lengths.tolist()) == {1, 40}
    share = np.mean(evaluation.lengths == 40)
    assert abs(share - 0.5) < 4 * np.sqrt(0.25 / 64), "long episodes are as likely as short ones"
    np.testing.assert_array_equal(evaluation.returns, evaluation.lengths)
    assert evaluation.finished.all()
    assert evaluation.mean_return == pytest.approx(evaluation.returns.mean())


def test_the_cap_cuts_long_episodes_and_says_so(lottery):
    actor, state = lottery
    evaluation = make_evaluator(actor, 64, max_steps=10)(state, jax.random.key(1))
    assert set(evaluation.lengths.tolist()) == {1, 10}
    np.testing.assert_array_equal(evaluation.finished, evaluation.lengths == 1)
    assert f"{int((evaluation.lengths == 10).sum())} cut off" in repr(evaluation)


def test_a_truncation_ends_an_episode(tiny):
    env = Lottery(short=3, long=7, truncates=True)
    agent = algorithms.get("ppo")(**tiny).build(env)
    evaluation = make_evaluator(Behavior(agent, env), 16, max_steps=30)(agent.init(jax.random.key(0)), jax.random.key(1))
    assert set(evaluation.lengths.tolist()) == {3, 7} and evaluation.finished.all()
    np.testing.assert_array_equal(evaluation.returns, evaluation.lengths)


class Answering(WithoutStatistics):
    """Copies of which the odd ones lose their first episode, and the even ones answer late; seven or two is paid then."""

    name, axes = "Answering", None
    observation_space, action_space = Box(-1, 1, (2,)), Discrete(2)
    metrics = {"total": "sum", "level": "mean"}  # noqa: RUF012

    def __init__(self, num_envs=1):
        self.num_envs = num_envs

    def vectorize(self, num_envs):
        return type(self)(num_envs)

    def reset(self, key):
        return jnp.int32(0), jnp.zeros((self.num_envs, 2))

    def step(self, state, action):
        rows = [  # reward, terminated, truncated, present and metric of even and odd copies
            ([1, 1], [0, 0], [0, 0], [1, 1], [1, 1]),
            ([1, 0], [0, 0], [0, 1], [1, 0], [1, np.nan]),
            ([0, 1], [0, 0], [0, 0], [0, 1], [np.nan, 2]),
            ([5, 1], [1, 1], [0, 0], [1, 1], [4, 3]),
        ]
        of_copies = lambda row: jnp.array(row)[jnp.arange(self.num_envs) % 2]
        reward, *flags, metric = (jax.vmap(of_copies)(jnp.array(x, float))[state % 4] for x in zip(*rows, strict=True))
        terminated, truncated, valid = (x.astype(bool) for x in flags)
        obs = jnp.zeros((self.num_envs, 2))
        return state + 1, TimeStep(obs, reward, terminated, truncated, obs, valid, jnp.stack([metric] * 2, 1))

    def pop_episodes(self, state):
        return state, {}


def test_steps_without_an_answer_and_lost_episodes_do_not_count(tiny):
    env = Answering()
    agent = algorithms.get("ppo")(**tiny).build(env)
    played = make_evaluator(Behavior(agent, env), 4)(jax.jit(agent.init)(jax.random.key(0)), jax.random.key(1))
    assert played.returns.tolist() == [7, 2, 7, 2] and played.lengths.tolist() == [3, 2, 3, 2] and played.finished.all()
    assert played.metrics["total"].tolist() == [6, 5, 6, 5] and played.metrics["level"].tolist() == [2, 2.5, 2, 2.5]


class Telling(Answering):
    """It pays what the action says."""

    def step(self, state, action):
        state, t = super().step(state, action)
        return state, t._replace(reward=action.astype(float))


def test_an_agent_remembers_nothing_of_a_lost_episode(tiny):
    """Its memory is the number of steps since it began, which is its action."""
    agent = algorithms.get("ppo")(**tiny).build(env := Telling())
    counting = dataclasses.replace(
        agent, initial_carry=lambda count: jnp.zeros(count, jnp.int32), act=lambda state, obs, key, carry: (carry, carry + 1)
    )
    played = make_evaluator(Behavior(counting, env), 4)(jax.jit(agent.init)(jax.random.key(0)), jax.random.key(1))
    assert played.returns.tolist() == [0 + 1 + 2 + 3, 0 + 1] * 2


def test_an_evaluation_reads_well():
    returns = np.float32([100, 150, 142.5, 180])
    one = Evaluation(returns, np.int32([100, 150, 143, 180]), np.ones(4, bool))
    assert str(one) == "Evaluation(4 episodes: return 143 ± 29, length 143.2)"
    two = Evaluation(np.stack([returns / 200, returns / 100]), np.int32([[3] * 4, [4] * 4]), np.ones((2, 4), bool))
    assert str(two) == "Evaluation(4 episodes: return [0.72, 1.43] ± [0.14, 0.29], length [3.0, 4.0])"


def test_evaluation_repeats_with_its_key(lottery):
    actor, state = lottery
    evaluate = make_evaluator(actor, 16)
    first, again, other = (evaluate(state, jax.random.key(k)) for k in (1, 1, 2))
    np.testing.assert_array_equal(first.lengths, again.lengths)
    assert (first.lengths != other.lengths).any()


@pytest.mark.parametrize("arguments", [{"episodes": 0}, {"episodes": 1, "max_steps": 0}, {"episodes": 1, "max_steps": 2**31}])
def test_an_evaluation_of_nothing_is_refused(lottery, arguments):
    with pytest.raises(ValueError, match=r"use an integer of at (least 1|most 2147483647)"):
        make_evaluator(lottery[0], **arguments)


def test_acting_uses_the_statistics_of_training(trained):
    # The wrapper's running mean and variance, applied by NumPy; then the agent's own network on the outcome.
    statistics, _ = trained.behavior.agent.env.statistics(trained.state.env_state)
    mean, variance = (np.asarray(x, np.float64) for x in (statistics.mean, statistics.var))
    assert np.abs(mean).max() > 1e-3, "the statistics have seen data"
    obs = np.random.default_rng(0).normal(0, 0.1, (16, 4)).astype(np.float32)
    normalized = np.clip((obs - mean) / np.sqrt(variance + 1e-8), -10, 10).astype(np.float32)
    expected = trained.behavior.agent.act(trained.state, jnp.asarray(normalized), None, ())[0]
    np.testing.assert_array_equal(trained.act(obs), expected)
    raw = trained.behavior.agent.act(trained.state, jnp.asarray(obs), None, ())[0]
    assert (np.asarray(raw) != np.asarray(expected)).any(), "normalizing matters here"


def test_only_what_acting_needs_is_copied(trained):
    needed = trained.behavior.take(trained.state)
    total = sum(x.size for x in jax.tree.leaves(trained.state))
    assert sum(x.size for x in needed) < total / 2
    restored = jax.eval_shape(trained.behavior.restore, needed)
    assert jax.tree.structure(restored) == jax.tree.structure(trained.state)


def test_a_state_spread_over_devices_evaluates_the_same_on_one_of_them(trained):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[4:]), ("x",))
    spread = jax.device_put(trained.state, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    assert {x.device for x in trained.behavior.take(spread)} == {jax.devices()[4]}
    evaluate = make_evaluator(trained.behavior, 4)
    np.testing.assert_array_equal(
        evaluate(spread, jax.random.key(0)).returns, evaluate(trained.state, jax.random.key(0)).returns
    )


def test_training_evaluates_greedily_from_the_key_of_its_seed(trained):
    again = make_evaluator(trained.behavior, 4)(trained.state, evaluation_key(trained.experiment))
    np.testing.assert_array_equal(trained.evaluation.returns, again.returns)


def test_episodes_of_evaluations_are_not_those_with_which_training_began(trained):
    """Neither their keys, which draw levels and noise, nor their first observations."""
    experiment = trained.experiment
    begun = innermost(experiment.initial_state())
    evaluated, obs = experiment.agent.env.reset(evaluation_key(experiment))
    of_copies = [
        {
            tuple(key)
            for x in jax.tree.leaves(state)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            for key in plain(x).tolist()
        }
        for state in (begun.env_state, evaluated)
    ]
    assert len(of_copies[0]) == len(of_copies[1]) == len(obs) and not of_copies[0] & of_copies[1]
    assert not (np.asarray(begun.obs) == obs).all(-1).any()


def test_evaluations_that_are_asked_for_have_keys_of_their_own(trained, monkeypatch):
    """With the seed of training, too: other keys than those of the run and its evaluations, or the same episodes come again."""
    keys = [trained.experiment.key, evaluation_key(trained.experiment), jax.random.key(trained.experiment.seed)]

    class Playing:
        env = None

        def __call__(self, state, key):
            keys.append(key)

    monkeypatch.setattr("msrl_jax.run.result.make_evaluator", lambda *args, **options: Playing())
    monkeypatch.setattr("msrl_jax.run.result.close_simulators", lambda env: None)
    trained.evaluate(4, seed=trained.experiment.seed)
    assert not any((plain(keys[-1]) == plain(key)).all() for key in keys[:-1])


@pytest.mark.long
def test_stale_actors_are_evaluated_with_the_newest_parameters(stale):
    assert to_int(stale.run_state.count) == 3 and len(stale.registers) > 0
    newest = make_evaluator(stale.behavior, 4)(stale.state, evaluation_key(stale.experiment))
    np.testing.assert_array_equal(stale.evaluation.returns, newest.returns)
