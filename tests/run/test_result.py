import csv
import dataclasses
import html
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.run import Result
from msrl_jax.run.evaluation.history import stack_rows
from msrl_jax.run.prepare import make_experiment
from tests.support.runs import assert_same_state


@pytest.fixture(scope="module")
def loaded(trained, run_folder):
    return Result.load(run_folder)


def test_the_folder_gives_back_the_whole_run(trained, loaded):
    assert_same_state(loaded.state, trained.state)
    assert loaded.config == trained.config
    assert loaded.history.keys() == trained.history.keys()
    for name, column in trained.history.items():
        np.testing.assert_array_equal(loaded.history[name], column, err_msg=name)
    np.testing.assert_array_equal(loaded.evaluation.returns, trained.evaluation.returns)
    assert loaded.summary() == trained.summary()


def test_a_loaded_agent_acts_as_the_trained_one(trained, loaded):
    obs = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    np.testing.assert_array_equal(loaded.act(obs), trained.act(obs))
    np.testing.assert_array_equal(loaded.act(obs, jax.random.key(1)), trained.act(obs, jax.random.key(1)))
    np.testing.assert_array_equal(loaded.evaluate(8, seed=2).returns, trained.evaluate(8, seed=2).returns)


def test_save_writes_what_training_with_a_folder_writes(trained, run_folder, tmp_path):
    saved = trained.save(tmp_path / "copy")
    assert {p.name for p in saved.iterdir()} == {p.name for p in run_folder.iterdir()}
    for name in ("config.json", "metrics.jsonl", "metrics.csv", "evaluation.json", "summary.json"):
        assert (saved / name).read_bytes() == (run_folder / name).read_bytes(), name
    assert [p.name for p in tmp_path.iterdir()] == ["copy"], "nothing is left beside it"
    assert_same_state(Result.load(saved).state, trained.state)


