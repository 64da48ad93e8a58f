"""A run that was interrupted goes on as if nothing had happened: equal bits in state, metrics and recorded steps."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.cli import main
from msrl_jax.run import Result
from msrl_jax.run.disk.checkpoint import complete_checkpoints
from msrl_jax.run.disk.store import ResumeWarning
from msrl_jax.run.experiment.plain_data import RunFolderError
from msrl_jax.run.prepare import check_resumes, make_experiment
from tests.support import processes, runs
from tests.support.runs import ENV, ITERATIONS, assert_same_run, assert_same_state, cli, stop_after, train
from tests.support.training_envs import Lottery


@pytest.fixture(scope="session")
def pendulum_data(tmp_path_factory):
    """A data set of 200 random steps."""
    rng = np.random.default_rng(0)
    angle = rng.uniform(-3, 3, 201)
    obs = np.stack([np.cos(angle), np.sin(angle), rng.normal(size=201)], -1).astype(np.float32)
    ends = np.arange(200) % 50 == 49
    action = rng.uniform(-2, 2, (200, 1)).astype(np.float32)
    dataset = msrl.data.Dataset(obs[:-1], action, rng.normal(size=200), np.zeros(200, bool), ends, obs[1:])
    return msrl.data.save(dataset, tmp_path_factory.mktemp("data") / "pendulum.npz")


@pytest.fixture(scope="session")
def whole(pendulum_data, tmp_path_factory):
    """Uninterrupted runs, by name and policy; each is made once."""
    made = {}

    def run(name, policy, devices=4):
        if (name, policy, devices) not in made:
            record = tmp_path_factory.mktemp("whole") / "steps.npz"
            made[name, policy, devices] = train(name, None, policy, devices=devices, data=pendulum_data, record=record), record
        return made[name, policy, devices]

    return run


def assert_same_rows(file, expected):
    mine, theirs = msrl.data.load(file), msrl.data.load(expected)
    for name in (*msrl.data.dataset.FIELDS, "cut"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name), err_msg=name)


STALE = "SingleLearnerCoarse:actors=2,learners=2,staleness=2"
LONG = {("ppo", "GPUOnly"), ("impala", STALE)}
SYNCHRONOUS = ("GPUOnly", "SingleLearnerFine", "Central")
STALENESS = (STALE, "SingleLearnerCoarse:staleness=2", "SingleLearnerCoarse:actors=1,learners=1,staleness=2")
ALL = [(name, policy) for name in runs.RUNS for policy in (STALENESS if name == "impala" else SYNCHRONOUS)]
MARKED = [pytest.param(*kind, marks=pytest.mark.long if kind in LONG else pytest.mark.slow) for kind in ALL]


@pytest.mark.parametrize(("name", "policy"), MARKED)
def test_a_run_that_was_stopped_goes_on_exactly(name, policy, whole, pendulum_data, tmp_path):
    expected, rows = whole(name, policy)
    options = {"devices": 4, "data": pendulum_data, "record": tmp_path / "steps.npz"}
    part = train(name, tmp_path / "run", policy, callbacks=[stop_after(10)], **options)
    assert part.status == "stopped" and part.history["iteration"][-1] == 12
    goes_on = msrl.train(resume=tmp_path / "run", devices=jax.devices()[:4], progress=False)
    assert goes_on.status == "finished"
    assert_same_run(goes_on, expected)
    assert_same_rows(tmp_path / "steps.npz", rows)
    loaded = Result.load(tmp_path / "run")
    assert_same_run(loaded, expected)
    assert len(complete_checkpoints(tmp_path / "run")) in (2, 3), "the newest two, and the best"


def start(name, policy, folder, data, record):
    """A process that prints a line after every chunk."""
    command = [sys.executable, "-m", "tests.support.runs", *map(str, [name, policy, folder, data, record])]
    return processes.start(command, stdout=subprocess.PIPE, text=True)


def kill_at_random(name, policy, folder, data, record, kills, rng):
    """Starts the run again and again, and kills it at random moments; then lets it finish. Returns the number of kills."""
    done = 0
    while True:
        with start(name, policy, folder, data, record) as process:
            if done < kills:
                process.stdout.readline()  # the first tick
                time.sleep(rng.uniform(0, 1.0))
                process.send_signal(signal.SIGKILL)
            rest = process.communicate(timeout=300)[0]
        if '"done"' in rest:
            return done
        assert process.returncode == -signal.SIGKILL
        done += 1


@pytest.mark.long
def test_a_killed_run_goes_on_exactly(whole, tmp_path):
    expected, rows = whole("ppo", "GPUOnly")
    with start("ppo", "GPUOnly", tmp_path / "run", "", tmp_path / "steps.npz") as process:
        next(line for line in process.stdout if complete_checkpoints(tmp_path / "run"))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=300)
    train("ppo", tmp_path / "run", devices=4, resume=True, record=tmp_path / "steps.npz")
    assert_same_run(Result.load(tmp_path / "run"), expected)
    assert_same_rows(tmp_path / "steps.npz", rows)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), ALL)
def test_a_run_killed_many_times_goes_on_exactly(name, policy, whole, pendulum_data, tmp_path):
    expected, rows = whole(name, policy)
    rng = np.random.default_rng(len(name) + 100 * len(policy))
    data = pendulum_data if name == "sac" else ""
    kills = kill_at_random(name, policy, tmp_path / "run", data, tmp_path / "steps.npz", 7, rng)
    assert kills >= 3
    assert_same_run(Result.load(tmp_path / "run"), expected)
    assert_same_rows(tmp_path / "steps.npz", rows)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_moves_between_devices_and_policies(seeds, tmp_path):
    """Each part has the state that the part before left, bit for bit, and the end is that of a run on one device."""
    path = tmp_path / "run"
    steps = ITERATIONS // 4 * 64
    places = [("GPUOnly", 1), ("SingleLearnerCoarse", 4), ("Central", 8), ("GPUOnly", 1)]
    options = {"anneal_learning_rate": False, "eval_every": None, "eval_episodes": 0}
    for part, (policy, devices) in enumerate(places, 1):
        before = Result.load(path) if part > 1 else None
        result = train("ppo", path, policy, devices=devices, total_steps=part * steps, resume=part > 1, seeds=seeds, **options)
        assert result.description["devices"]["count"] == devices or policy != "GPUOnly"
        if before is not None:
            assert result.description["resumed"][-1]["iteration"] == before.history["iteration"][-1]
    alone = train("ppo", None, devices=1, seeds=seeds, **options)
    assert alone.history["iteration"][-1] == result.history["iteration"][-1] == ITERATIONS
    for (where, x), y in zip(jax.tree.leaves_with_path(result.state), jax.tree.leaves(alone.state), strict=True):
        x, y = runs.plain(x), runs.plain(y)
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5, err_msg=jax.tree_util.keystr(where))


@pytest.mark.slow
def test_an_extended_run_records_its_further_steps_to_another_file(tmp_path):
    path, options = tmp_path / "run", {"devices": 4, "anneal_learning_rate": False}
    train("ppo", path, record=tmp_path / "first.npz", iterations=12, **options)
    with pytest.raises(ValueError, match=r"first\.npz\.parts has 0 of the 4 parts .* record further steps to another file"):
        msrl.train(resume=path, total_steps=24 * 64, progress=False)
    with pytest.raises(ValueError, match=r"first\.npz already exists"):
        (tmp_path / "again").mkdir()
        shutil.copy(tmp_path / "first.npz", tmp_path / "again")
        msrl.train(resume=path, total_steps=24 * 64, progress=False, record=tmp_path / "again" / "first.npz")
    msrl.train(resume=path, total_steps=24 * 64, progress=False, record=tmp_path / "second.npz", devices=jax.devices()[:4])
    train("ppo", None, record=tmp_path / "both.npz", iterations=24, **options)
    first, second, both = (msrl.data.load(tmp_path / f"{name}.npz") for name in ("first", "second", "both"))
    for name in ("obs", "action", "reward", "next_obs"):
        parts = [getattr(x, name).reshape(8, -1, *getattr(x, name).shape[1:]) for x in (first, second)]
        np.testing.assert_array_equal(np.concatenate(parts, 1).reshape(getattr(both, name).shape), getattr(both, name))


@pytest.mark.long
def test_a_finished_run_is_only_read(copy, capfd):
    done = msrl.train(resume=copy, devices=jax.devices()[:1], progress=False)
    (copy / "summary.json").unlink()  # killed before its last line
    files = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    again = msrl.train(resume=copy, devices=jax.devices()[:1], progress=False)
    assert_same_run(again, done)
    assert again.status == "finished" and json.loads((copy / "summary.json").read_text())["status"] == "finished"
    for path, content in files.items():
        assert path.read_bytes() == content, path


@pytest.mark.long
def test_extending_a_run_says_what_becomes_of_the_learning_rate(copy):
    with pytest.warns(
        ResumeWarning, match=r"total_steps changes from 768 to 1,536, .*learning rate.*continues from 0\.00225, after 0\.0015"
    ):
        result = msrl.train(resume=copy, total_steps=1536, devices=jax.devices()[:1], eval_episodes=0, progress=False)
    assert result.history["iteration"][-1] == 24 and result.experiment.total_steps == 1536
    assert result.history["learning_rate"][2] == pytest.approx(3e-3 * (1 - 7 / 24), rel=1e-5)
    assert Result.load(copy).experiment.total_steps == 1536


@pytest.mark.long
def test_an_environment_object_must_be_given_again(tmp_path, tiny, one_device):
    env, path = Lottery(short=2, long=3), tmp_path / "run"
    options = {"devices": one_device, "progress": False, "eval_episodes": 0}
    run = msrl.train("ppo", env, total_steps=128, out=path, chunk=1, callbacks=[stop_after(1)], **tiny, **options)
    with pytest.raises(ValueError, match=r"environment object \(Lottery\).*env="):
        Result.load(path)
    loaded = Result.load(path, env=env)
    assert_same_state(loaded.state, run.state)
    assert loaded.evaluation is None
    with pytest.raises(
        RunFolderError, match=r"has the environment Lottery\(short=2, long=3.*cannot resume with Lottery\(short=2, long=4"
    ):
        msrl.train(resume=path, env=Lottery(short=2, long=4), **options)
    assert msrl.train(resume=path, env=Lottery(short=2, long=3), **options).status == "finished"


@pytest.mark.slow
def test_a_data_set_is_found_again_or_asked_for(pendulum_data, tmp_path):
    data, path = Path(shutil.copy(pendulum_data, tmp_path / "data.npz")), tmp_path / "run"
    options = {"devices": jax.devices()[:1], "progress": False}
    msrl.train(
        "bc",
        "Pendulum-v1",
        data=data,
        out=path,
        total_steps=8,
        chunk=1,
        eval_episodes=0,
        callbacks=[stop_after(1)],
        num_updates=2,
        batch_size=16,
        hidden_sizes=(8,),
        **options,
    )
    moved = data.rename(tmp_path / "moved.npz")
    with pytest.raises(RunFolderError, match=r"the run in .*run cannot be read: the file .*data\.npz does not exist"):
        msrl.train(resume=path, progress=False)
    other = msrl.data.load(moved).select(slice(0, 100))
    with pytest.raises(RunFolderError, match=r"the given data set is not the data set of the run .* its content differs"):
        msrl.train(resume=path, progress=False, data=other)
    result = msrl.train(resume=path, data=moved, **options)
    assert result.status == "finished" and Result.load(path).description["data"]["path"] == str(moved)


FLAGS = ["--num-envs", "8", "--unroll-length", "8", "--num-epochs", "1", "--num-minibatches", "2", "--hidden-sizes", "8"]


def test_a_run_does_not_go_on_with_a_field_that_it_did_not_have(tmp_path):
    """As after an edit of the algorithm's file; its checkpoints would not fit the folder's settings."""
    about = make_experiment("ppo", ENV).to_json()
    about["config"].pop("clip_value")
    saved = SimpleNamespace(path=tmp_path, description=about, iteration=0)
    with pytest.raises(RunFolderError, match=r"has no clip_value, which is a field of ppo now; resume with the code that"):
        check_resumes(make_experiment("ppo", ENV), saved)


@pytest.mark.long
def test_signals_and_the_time_limit_save_the_run(tmp_path, capsys):
    path = tmp_path / "run"
    common = ["train", "--out", str(path), "--resume", "--progress", "lines", "--eval-episodes", "2"]
    common += ["--policy", "GPUOnly:num_devices=1"]
    process = cli(*common, *FLAGS, "--total-steps", "1e12")
    first = next(line for line in process.stderr if "/1,000,000,000,000" in line)
    assert "(0%)" in first
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM and "(interrupted: SIGTERM)" in out and "Traceback" not in err
    before = Result.load(path)
    assert before.stop_reason == "SIGTERM" and before.interrupted and before.history["iteration"][-1] > 0

    assert main([*common, "--time-limit", "0.001s", "--total-steps", "2e12", "--json"]) == 75
    out, _ = capsys.readouterr()
    summary = json.loads(out.splitlines()[-1])
    assert summary["stop_reason"] == "time limit" and summary["folder"] == str(path)
    after = Result.load(path)
    assert after.history["iteration"][-1] == before.history["iteration"][-1], "the limit is over before the first chunk"
    np.testing.assert_array_equal(after.history["entropy"][: len(before.history["step"])], before.history["entropy"])
