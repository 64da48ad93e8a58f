"""A metric of the environment in place of the return: whom populations copy, and which checkpoint and member are the best."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import cli, envs
from msrl_jax.run import Result, RunFolderError
from msrl_jax.run.experiment.pbt import evolve
from msrl_jax.run.prepare import make_experiment
from tests.support.measured import Measured
from tests.support.runs import assert_same_run, stop_after

PBT = msrl.PBT({"learning_rate": envs.log_uniform(1e-4, 1e-1)}, members=4, every=1, fraction=0.5)


def train(tiny, env=None, **options):
    return msrl.train(
        "ppo",
        env or Measured(),
        **{"total_steps": 6 * 64, "chunk": 1, "devices": jax.devices()[:1], "progress": False, **tiny, **options},
    )


@pytest.mark.slow
def test_a_population_copies_whoever_is_better_by_the_metric(tiny, tmp_path):
    options = {"pbt": PBT, "rank_by": "highest", "eval_episodes": 8}
    result = train(tiny, **options)
    history = result.history
    score, parent = history["episode_highest"], history["pbt/parent"].astype(int)
    others = 0
    for i in range(5):
        order = np.argsort(score[i])
        assert len({*score[i]}) == 4 and {*parent[i + 1][order[:2]]} <= {*order[2:]}
        np.testing.assert_array_equal(parent[i + 1][order[2:]], order[2:])
        others += {*order[:2]} != {*np.argsort(history["episode_return"][i])[:2]}
    assert others, "the returns would have chosen others"
    best = int(np.argmax(result.evaluation.metrics["highest"].mean(-1)))
    assert result.best == best and f"best: member {best} with highest" in repr(result)
    train(tiny, **options, out=tmp_path / "run", callbacks=[stop_after(3)])
    assert_same_run(msrl.train(resume=tmp_path / "run", env=Measured(), devices=jax.devices()[:1], progress=False), result)


@pytest.mark.long
@pytest.mark.parametrize("seeds", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_best_checkpoint_has_the_best_evaluation_of_the_metric(seeds, tiny, tmp_path):
    options = {"seeds": seeds, "eval_episodes": 4, "eval_every": 64, "checkpoint_every": "10d", "keep_checkpoints": 1}
    train(tiny, **options, rank_by="offset", out=tmp_path, callbacks=[stop_after(3)])
    history = msrl.train(resume=tmp_path, env=Measured(), devices=jax.devices()[:1], progress=False).history
    found = history["eval_offset"].reshape(6, seeds).mean(1)
    best = Result.load(tmp_path, env=Measured(), checkpoint="best")
    assert best.history["iteration"][-1] == 1 + np.argmax(found) and len({*found}) > 2
    assert best.experiment.rank_by == "offset"
    if seeds > 1:
        assert best.best == np.argmax(best.history["eval_offset"][-1])
    with pytest.raises(RunFolderError, match="has rank_by='offset', and cannot resume with rank_by='return'; leave rank_by"):
        msrl.train(resume=tmp_path, env=Measured(), rank_by="return", total_steps=7 * 64, progress=False)


class Longer(Measured):
    """Episodes of two steps or more."""

    def reset(self, key):
        state, _ = super().reset(key)
        state = state._replace(length=jnp.maximum(state.length, 2))
        return state, self.observe(state)


@pytest.mark.slow
def test_without_evaluations_the_last_episodes_of_training_count(tiny, tmp_path):
    """At most one episode ends in an iteration of two steps, so that the history lists all episodes."""
    small = tiny | {"num_envs": 1, "unroll_length": 2, "num_minibatches": 1, "total_steps": 40, "eval_episodes": 0}
    saved = {"checkpoint_every": 10, "keep_checkpoints": 9}
    train(small, Longer(), rank_by="place", out=tmp_path, callbacks=[stop_after(8)], **saved)
    again = msrl.train(resume=tmp_path, env=Longer(), devices=jax.devices()[:1], progress=False, **saved)
    places = again.history["episode_place"]
    seals = [json.loads(file.read_text()) for file in sorted((tmp_path / "checkpoints").glob("*/run.json"))]
    assert len(seals) >= 4
    for seal in seals:
        np.testing.assert_allclose(seal["score"], np.nanmean(places[: seal["iteration"]]), rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"pbt": PBT}, {"pbt": PBT, "env": "CartPole-v1"}], ids=["run", "pbt", "no metrics"])
def test_unknown_metrics_are_refused_before_anything_compiles(options, monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_: pytest.fail("compiled"))
    plain = "env" in options
    near, name = ("", "CartPole-v1") if plain else (" (did you mean 'highest'?)", "Measured")
    message = f"{near}: use what {name} reports: return" + ", place, cro" * (not plain)
    with pytest.raises(ValueError, match=re.escape(f"rank_by='higest'{message}")):
        msrl.train("ppo", **{"env": Measured(), "total_steps": 4096, "rank_by": "higest", **options})
    if plain:
        assert cli.main(["train", "--rank-by", "success", "--total-steps", "4096"]) == cli.command_line.BAD_INPUT


def test_a_metric_ranks_what_returns_do_not(tiny):
    agent = make_experiment("ppo", Measured(), **tiny, pbt=PBT).behavior.agent
    opposing = dataclasses.replace(agent, ranked=False)
    with pytest.raises(ValueError, match=r"train without pbt, or with rank_by= a metric"):
        evolve(opposing, PBT)
    evolve(opposing, PBT, "place")
    with pytest.raises(ValueError, match="pbt: rank_by='place' is a metric of episodes, but offline training plays"):
        evolve(dataclasses.replace(agent, unit="updates"), PBT, "place")
