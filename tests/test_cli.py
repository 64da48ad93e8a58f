import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from msrl_jax.algorithms import PPOConfig
from msrl_jax.algorithms.configs.base import field_docs
from msrl_jax.cli import main

TINY = ["--num-envs", "8", "--unroll-length", "8", "--num-epochs", "1", "--num-minibatches", "2", "--hidden-sizes", "8"]


def command(*arguments):
    return [sys.executable, "-W", "error", "-m", "msrl_jax", *map(str, arguments)]


def run(*arguments, cwd=None):
    return subprocess.run(command(*arguments), cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of the command line on four virtual devices, in the folder it chooses."""
    folder = tmp_path_factory.mktemp("cli")
    done = run(
        "train", "--total-steps", 256, "--policy", "SingleLearnerCoarse:learners=1,actors=2", "--cpu-devices", 4,
        "--eval-episodes", 2, "--env", "CartPole-v1:max_steps_in_episode=30", "--json", *TINY, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, done


def test_the_last_line_is_the_summary(trained):
    _, done = trained
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["algorithm"] == "ppo" and summary["env"] == "CartPole-v1:max_steps_in_episode=30"
    assert summary["policy"] == "SingleLearnerCoarse:actors=2" and summary["devices"] == 3
    assert summary["total_steps"] == 256 and summary["status"] == "finished"
    assert summary["episode_return"] > 0 and summary["eval_return"] > 0
    assert summary["steps_per_second"] > 0 and 0 < summary["compile_seconds"] < summary["wall_seconds"]


def test_a_run_goes_to_a_folder_named_after_it(trained):
    folder, done = trained
    (run_folder,) = (folder / "runs").iterdir()
    assert re.fullmatch(r"ppo-CartPole-v1_max_steps_in_episode_30-SingleLearnerCoarse_.*-0-\d{8}-\d{6}", run_folder.name)
    assert json.loads(done.stdout.splitlines()[-1])["folder"] == f"runs/{run_folder.name}"
    assert "100%" in done.stderr and "saved in" in done.stdout
    config = json.loads((run_folder / "config.json").read_text())
    assert config["config"]["num_envs"] == 8 and config["devices"]["count"] == 3


def test_evaluate_plays_a_saved_run(trained, capsys):
    folder, _ = trained
    (run_folder,) = (folder / "runs").iterdir()
    assert main(["evaluate", str(run_folder), "--episodes", "4", "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(outcome["returns"]) == 4 and outcome["eval_return"] == sum(outcome["returns"]) / 4
    assert outcome["finished"] == [True] * 4


def test_ctrl_c_leaves_a_complete_run(tmp_path):
    process = subprocess.Popen(
        command("train", "--total-steps", 64 * 100_000, "--chunk", 20, "--out", "run", "--progress", "none", *TINY),
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 200
    while not (tmp_path / "run" / "metrics.jsonl").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "(interrupted)" in out and "Traceback" not in err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"
    assert (tmp_path / "run" / "checkpoint" / "state").is_dir()


MISTAKES = [
    (["trian"], "did you mean 'train'?"),
    (["train", "--num-env", "4"], "did you mean '--num-envs'?"),
    (["train", "--algo", "poo"], "did you mean 'ppo'?"),
    (["train", "--env", "CartPole"], "'CartPole-v1'"),
    (["train", "--env", "FrozenLake-misc"], "FlattenObservation"),
    (["train", "--policy", "GPUonli"], "'GPUOnly'"),
    (["train", "--policy", "GPUOnly:devices"], "cannot read 'devices'"),
    (["train", "--policy", "SingleLearnerFine:staleness=1"], "'staleness' (a parameter of SingleLearnerCoarse)"),
    (["train", "--total-steps", "5"], "less than the"),
    (["train", "--num-minibatches", "7"], "num_minibatches=7"),
    (["train", "extra"], "unexpected argument 'extra'"),
    (["evaluate", "no/such/run"], "no complete run"),
    (["explain", "--policy", "SingleLearnerCoarse:learners=99"], "99"),
    (["bench", "--repeats", "0"], "repeats=0"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_bad_input_is_one_line_and_code_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("msrl-jax: error: ") and message in line
    assert captured.out == "" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["train", "--seed", "x"], ["evaluate"]])
def test_values_that_do_not_parse_are_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert capsys.readouterr().err


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("msrl_jax.envs.names", lambda: int("not ours"))
    with pytest.raises(ValueError, match="invalid literal"):
        main(["list"])


def test_explain_prints_the_plan(capsys):
    arguments = ["explain", "--policy", "SingleLearnerCoarse:learners=1,actors=1", *TINY]
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {f["name"] for f in plan["fragments"]} >= {"act", "env_step", "learn"}
    assert main(arguments) == 0
    assert "learn" in capsys.readouterr().out


def test_bench_measures_a_grid(capsys):
    small = [word for word in TINY if word not in ("--num-envs", "--unroll-length")][2:]
    arguments = ["bench", "--num-envs", "8", "16", "--unroll-length", "8", "--seconds", "0.05", "--cpu-devices", "1"]
    done = run(*arguments, "--json", *small)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [(r["num_envs"], r["unroll_length"]) for r in rows] == [(8, 8), (16, 8)]
    assert all(r["steps_per_second"] > 0 and r["compile_seconds"] > 0 and r["devices"] == 1 for r in rows)
    updates = [r["updates_per_second"] / r["steps_per_second"] for r in rows]
    assert updates == pytest.approx([2 / 64, 2 / 128])


def test_list_names_everything(capsys):
    assert main(["list", "--json"]) == 0
    names = json.loads(capsys.readouterr().out)
    assert "ppo" in names["algorithms"] and "CartPole-v1" in names["environments"] and "GPUOnly" in names["policies"]


def test_help_shows_every_field_of_the_config(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["train", "--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    assert text.count("--total-steps") == 1
    words = re.sub(r"\W+", "", text)  # whatever the lines and the frame of the table
    for field, about in field_docs(PPOConfig).items():
        assert f"--{field.replace('_', '-')}" in text
        assert field == "total_steps" or re.sub(r"\W+", "", about) in words, field


def test_help_starts_no_device():
    # `--cpu-devices` can be obeyed only if nothing before it has started a backend.
    code = "import msrl_jax.cli, jax; jax.config.update('jax_num_cpu_devices', 3); print(len(jax.devices()))"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout.split() == ["3"], done.stderr


def test_a_reader_that_leaves_early_is_no_error():
    piped = " ".join(command("list")) + " | head -1; echo ${PIPESTATUS[0]}"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["algorithms", "0"] and done.stderr == ""
