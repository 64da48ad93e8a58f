"""Suites on the host: names, and EnvPool's steps against EnvPool's own, one environment at a time."""

import gymnasium
import jax
import numpy as np
import pytest

from msrl_jax import envs
from msrl_jax.envs.suites.catalog import SUITES
from msrl_jax.envs.suites.common import load, quiet
from tests.support.slow import mostly_slow


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is out of date:DeprecationWarning", "ignore:.*deprecated:UserWarning")
def test_gymnasiums_names_can_be_made():
    names = set(SUITES["gymnasium"].own_names)
    assert len(names) > 30 and "gymnasium:HalfCheetah-v5" in envs.names()
    for name in names:
        gymnasium.make(name).close()
    without = {spec.id for spec in gymnasium.registry.values() if not isinstance(spec.entry_point, str)}
    assert "Ant-v2" in without and not without & names


def pool(task, seed, **params):
    with quiet():
        made = load("envpool").make_gymnasium(task, num_envs=1, seed=[seed], **params)
        return made, made.reset()[0], made.action_space.dtype


def sampled(env, steps, num_envs):
    space = env.action_space
    keys = jax.random.split(jax.random.key(0), (steps, num_envs))
    return np.asarray(jax.vmap(jax.vmap(space.sample))(keys))


TASKS = {
    "CartPole-v1": {},
    "HalfCheetah-v5": {"max_episode_steps": 7},
    "FrozenLake-v1": {},
    "Pong-v5": {"max_episode_steps": 9},
    "CheetahRun-v1": {"max_episode_steps": 6},
}


METRICS = {
    "CartPole-v1": "elapsed_step=last",
    "HalfCheetah-v5": {"reward_ctrl": "sum", "x_velocity": "mean"},
    "Pong-v5": {"reward": "sum", "lives": "last", "terminated": "max"},
}


@pytest.mark.parametrize("task", mostly_slow(TASKS, "CartPole-v1", "FrozenLake-v1"))
def test_steps_are_those_of_envpool(task):
    """EnvPool resets in the step after the end of an episode, and ignores that step's action."""
    env = envs.make(f"envpool:{task}", **TASKS[task], metrics=METRICS.get(task))
    seeds = np.array([5, 9], np.uint32)
    actions = sampled(env, 25, 2)
    sim = env.vectorize(2).simulators
    steps, first = sim.reset(seeds)
    played = []
    for action in actions:
        steps, outcome = sim(seeds, steps, action)
        played.append(outcome)
    obs, reward, terminated, truncated, final_obs, valid, *metrics = jax.tree.map(lambda *x: np.stack(x), *played)
    assert len(metrics) == (task in METRICS)
    assert valid.all() and (terminated | truncated).any()
    for e in range(2):
        theirs, begun, dtype = pool(task, int(seeds[e]), **TASKS[task])
        same(env._observed(begun), jax.tree.map(lambda x, e=e: x[e : e + 1], first))
        for t, action in enumerate(actions[:, e]):
            made, r, term, trunc, info = theirs.step(np.asarray([action], dtype))
            assert [np.float32(info[name][0]) for name in env.metrics] == (metrics[0][t, e].tolist() if metrics else [])
            made = env._observed(made)
            same(made, jax.tree.map(lambda x, t=t, e=e: x[t, e : e + 1], final_obs))
            assert (np.float32(r[0]), bool(term[0]), bool(trunc[0])) == (reward[t, e], terminated[t, e], truncated[t, e])
            if term[0] or trunc[0]:
                made = env._observed(theirs.step(np.asarray([action], dtype))[0])
            same(made, jax.tree.map(lambda x, t=t, e=e: x[t, e : e + 1], obs))


def same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_environments_of_envpool_conform():
    report = envs.check("envpool:Pong-v5", steps=20)
    assert report.ok, report


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("envpool:Pong", ValueError, r"EnvPool has no environment 'Pong' \(did you mean 'Pong-v5'\?\); it has 1,\d+ others"),
        ("envpool:Pong-v5:stack=3", ValueError, r"envpool:Pong-v5 has no parameter 'stack' \(did you mean 'stack_num'\?\)"),
        ("envpool:Pong-v5:num_threads=0", ValueError, "num_threads=0: use an integer of at least 1"),
        (
            "envpool:Pong-v5:metrics='live=last'",
            ValueError,
            r"Pong-v5 has no metric 'live' \(did you mean 'lives'\?\); its info has elapsed_step, lives, reward, terminated$",
        ),
        ("envpool:CartPole-v1:metrics=elapsed_step", ValueError, "cannot read metrics='elapsed_step' of envpool:CartPole-v1"),
        ("gymnasium:HalfCheeta-v5", ValueError, r"no environment 'HalfCheeta-v5' \(did you mean 'HalfCheetah-v5'\?\)"),
        ("gymnasium:CartPole-v1:length=3", ValueError, "CartPole-v1 cannot be made with .*unexpected keyword argument"),
    ],
    ids=["name", "option", "threads", "metric", "metrics", "gymnasium name", "gymnasium option"],
)
def test_what_a_suite_does_not_have_is_refused(name, error, message):
    with pytest.raises(error, match=message):
        envs.make(name)
