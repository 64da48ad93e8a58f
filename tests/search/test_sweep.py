import json
import math
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import algorithms, cli, envs
from msrl_jax.agents.agent import innermost
from msrl_jax.algorithms import PPO
from msrl_jax.cli.command import parse
from msrl_jax.cli.commands import COMMANDS
from msrl_jax.run import Experiment, RunFolderError, capacity
from msrl_jax.run.prepare import make_experiment
from msrl_jax.search import trial_scheduler
from msrl_jax.search.space import Trial, choose_trials
from tests.support import processes

from .test_space import axes_of

ROOT = Path(__file__).parents[2]
ENV = "CartPole-v1:max_steps_in_episode=30"
COMMON = {"total_steps": 3 * 128, "eval_episodes": 4, "progress": False}


def returns(result):
    return np.array([trial.returns for trial in result.trials])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sweeps") / "sweep"


@pytest.fixture(scope="module")
def swept(folder, tiny, one_device):
    """Two learning rates by two numbers of environments with two seeds each."""
    return msrl.sweep(
        "ppo",
        ENV,
        method="grid",
        learning_rate=[1e-3, 3e-2],
        num_envs=[8, 16],
        seeds=2,
        seed=3,
        out=folder,
        devices=one_device,
        **COMMON,
        **{k: v for k, v in tiny.items() if k != "num_envs"},
    )


MISTAKES = [
    ({"num": 4}, "no field has several values"),
    ({"learning_rate": [1e-3, -1.0]}, r"trial 1 \(learning_rate=-1\): PPO.learning_rate=-1.0: use a finite"),
    ({"learning_rate": "1,x"}, "PPO.learning_rate='x': use a finite number"),
    ({"learning_rate": "ramp:0:1:10"}, "is for parameters of environments"),
    ({"learning_rate": "log:1e-4:1e-2"}, 'with method="grid": a grid over a range needs num='),
    ({"learning_rate": [1e-3], "num": 2}, "leave num out"),
    ({"learning_rate": "log:1e-4:1e-2", "num": 10**9}, "num=1000000000: use an integer of at most"),
    ({"learning_rate": [1e-3], "method": "best"}, "method='best'; use one of random"),
    ({"activation": envs.uniform(0, 1)}, "a range needs a field of numbers"),
    ({"learning_rate": envs.uniform(True, 2)}, r"learning_rate=uniform\(True, 2\): give numbers low <= high"),
    ({"num_envs": [8, 128], "total_steps": 256}, r"trial 1 \(num_envs=128\): total_steps=256 is less than the 1024 steps"),
    ({"learning_rate": [1e-3], "members_at_once": 1, "seeds": 2}, "use at least seeds=2"),
    ({"learning_rate": [1e-3], "guard": "skip"}, "leave pbt and guard out"),
    ({"learning_rate": [1e-3], "min_steps": 64}, "min_steps=64 has no effect without halving="),
    ({"learning_rate": [1e-3], "halving": 3, "min_steps": 8}, "the first comparison is after 8 of total_steps=384"),
    ({"learning_rate": [1e-3], "halving": 3, "method": "optuna", "num": 2}, "halving= does not work with"),
    ({"learning_rate": [1e-3], "resume": True, "out": None}, "resume=True needs the folder of the sweep"),
]


def test_a_field_without_effect_in_some_trials_is_refused():
    message = r"trial 0 \(core=none\): SAC.burn_in has no effect without a core; leave it out"
    with pytest.raises(ValueError, match=message):
        msrl.sweep("sac", "Pendulum-v1", method="grid", core=["none", "gru"], burn_in=2)
    with pytest.raises(ValueError, match=r"trial 1 \(core=gru\): A2C.shared_torso has no effect with core=GRU; leave it out"):
        msrl.sweep("a2c", ENV, method="grid", core=["none", "gru"], shared_torso=True)
    with pytest.raises(ValueError, match=r"SAC.burn_in has no effect without a core; leave it out"):
        msrl.sweep("sac", "Pendulum-v1", method="grid", tau=[0.01, 0.1], burn_in=2)


@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=[m for _, m in MISTAKES])
def test_mistakes_are_found_before_anything_compiles(tiny, mistake, message, tmp_path, caplog):
    arguments = {"method": "grid", "env": ENV, "out": tmp_path / "sweep", **COMMON, **tiny} | mistake
    with jax.log_compiles(), pytest.raises(ValueError, match=message):
        msrl.sweep("ppo", **arguments)
    assert not [r for r in caplog.records if "Finished XLA compilation of jit(initial_state)" in r.getMessage()]
    assert not (tmp_path / "sweep").exists()


