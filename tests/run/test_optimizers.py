"""Runs with optimizers of one's own, schedules and rates that adapt: what their folders say, and how they go on."""

import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.cli import main
from msrl_jax.run.disk.store import ResumeWarning
from msrl_jax.run.prepare import make_experiment
from tests.support import transformations
from tests.support.runs import assert_same_state

ENV, STEPS = "CartPole-v1:max_steps_in_episode=30", 4 * 64
SMALL = {"num_envs": 8, "unroll_length": 8, "num_epochs": 1, "num_minibatches": 2, "hidden_sizes": (6,)}
NAME = "tests.support.transformations:falling"


@pytest.fixture
def train(one_device):
    def train(**options):
        about = {"devices": one_device, "progress": False, "eval_episodes": 0, "chunk": 1}
        return msrl.train(**({"algo": "ppo", "env": ENV, "total_steps": STEPS} | SMALL | about | options))

    return train


def half(tick):
    return tick.step >= STEPS // 2


CASES = {
    "adapted": ({"learning_rate": "kl:0.01,start=1e-3"}, {}),
    "members": ({"learning_rate": "kl:0.01,start=1e-3", "entropy_coef": "cosine:0.1", "clip_ratio": [0.1, 0.3]}, {}),
    "schedules": ({"learning_rate": "linear:1e-2,warmup=0.3", "clip_ratio": transformations.halving, "optimizer": "muon"}, {}),
    "object": ({"optimizer": transformations.ready}, {"optimizer": transformations.ready}),
    "function": ({"optimizer": transformations.falling}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_exactly(case, train, one_device, tmp_path):
    fields, again = CASES[case]
    whole = train(**fields)
    train(**fields, out=tmp_path / "run", callbacks=[half])
    resumed = msrl.train(resume=tmp_path / "run", devices=one_device, progress=False, trust=True, **again)
    assert resumed.status == "finished"
    assert_same_state(resumed.state, whole.state)
    if "learning_rate" in fields:
        rates = whole.history["learning_rate"]
        np.testing.assert_array_equal(resumed.history["learning_rate"], rates)
        assert len(np.unique(rates[-3:].reshape(3, -1)[:, 0])) > 1, "it changes after the point where the run went on"
    assert_same_state(msrl.Result.load(tmp_path / "run", trust=True, **again).state, whole.state)


@pytest.mark.long
def test_the_command_line_takes_optimizers_and_schedules(tmp_path, capsys):
    sizes = ["--num-envs", "8", "--unroll-length", "8", "--num-epochs", "1", "--num-minibatches", "2", "--hidden-sizes", "6"]
    words = ["train", "--env", ENV, "--total-steps", str(STEPS), "--eval-episodes", "0", "--progress", "none", *sizes]
    chosen = ["--optimizer", "adamw:weight_decay=0.1,b1=0.8", "--learning-rate", "linear:1e-2:1e-3,warmup=0.25"]
    chosen += ["--entropy-coef", "tests.support.transformations:halving"]
    out = tmp_path / "run"
    assert main([*words, *chosen, "--out", str(out)]) == 0
    fields = {"optimizer": chosen[1], "learning_rate": chosen[3], "entropy_coef": chosen[5]}
    expected = make_experiment("ppo", ENV, total_steps=STEPS, **SMALL | fields)
    assert msrl.Result.load(out, trust=True).experiment == expected
    assert main([*words, "--out", str(out), "--resume", *chosen]) == 0
    assert main([*words, "--optimizer", "addam"]) == 2
    assert "PPO.optimizer='addam': use 'adam'" in capsys.readouterr().err
    assert main([*words, "--learning-rate", "linaer:1e-3"]) == 2
    assert "did you mean 'linear'" in capsys.readouterr().err
    assert main([*words, "--learning-rate", "uniform:0:1"]) == 2
    assert "PPO.learning_rate='uniform:0:1': use a number, linear:FROM:TO or cosine:FROM:TO" in capsys.readouterr().err


@pytest.mark.slow
def test_more_steps_stretch_a_schedule(train, one_device, tmp_path):
    train(learning_rate="linear:1e-2", out=tmp_path / "run")
    with pytest.warns(ResumeWarning, match="which rescales the schedule of learning_rate"):
        longer = msrl.train(resume=tmp_path / "run", total_steps=2 * STEPS, devices=one_device, progress=False)
    want = 1e-2 * np.array([1, 3 / 4, 1 / 2, 1 / 4, 4 / 8, 3 / 8, 2 / 8, 1 / 8])
    np.testing.assert_allclose(longer.history["learning_rate"], want, rtol=1e-6)
