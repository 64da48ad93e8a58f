"""Learning in hindsight: every algorithm with the option draws such batches, and runs go on exactly."""

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import envs
from msrl_jax.algorithms import Hindsight
from msrl_jax.loops.replay_buffers import n_step_buffer
from tests.support.bits import Bits
from tests.support.off_policy import SMALL, build, counting, drawn, start
from tests.support.runs import assert_same_run, stop_after
from tests.support.slow import mostly_slow

MAZE = "PointMaze:maze=open,max_steps=8,tolerance=0.1"
CHOICES = {"dqn": "final", "apex_dqn": "future", "sac": "geometric", "td3": "future", "ddpg": "future"}


@pytest.mark.long
@pytest.mark.parametrize("name", mostly_slow(CHOICES, "dqn"))
def test_batches_have_goals_that_were_achieved_and_their_rewards(name):
    env = Bits(8) if "dqn" in name else envs.make(MAZE)
    agent, config = build(name, env, num_updates=1, hindsight=Hindsight(1.0, by=CHOICES[name]))
    iterate = counting(agent)
    state = start(agent, 9, iterate)
    after, metrics = iterate(state, 9)
    assert all(np.isfinite(x) for x in jax.tree.leaves(metrics))
    batch, _ = drawn(env, config, state, after)
    np.testing.assert_array_equal(batch.obs["desired_goal"], batch.next_obs["desired_goal"])
    reward, reached = jax.vmap(env.goal_reward)(batch.next_obs["achieved_goal"], batch.next_obs["desired_goal"])
    np.testing.assert_array_equal(batch.discount == 0, reached)
    assert 0 < reached.sum() < len(reached)
    if config.replay.n_step == 1:
        np.testing.assert_array_equal(batch.reward, reward)
    achieved = after.replay.items[7]  # of next_obs: before it are three parts of obs, the action, the reward and two flags
    seen = {tuple(goal) for goal in np.asarray(achieved).reshape(-1, achieved.shape[-1]).tolist()}
    assert {tuple(goal) for goal in batch.obs["desired_goal"].tolist()} <= seen


@pytest.mark.parametrize("name", ["dqn", "sac", "td3"])
def test_without_it_nothing_is_stored_for_it(name):
    env = Bits() if name == "dqn" else envs.make(MAZE)
    plain, other = (n_step_buffer(env, msrl.algorithms.make(name, SMALL | {"hindsight": x})) for x in (None, "hindsight:0.5"))
    kinds = [(x.shape[3:], x.dtype) for x in plain.init().items]
    assert [*kinds, ((), np.int32)] == [(x.shape[3:], x.dtype) for x in other.init().items]
    state, key = jax.eval_shape(plain.init), jax.eval_shape(lambda: jax.random.key(0))
    text = [str(jax.make_jaxpr(lambda *x, b=b: b.sample(*x))(jax.eval_shape(b.init), key)) for b in (plain, other)]
    assert "random_fold_in" not in text[0] and "random_fold_in" in text[1] and len(state.items) == len(kinds)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_exactly(tmp_path):
    options = SMALL | {"hindsight": "hindsight:0.8,episode", "replay.capacity": 16 * 24}
    options |= {"progress": False, "chunk": 4, "total_steps": 24 * 64, "seed": 3, "eval_episodes": 2}
    expected = msrl.train("sac", MAZE, **options)
    part = msrl.train("sac", MAZE, **options, out=tmp_path / "run", callbacks=[stop_after(12)])
    assert part.status == "stopped"
    assert_same_run(msrl.train(resume=tmp_path / "run", progress=False), expected)
    assert "episode_success" in expected.history


@pytest.mark.parametrize(
    ("options", "env", "error", "message"),
    [
        ({"hindsight": "hindsight:1.5"}, MAZE, ValueError, r"SAC.hindsight.share=1.5: use .* at most 1"),
        ({"hindsight": "hindsight:0.5,last"}, MAZE, ValueError, r"SAC.hindsight.by='last': use one of"),
        (
            {"hindsight.by": "final"},
            MAZE,
            ValueError,
            r"SAC.hindsight.by='final': hindsight is None, which has no by; .* hindsight='hindsight' too",
        ),
        (
            {"hindsight": "hindsight:0.8", "core": "gru"},
            MAZE,
            ValueError,
            r"SAC.hindsight=hindsight replaces goals of single steps, but SAC.core",
        ),
        (
            {"hindsight": "hindsight:0.8"},
            "Pendulum-v1",
            TypeError,
            r"observations of Pendulum-v1 are Box.*a goal-conditioned environment",
        ),
        (
            {"hindsight": "hindsight:0.8"},
            envs.FlattenObservation(envs.make(MAZE)),
            TypeError,
            r"remove the wrapper that flattens the observations",
        ),
    ],
    ids=lambda x: "",
)
def test_what_does_not_fit_is_refused_before_anything_compiles(options, env, error, message):
    with pytest.raises(error, match=message):
        msrl.train("sac", env, progress=False, **options)