@pytest.mark.long
def test_the_table_has_a_row_for_each_trial(swept):
    assert [trial.values for trial in swept.trials] == [
        {"learning_rate": rate, "num_envs": count} for rate in (1e-3, 3e-2) for count in (8, 16)
    ]
    assert [trial.program for trial in swept.trials] == [0, 1, 0, 1] and len(swept.runs) == 2
    assert [trial.steps for trial in swept.trials] == [384] * 4
    table = swept.table()
    means = [row["return_mean"] for row in table]
    np.testing.assert_allclose(means, returns(swept).mean(axis=1))
    assert [row["rank"] for row in table] == [1 + sum(other > mean for other in means) for mean in means]
    assert swept.best.rank == 1 and swept.best.mean == max(means)
    assert all(str(trial.number) in repr(swept) for trial in swept.trials)


@pytest.mark.long
def test_the_command_trains_the_best_setting(swept, tiny):
    given = parse("msrl-jax train", COMMANDS["train"], shlex.split(swept.command())[2:]).values
    made = make_experiment(**{name: x for name, x in given.items() if name not in ("policy", "eval_episodes")})
    best = PPO(**tiny | swept.best.values)
    assert made == Experiment(algorithm=best, env=ENV, total_steps=COMMON["total_steps"], seed=3, seeds=2)
    assert (given["policy"], given["eval_episodes"]) == ("GPUOnly", COMMON["eval_episodes"])


def test_numbers_of_the_command_are_exact(tiny):
    (rate,) = (row["learning_rate"] for row in choose_trials(axes_of(learning_rate="log:1e-4:1e-2"), "random", 1, 0))
    assert len(repr(rate)) > 15
    about = {
        "algorithm": "ppo",
        "class": "msrl_jax.algorithms.ppo:PPO",
        "env_spec": ENV,
        "policy": "GPUOnly",
        "seed": 0,
        "env_params": {"length": "uniform(0.25, 1)"},
        "total_steps": 64,
        "seeds": 1,
        "eval_episodes": 0,
        "config": json.loads(json.dumps(vars(PPO(normalize_rewards=True, **tiny)))),
    }
    trial = Trial(0, {"learning_rate": rate, "clip_value": None}, 0, rank_by="success")
    command = msrl.SweepResult((trial,), (), "finished", "", about).command(0)
    given = parse("msrl-jax train", COMMANDS["train"], shlex.split(command)[2:]).values
    made = algorithms.make("ppo", {name: x for name, x in given.items() if name in vars(PPO())})
    assert made == PPO(normalize_rewards=True, learning_rate=rate, **tiny)
    assert given["env_params"] == "length=uniform(0.25, 1)" and given["rank_by"] == "success"


@pytest.mark.long
def test_the_folder_holds_the_result(swept, folder):
    loaded = msrl.SweepResult.load(folder)
    assert loaded.trials == swept.trials and loaded.command() == swept.command() and repr(loaded) == repr(swept)
    lines = (folder / "table.csv").read_text().splitlines()
    assert lines[0].startswith("trial,program,learning_rate,num_envs,rung,steps,return_mean") and len(lines) == 5
    assert loaded.run().settings[loaded.best.member]["learning_rate"] == loaded.best.values["learning_rate"]


@pytest.mark.long
def test_a_figure_has_a_panel_for_each_field(swept, tmp_path):
    figure = msrl.plot_sweep(swept, tmp_path / "sweep.png")
    labels = [panel.get_xlabel() for part in figure.subfigs for panel in part.axes]
    assert labels[:2] == ["learning rate", "num envs"] and (tmp_path / "sweep.png").stat().st_size > 0
    written = [text.get_text() for part in figure.subfigs for panel in part.axes for text in panel.texts]
    means = [trial.mean for trial in swept.trials]
    assert written == ["0.001", "0.03", "8", "16", f"{min(means):.4g}", f"{max(means):.4g}"], "the ends of every coordinate"
    lines = [line.get_ydata() for line in figure.subfigs[-1].axes[0].lines[: len(means)]]
    assert sorted(y[-1] for y in lines)[:: len(means) - 1] == [0.0, 1.0], "the return from the least to the most"


