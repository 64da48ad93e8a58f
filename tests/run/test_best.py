"""The best checkpoint, the summary and figures count finished episodes, however seldom they end."""

import json

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.run import Result
from tests.support.runs import stop_after
from tests.support.training_envs import Lottery

ITERATIONS = 320


def train(out, iterations=ITERATIONS, **options):
    """At most one episode of a member ends in an iteration of two steps, so that the history lists all episodes."""
    return msrl.train(
        "ppo",
        Lottery(short=2, long=8),
        total_steps=2 * iterations,
        chunk=1,
        checkpoint_every=2 * 40,
        keep_checkpoints=99,
        eval_episodes=0,
        out=out,
        devices=jax.devices()[:1],
        progress=False,
        num_envs=1,
        unroll_length=2,
        num_epochs=1,
        num_minibatches=1,
        hidden_sizes=(4,),
        **options,
    )


def scores(path):
    seals = [json.loads(file.read_text()) for file in sorted((path / "checkpoints").glob("*/run.json"))]
    return {seal["iteration"]: seal["score"] for seal in seals}


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, 2])
def test_the_score_of_a_checkpoint_is_the_mean_of_the_last_100_episodes(seeds, tmp_path):
    train(tmp_path, callbacks=[stop_after(200)], seeds=seeds)
    result = train(tmp_path, resume=True)
    returns = result.history["episode_return"].reshape(ITERATIONS, seeds)
    assert (np.isnan(returns).any(axis=1)).mean() > 0.4
    found = scores(tmp_path)
    for iteration in range(40, ITERATIONS + 1, 40):
        before = [column[:iteration][~np.isnan(column[:iteration])] for column in returns.T]
        assert found[iteration] == np.mean([ended[-100:].mean() for ended in before])
    assert len(before[0]) > 105
    best = Result.load(tmp_path, env=Lottery(short=2, long=8), checkpoint="best")
    assert best.history["iteration"][-1] == max(found, key=found.get)


@pytest.mark.long
def test_where_no_episode_has_just_ended_the_last_ones_count(tmp_path):
    few = train(tmp_path / "few", 20, seeds=3)
    returns = few.history["episode_return"]
    assert np.isnan(returns[-2:]).any()
    last = [column[~np.isnan(column)][-1] for column in returns.T]
    ends = [column[-2:] for column in returns.T]
    tail = [x if np.isnan(end).all() else np.nanmean(end) for end, x in zip(ends, last, strict=True)]
    assert few.summary()["episode_return"] == np.mean(tail) and "nan" not in repr(few)
    steps, mean = msrl.plot(few).axes[0].lines[0].get_xydata().T
    assert steps[-1] >= 2 * 19 and mean[-1] == np.mean(last)


@pytest.mark.parametrize(
    "every", [pytest.param(7 * 64, marks=pytest.mark.long), *(pytest.param(x, marks=pytest.mark.slow) for x in ("10d", None))]
)
def test_the_best_evaluation_has_a_checkpoint_however_seldom_checkpoints_are_due(every, tmp_path):
    """Evaluations are due every third iteration, and checkpoints every seventh, or at the end only."""

    def train(**options):
        return msrl.train(
            "ppo",
            "CartPole-v1:max_steps_in_episode=60",
            total_steps=16 * 64,
            chunk=1,
            eval_episodes=4,
            eval_every=3 * 64,
            checkpoint_every=every,
            keep_checkpoints=1,
            out=tmp_path,
            devices=jax.devices()[:1],
            progress=False,
            num_envs=8,
            unroll_length=8,
            num_epochs=1,
            num_minibatches=2,
            hidden_sizes=(8,),
            learning_rate=0.02,
            **options,
        )

    train(callbacks=[stop_after(8)])
    history = train(resume=True).history
    returns = {int(i): x for i, x in zip(history["iteration"], history["eval_return"], strict=True) if not np.isnan(x)}
    assert len(set(returns.values())) > 2 and min(returns) == 3
    best = Result.load(tmp_path, checkpoint="best")
    assert returns[best.history["iteration"][-1]] == max(returns.values())
    assert best.evaluation.mean_return == max(returns.values())