def test_saving_over_something_is_refused(trained, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not an empty folder"):
        trained.save(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_folder_is_readable_without_the_library(trained, run_folder):
    config = json.loads((run_folder / "config.json").read_text())
    assert config["algorithm"] == "ppo" and config["env"] == "CartPole-v1:max_steps_in_episode=30"
    assert config["policy"] == "GPUOnly" and config["seed"] == 3
    assert config["config"]["hidden_sizes"] == [8] and config["total_steps"] == 6 * 64 + 5
    assert config["versions"]["jax"] == jax.__version__ and "gymnax" in config["versions"]
    assert config["devices"]["platform"] == jax.devices()[0].platform and config["devices"]["count"] == 1
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    with (run_folder / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    for i, (row, cells) in enumerate(zip(rows, table, strict=True)):
        assert row.keys() == cells.keys() == trained.history.keys()
        for name, value in row.items():
            expected = trained.history[name][i]
            assert (value is None and cells[name] == "" and np.isnan(expected)) or value == expected == float(cells[name])


def test_a_run_in_progress_is_no_complete_run(run_folder, tmp_path):
    (tmp_path / "config.json").write_bytes((run_folder / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"has no checkpoint .newest.: none is complete"):
        Result.load(tmp_path)


@pytest.mark.long
def test_a_run_with_stale_actors_continues_from_its_folder(stale, tiny):
    loaded = Result.load(stale.folder)
    assert sum(stale.description["registers"].values()) == len(loaded.registers) > 0
    assert_same_state(loaded.registers, jax.device_get(stale.registers))

    setup = make_experiment("ppo", stale.description["env_spec"], total_steps=3 * 64, **tiny)
    program = setup.compile(msrl.policies.get(stale.description["policy"]), jax.devices()[:2])
    original, _ = program.run(msrl.Delayed(stale.run_state, stale.registers), 1)
    resumed, metrics = program.run(msrl.Delayed(loaded.run_state, loaded.registers), 1)
    assert_same_state(resumed, original)
    _, anew = program.run(loaded.run_state, 1)
    assert metrics["approx_kl"] != anew["approx_kl"], "the registers matter"


def test_a_column_that_is_not_there_is_no_nan(trained):
    with pytest.raises(KeyError, match=r"no column .episode_retrun. \(did you mean .episode_return.\?\); it has approx_kl"):
        trained.final("episode_retrun")


def test_an_empty_batch_is_refused(trained):
    with pytest.raises(ValueError, match="give a batch of at least one observation"):
        trained.act(np.zeros((0, 4)))


def test_one_observation_gives_one_action(trained):
    obs = np.zeros((3, 4), np.float32)
    assert trained.act(obs).shape == (3,)
    assert trained.act(obs[0]).shape == ()
    assert int(trained.act(obs[0])) == int(trained.act(obs)[0])
    assert int(trained.act([0.0, 0.0, 0.0, 0.0])) == int(trained.act(obs[0]))


def test_sampled_actions_follow_the_policy(trained):
    obs = np.zeros((2000, 4), np.float32)
    actions = np.asarray(trained.act(obs, jax.random.key(0)))
    assert set(actions.tolist()) == {0, 1}, "an untrained policy is close to uniform"


def test_probabilities_are_the_shares_of_sampled_actions(trained, members):
    obs = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    p = trained.probabilities(obs)
    assert p.shape == (3, 2) and p.dtype == np.float32
    np.testing.assert_allclose(p.sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(trained.probabilities(obs[1]), p[1], rtol=1e-6)
    actions = trained.act(np.repeat(obs, 4000, axis=0), jax.random.key(0)).reshape(3, 4000)
    np.testing.assert_allclose(actions.mean(1), p[:, 1], atol=0.04)  # five standard deviations
    each = [members.probabilities(obs, member=i) for i in range(3)]
    np.testing.assert_array_equal(members.probabilities(obs), each[members.best])
    assert not np.allclose(each[0], each[1], atol=1e-5)


@pytest.mark.parametrize(
    ("algo", "env", "why"),
    [
        ("dqn", "CartPole-v1", "is not categorical"),
        ("ppo", "Pendulum-v1", "is not categorical"),
        ("recurrent_ppo", "CartPole-v1", "recurrent agent depend on earlier observations"),
    ],
)
def test_agents_without_probabilities_say_so(algo, env, why):
    behavior = make_experiment(algo, env).behavior
    with pytest.raises(ValueError, match=why):
        behavior.probabilities(behavior.state_type, np.zeros((1, *behavior.observation_type.shape)))


def test_the_best_member_acts(members):
    scores = members.evaluation.mean_return
    assert scores.shape == (3,) and members.best == int(np.argmax(scores))
    obs = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    np.testing.assert_array_equal(members.act(obs), members.act(obs, member=members.best))
    alone = members.behavior.act_with_carry(members.member_state(1), jnp.asarray(obs), ())[0]
    np.testing.assert_array_equal(members.act(obs, member=1), alone)


def test_members_round_trip(members, tmp_path):
    loaded = Result.load(members.save(tmp_path / "run"))
    assert_same_state(loaded.state, members.state)
    np.testing.assert_array_equal(loaded.history["entropy"], members.history["entropy"])
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        last = list(csv.DictReader(file))[-1]
    assert float(last["entropy/2"]) == members.history["entropy"][-1, 2]
    assert float(last["entropy"]) == pytest.approx(members.history["entropy"][-1].mean())


def test_a_notebook_shows_the_curve_and_the_text(trained):
    shown = trained._repr_html_()
    assert shown.count("<svg") == 1 and f"<pre>{html.escape(repr(trained))}</pre>" in shown
    empty = dataclasses.replace(trained, history=stack_rows([], trained.description))
    assert "<svg" not in empty._repr_html_() and "<pre>Result: " in empty._repr_html_()
    assert "chunk trains" not in repr(empty) and empty.to_pandas().empty and msrl.plot(empty) is not None


def test_plots_draw_the_history(trained, members, tmp_path):
    figure = msrl.plot(trained, tmp_path / "curve.png", metrics=("episode_return", "entropy"))
    assert (tmp_path / "curve.png").stat().st_size > 1000
    returns, entropy = figure.axes
    np.testing.assert_array_equal(returns.lines[0].get_xydata()[:, 1], trained.history["episode_return"])
    np.testing.assert_array_equal(returns.lines[1].get_xydata()[:, 0], [128, 256, 384])
    np.testing.assert_array_equal(entropy.lines[0].get_xydata()[:, 1], trained.history["entropy"])
    np.testing.assert_allclose(
        msrl.plot(members).axes[0].lines[0].get_xydata()[:, 1], members.history["episode_return"].mean(axis=1)
    )
    with pytest.raises(ValueError, match="no column 'loss'"):
        msrl.plot(trained, metrics=("loss",))


def test_pandas_gets_a_row_for_every_chunk_and_member(trained, members):
    one, table = trained.to_pandas(), members.to_pandas()
    np.testing.assert_array_equal(one["episode_return"], trained.history["episode_return"])
    assert table.columns.tolist()[:2] == ["member", "seed"] and len(table) == members.history["episode_return"].size
    for member, seed in enumerate((3, 4, 5)):
        rows = table[table["seed"] == seed]
        assert (rows["member"] == member).all()
        np.testing.assert_array_equal(rows["step"], members.history["step"])
        np.testing.assert_array_equal(rows["episode_return"], members.history["episode_return"][:, member])


def test_the_summary_says_what_ran(trained, members):
    text = repr(trained)
    assert "ppo on CartPole-v1" in text and "GPUOnly" in text and "seed 3" in text and "384 steps" in text
    assert f"the median chunk trains {trained.steps_per_second:,.0f} steps/s" in text
    assert str(trained.folder) in text
    assert "seeds 3 to 5" in repr(members)
    assert f"{members.steps_per_second / 3:,.0f} steps/s per seed ({members.steps_per_second:,.0f} of all 3)" in repr(members)
    summary = members.summary()
    assert summary["episode_return"] == pytest.approx(np.mean(summary["episode_return_per_seed"]))
    assert len(summary["eval_return_per_seed"]) == 3
    assert "episode_length" in members.history and not any("length" in name for name in summary)