def test_trials_are_an_experiment_that_starts_from_a_config(tiny, one_device, monkeypatch):
    seen = []

    def interrupt(experiment, **options):
        seen.append(experiment)
        raise InterruptedError

    monkeypatch.setattr("msrl_jax.search.trial_scheduler.train", interrupt)
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")  # runs from the start need no temporary folder
    with pytest.raises(InterruptedError):
        msrl.sweep(PPO(**tiny), ENV, method="grid", learning_rate=[1e-3, 2e-3], seed=4, devices=one_device, **COMMON)
    first, both = PPO(learning_rate=1e-3, **tiny), {"learning_rate": (1e-3, 2e-3)}
    assert seen == [Experiment(algorithm=first, env=ENV, total_steps=384, seed=4, settings=both, guard="ignore")]
    with pytest.raises(InterruptedError):
        given = Experiment(algorithm=PPO(**tiny), env=ENV, total_steps=384, seed=4)
        msrl.sweep(given, method="grid", learning_rate=[1e-3, 2e-3], devices=one_device, eval_episodes=4, progress=False)
    assert seen[1] == seen[0]
    with pytest.raises(ValueError, match="seed=5: an Experiment already holds it"):
        msrl.train(seen[0], seed=5)
    with pytest.raises(ValueError, match="num_envs=8: an Experiment already holds it"):
        msrl.train(seen[0], num_envs=8)


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": [1e-3, 2e-2]}, "learning_rate="),
        ({"seed": 4}, "seed=3, and cannot resume with seed=4"),
        ({"num_epochs": 2}, "num_epochs=1, and cannot resume with num_epochs=2"),
        ({"resume": False}, "already holds a sweep"),
    ],
    ids=["field", "seed", "constant", "no resume"],
)
def test_another_sweep_in_the_folder_is_refused(swept, folder, tiny, one_device, change, message):
    arguments = {"method": "grid", "learning_rate": [1e-3, 3e-2], "seeds": 2, "seed": 3, "resume": True} | COMMON
    with pytest.raises(RunFolderError, match=message):
        msrl.sweep("ppo", ENV, out=folder, devices=one_device, **(arguments | tiny | {"num_envs": [8, 16]} | change))


@pytest.mark.long
def test_a_finished_sweep_goes_on_without_training(swept, folder, tiny, one_device, monkeypatch):
    monkeypatch.setattr("msrl_jax.search.trial_scheduler.train", None)
    again = msrl.sweep(
        "ppo",
        ENV,
        method="grid",
        learning_rate=[1e-3, 3e-2],
        seeds=2,
        seed=3,
        out=folder,
        resume=True,
        devices=one_device,
        **COMMON,
        **(tiny | {"num_envs": [8, 16]}),
    )
    assert again.trials == swept.trials


@pytest.mark.slow
def test_survivors_go_on_where_they_were(tiny, one_device, tmp_path):
    """Of two batches of two, the better two go on together: the others' work is not lost, and theirs is not done again."""
    halved = msrl.sweep(
        "ppo",
        ENV,
        method="grid",
        learning_rate=[1e-5, 1e-3, 1e-2, 2e-2],
        halving=2,
        min_steps=256,
        members_at_once=4,
        seeds=2,
        devices=one_device,
        out=tmp_path / "sweep",
        **(COMMON | {"total_steps": 8 * 64}),
        **tiny,
    )
    through = [trial for trial in halved.trials if trial.rung == 1]
    assert len(through) == 2 and {trial.steps for trial in through} == {8 * 64} and len(halved.runs) == 3
    last = halved.run(through[0])
    assert last.history["iteration"][0] == 4 and last.members == 4, "its first row is the last one of the first rung"
    alone = msrl.train(
        "ppo",
        ENV,
        seeds=2,
        learning_rate=[trial.values["learning_rate"] for trial in through],
        devices=one_device,
        **(COMMON | {"total_steps": 8 * 64}),
        **tiny,
    )
    for i, trial in enumerate(through):
        for seed in range(2):
            found, expected = halved.run(trial).member_state(trial.member + seed), alone.member_state(2 * i + seed)
            both = (jax.tree.leaves(innermost(state).params) for state in (found, expected))
            for x, y in zip(*both, strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    kept = msrl.sweep(
        "ppo",
        ENV,
        method="grid",
        learning_rate=[1e-5, 1e-3, 1e-2, 2e-2],
        halving=2,
        min_steps=256,
        members_at_once=4,
        seeds=2,
        devices=one_device,
        **(COMMON | {"total_steps": 8 * 64}),
        **tiny,
    )
    assert [(t.rank, t.returns) for t in kept.trials] == [(t.rank, t.returns) for t in halved.trials], "without a folder"


def test_memory_decides_how_many_train_at_once(tiny, one_device, monkeypatch, tmp_path):
    def sweep(**options):
        with pytest.raises(InterruptedError):
            msrl.sweep(
                "ppo",
                ENV,
                method="grid",
                learning_rate=[1e-3, 2e-3, 3e-3, 4e-3, 5e-3],
                seeds=2,
                devices=one_device,
                out=tmp_path / str(len(list(tmp_path.iterdir()))),
                **COMMON,
                **tiny,
                **options,
            )

    def interrupt(*args, **kwargs):
        trained.append(len(args[0].settings["learning_rate"]))
        raise InterruptedError

    trained = []
    monkeypatch.setattr("msrl_jax.search.trial_scheduler.train", interrupt)
    sweep()
    (first,) = json.loads((tmp_path / "0" / "sweep.json").read_text())["programs"]
    monkeypatch.setattr(capacity, "device_memory", lambda devices: int(2.5 * first["bytes_of_a_trial"] / capacity.HEADROOM))
    sweep()
    sweep(members_at_once=7)
    assert trained == [5, 2, 3], "batches of about equal size"
    state = jax.eval_shape(PPO(**tiny).build(envs.make(ENV)).init, jax.random.key(0))
    held = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert first["bytes_of_a_trial"] > 4 * held, "two states of two seeds"


def test_a_trial_that_does_not_fit_alone_is_refused(tiny, monkeypatch):
    monkeypatch.setattr("msrl_jax.fragments.runtime.memory.device_memory", lambda devices: 1000)
    with pytest.raises(ValueError, match=r"trial 0 \(learning_rate=0.001\): the state takes [\d,]+ bytes of .*1,000"):
        msrl.sweep("ppo", ENV, method="grid", learning_rate=[1e-3, 2e-3], **COMMON, **tiny)


@pytest.mark.slow
def test_a_time_limit_ends_the_sweep_and_it_goes_on(tiny, one_device, tmp_path):
    arguments = {
        "method": "grid",
        "learning_rate": [1e-3, 1e-2],
        "members_at_once": 1,
        "devices": one_device,
        "out": tmp_path / "sweep",
        "resume": True,
        **COMMON,
        **tiny,
    }
    ended = msrl.sweep("ppo", ENV, time_limit=1e-3, **arguments)
    assert ended.interrupted and ended.stop_reason == "time limit" and "2 trials were not trained" in repr(ended)
    assert [trial.rank for trial in ended.trials] == [None, None]
    with pytest.raises(ValueError, match="no trial of this sweep has a return"):
        _ = ended.best
    whole = msrl.sweep("ppo", ENV, **arguments)
    assert whole.status == "finished" and len(whole.runs) == 2 and whole.best.returns


def sweep_to_kill(out):
    return msrl.sweep(
        "ppo",
        ENV,
        method="grid",
        learning_rate=[1e-3, 3e-3, 1e-2, 3e-2],
        halving=2,
        min_steps=2_560,
        members_at_once=2,
        total_steps=64 * 80,
        checkpoint_every=640,
        num_envs=8,
        unroll_length=8,
        num_epochs=1,
        num_minibatches=2,
        hidden_sizes=(8,),
        eval_episodes=4,
        out=out,
        resume=True,
        progress="lines",
        policy="GPUOnly:num_devices=1",
    )


@pytest.mark.long
def test_a_killed_sweep_goes_on_to_the_same_table(tmp_path):
    code = "import sys; from tests.search.test_sweep import sweep_to_kill; sweep_to_kill(sys.argv[1])"
    words = [sys.executable, "-c", code, str(tmp_path / "killed")]
    process = processes.start(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    next(line for line in process.stderr if line.startswith("stage 1"))
    next(line for line in process.stderr if " steps per member (" in line)  # the first of its chunks has ended
    process.send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=200)
    assert process.returncode == -signal.SIGKILL, err
    again, whole = (sweep_to_kill(tmp_path / name) for name in ("killed", "whole"))
    assert again.status == whole.status == "finished"
    for table in ("table.csv", "table.json"):
        assert (tmp_path / "killed" / table).read_bytes() == (tmp_path / "whole" / table).read_bytes()


@pytest.mark.long
def test_the_command_line_sweeps(tmp_path, capsys):
    tiny = ["--num-envs", "8", "--unroll-length", "8", "--num-epochs", "1", "--num-minibatches", "2", "--hidden-sizes", "8"]
    words = [
        "sweep",
        "--env",
        ENV,
        "--learning-rate",
        "log:1e-4:1e-2",
        "--clip-value",
        "0.2",
        "--num",
        "2",
        "--total-steps",
        "128",
        "--eval-episodes",
        "2",
        "--out",
        str(tmp_path / "sweep"),
        "--plot",
        str(tmp_path / "sweep.png"),
        "--progress",
        "none",
        "--json",
        *tiny,
    ]
    assert cli.main(words) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["status"] == "finished" and sorted(row["rank"] for row in table["trials"]) == [1, 2]
    assert (tmp_path / "sweep.png").exists()
    assert cli.main(words) == 2 and "already holds a sweep" in capsys.readouterr().err
    assert cli.main(["sweep", "--learning-rate", "log:1e-4", "--num", "2"]) == 2
    assert "PPO.learning_rate=log(1e-4): write log(low, high)" in capsys.readouterr().err.replace("0.0001", "1e-4")


@pytest.mark.slow
def test_simulators_on_the_host_are_trained_one_after_another(tiny):
    result = msrl.sweep(
        "ppo",
        "gymnasium:CartPole-v1",
        method="grid",
        learning_rate=[1e-3, 1e-2],
        policy="MultiLearner:num_devices=1",
        **(COMMON | {"total_steps": 64, "eval_episodes": 2}),
        **tiny,
    )
    assert [trial.run for trial in result.trials] == [0, 1] and not result.run(1).has_members
    assert sorted(trial.rank for trial in result.trials) == [1, 2]


@pytest.mark.slow
def test_optuna_asks_for_trials_by_what_it_was_told(tiny, one_device, tmp_path, monkeypatch):
    pytest.importorskip("optuna")

    def sweep(out, **options):
        return msrl.sweep(
            "ppo",
            ENV,
            method="optuna",
            num=4,
            members_at_once=2,
            learning_rate="log:1e-4:1e-1",
            activation=["tanh", "relu"],
            out=tmp_path / out,
            devices=one_device,
            resume=True,
            **(COMMON | {"total_steps": 128}),
            **tiny,
            **options,
        )

    found = sweep("sweep")
    assert len(found.trials) == 4 and sorted(t.rank for t in found.trials) == [1, 2, 3, 4]
    assert all(1e-4 <= t.values["learning_rate"] <= 1e-1 for t in found.trials)
    assert sweep("sweep").trials == found.trials

    calls, train = [], trial_scheduler.train

    def train_once(*args, **kwargs):
        calls.append(kwargs)
        if len(calls) > 1:
            raise RuntimeError("the machine is gone")
        return train(*args, **kwargs)

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="the machine is gone"):
        patched.setattr(trial_scheduler, "train", train_once)
        sweep("half")
    assert sweep("half").trials == found.trials


def test_optuna_that_is_not_installed_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match="pip install optuna"):
        msrl.sweep("ppo", ENV, method="optuna", num=2, learning_rate=[1e-3, 1e-2], **COMMON)


def test_what_a_run_says_of_its_trials():
    """Three trials of two seeds; a member whose parameters are not finite has no score, and trials know their first member."""
    params = {"kernel": np.ones((6, 2), np.float32), "count": np.arange(6)}
    params["kernel"][3, 1] = np.inf
    means = {"eval_return": np.arange(6.0), "eval_success": np.arange(6.0) / 10}
    result = SimpleNamespace(
        evaluation=SimpleNamespace(means=means),
        members=6,
        state=SimpleNamespace(params=params),
        history={"step": [64, 128]},
        behavior=SimpleNamespace(env=SimpleNamespace(metrics={"success": "last"})),
    )
    first, second, third = trial_scheduler.outcome([Trial(i, {}, 0) for i in (4, 7, 9)], 2, result, 1, 5)
    assert (first.number, first.member, first.returns, first.metrics) == (4, 0, (0.0, 1.0), {"success": (0.0, 0.1)})
    assert second.member == 2 and second.returns[0] == 2.0 and math.isnan(second.returns[1]) and math.isnan(second.mean)
    assert math.isnan(second.metrics["success"][1])
    assert (third.member, third.returns) == (4, (4.0, 5.0))
    assert {(t.steps, t.rung, t.run) for t in (first, second, third)} == {(128, 1, 5)}


def test_a_sweep_whose_run_could_not_be_saved_ends(tmp_path, monkeypatch, capsys):
    """It reads its runs again, so it cannot say that it has finished."""
    full = SimpleNamespace(save_error="No space left on device")
    monkeypatch.setattr(trial_scheduler, "train", lambda *args, **options: full)
    words = ["sweep", "--env", ENV, "--learning-rate", "1e-3,1e-4", "--total-steps", "256", "--num-envs", "8"]
    words += ["--unroll-length", "8", "--num-minibatches", "2", "--method", "grid", "--progress", "none"]
    words += ["--out", str(tmp_path / "sweep")]
    code, error = cli.main(words), capsys.readouterr().err
    assert code == 3 and "No space left on device" in error, error
