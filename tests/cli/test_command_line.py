import functools
import importlib.metadata
import json
import os
import re
import shlex
import sys

import jax
import pytest

from msrl_jax.cli import command_line, main
from msrl_jax.cli.command import Command, Output
from msrl_jax.fragments.support.compiling import MOST_CPU_DEVICES
from msrl_jax.run import Experiment
from tests.support import processes

TINY = ["--num-envs", "8", "--unroll-length", "8", "--num-epochs", "1", "--num-minibatches", "2", "--hidden-sizes", "8"]


def command(*arguments):
    return [sys.executable, "-W", "error", "-m", "msrl_jax", *map(str, arguments)]


def run(*arguments, cwd=None):
    return processes.run(command(*arguments), cwd=cwd)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of the command line on four virtual devices, in the folder it chooses."""
    folder = tmp_path_factory.mktemp("cli")
    done = run(
        "train",
        "--total-steps",
        256,
        "--policy",
        "SingleLearnerCoarse:learners=1,actors=2",
        "--cpu-devices",
        4,
        "--eval-episodes",
        2,
        "--env",
        "CartPole-v1:max_steps_in_episode=30",
        "--json",
        *TINY,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.mark.long
def test_the_last_line_is_the_summary(trained):
    _, done = trained
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["algorithm"] == "ppo" and summary["env"] == "CartPole-v1:max_steps_in_episode=30"
    assert summary["policy"] == "SingleLearnerCoarse:actors=2" and summary["devices"] == 3
    assert summary["total_steps"] == 256 and summary["status"] == "finished"
    assert summary["episode_return"] > 0 and summary["eval_return"] > 0
    assert summary["steps_per_second"] > 0 and 0 < summary["compile_seconds"] < summary["wall_seconds"]


@pytest.mark.long
def test_a_run_goes_to_a_folder_named_after_it(trained):
    folder, done = trained
    (run_folder,) = (folder / "runs").iterdir()
    assert re.fullmatch(r"ppo-CartPole-v1_max_steps_in_episode_30-SingleLearnerCoarse_.*-0-\d{8}-\d{6}", run_folder.name)
    assert json.loads(done.stdout.splitlines()[-1])["folder"] == str(run_folder)
    assert "100%" in done.stderr
    config = json.loads((run_folder / "config.json").read_text())
    assert config["config"]["num_envs"] == 8 and config["devices"]["count"] == 3
    assert config["devices"]["xla_flags"].endswith(os.environ["XLA_FLAGS"])
    settings = {name: config["devices"][name] for name in ("matmul_precision", "x64", "threefry_partitionable")}
    assert settings == {"matmul_precision": "default", "x64": False, "threefry_partitionable": True}


@pytest.mark.long
def test_evaluate_plays_a_saved_run(trained, capsys):
    folder, _ = trained
    (run_folder,) = (folder / "runs").iterdir()
    assert main(["evaluate", str(run_folder), "--episodes", "4", "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(outcome["returns"]) == 4 and outcome["eval_return"] == sum(outcome["returns"]) / 4
    assert outcome["finished"] == [True] * 4
    assert main(["evaluate", str(run_folder), "--episodes", "4", "--checkpoint", "2", "--json"]) == 2
    assert "has no checkpoint 2: those after iterations 4 are complete" in capsys.readouterr().err
    assert main(["evaluate", str(run_folder), "--episodes", "4", "--checkpoint", "best", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["returns"] == outcome["returns"]


INTERRUPTING = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, *given):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from msrl_jax.cli import main
sys.exit(main(["evaluate", "nowhere"]))
"""


@pytest.mark.parametrize("module", ["msrl_jax.cli.commands", "jax"])
def test_ctrl_c_during_the_imports_is_one_line(module):
    done = processes.run([sys.executable, "-c", INTERRUPTING, module])
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "msrl-jax: error: interrupted\n")


def test_after_ctrl_c_no_thread_keeps_the_process():
    code = """
import sys, threading, time
from msrl_jax.cli import command, main

def interrupted(self, given):
    threading.Thread(target=time.sleep, args=(1000,)).start()
    raise KeyboardInterrupt

command.Command.__call__ = interrupted
sys.argv = ["msrl-jax", "list"]
sys.exit(main())
"""
    done = processes.run([sys.executable, "-c", code])
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "msrl-jax: error: interrupted\n")


MISTAKES = [
    (["trian"], "did you mean 'train'?"),
    (["--verison"], "did you mean '--version'?"),
    (["train", "--total-steps", "1e30"], "1e+30, which is too large"),
    (["train", "--data", "x.npz"], "unknown option '--data', which is one of apex_dqn, bc,"),
    (["train", "--hidden-sizes", "64,x"], "'64,x', which is not a whole number"),
    (["train", "--hidden-sizes", "64,64", "32,32"], "--hidden-sizes is 64,64 32,32; give one value; msrl-jax sweep"),
    (["train", "--algo", "r2d2", "--core.size", "32,64"], "--core.size is (32, 64); give one value; msrl-jax sweep tries"),
    (["train", "--activation", "tanh,relu"], "--activation is 'tanh,relu'; give one value; msrl-jax sweep tries several"),
    (["train", "--core", "gru:32,gru:64"], "PPO.core='gru:32,gru:64' has 2 options; give one, or use msrl.sweep"),
    (["replay", __file__], "test_command_line.py does not describe a non-finite step"),
    (["replay", "nothere.npz"], "the file nothere.npz does not exist"),
    (["train", "--policy", "GPUOnly:devices"], "cannot read 'devices' in 'GPUOnly:devices'; write GPUOnly:key=value"),
    (["explain", "--policy", "os:path"], "policy 'os:path' is in Python's standard library"),
    (["train", "--record", "new/x.npz", "--policy", "SingleLearnerCoarse:learners=99"], "99"),
    (["train", "--record", "new/x.npz", "--guard", "rollback"], "leave record out"),
    (["train", "--policy", "SingleLearnerFine:staleness=1"], "'staleness' (a parameter of SingleLearnerCoarse)"),
    (["train", "extra"], "unexpected argument 'extra'"),
    (["evaluate", "no/such/run"], "the folder no/such/run does not exist"),
    (["explain", "--out", "plan.png"], "use a page, such as plan.html"),
    (["explain", "--beside", "Central", "--out", "plan.svg"], "there are 2; use a page, such as plan.html"),
    (["bench", "--num-envs"], "--num-envs has no value"),
    (["train", "--lr", "1e-3"], "did you mean '--learning-rate'?"),
    (["train", "--out", ""], "--out is empty"),
    (["train", "--seed", "4294967296"], "a seed has 32 bits; use 0 to 4294967295"),
    (["train", "--env", "CartPole-v1:max_steps_in_episode=-5"], "max_steps_in_episode=-5: use an integer of at least 1"),
    (["evaluate"], "RUN is missing: folder of a run"),
    (["train", "--cpu-devices", "0"], "--cpu-devices 0: use 1 to 1024"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_bad_input_is_one_line_and_code_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("msrl-jax: error: ") and message in line
    assert captured.out == "" and list(tmp_path.iterdir()) == []


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"msrl-jax {importlib.metadata.version('msrl-jax')}\n"


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("msrl_jax.envs.names", lambda: int("not ours"))
    with pytest.raises(ValueError, match="invalid literal"):
        main(["list"])
    code = compile("def names():\n    first, second = 1,", "bug.py", "exec")
    exec(code, module := {"__name__": "msrl_jax.bug"})  # as in a module of the package
    monkeypatch.setattr("msrl_jax.envs.names", module["names"])
    with pytest.raises(ValueError, match="not enough values to unpack"):
        main(["list"])


@pytest.fixture
def compiled_once(monkeypatch):
    """What is explained again is compiled already."""
    monkeypatch.setattr(Experiment, "compile", functools.cache(Experiment.compile))


@pytest.mark.usefixtures("compiled_once")
def test_explain_prints_the_plan(capsys, monkeypatch):
    arguments = ["explain", "--policy", "SingleLearnerCoarse:learners=1,actors=1", *TINY]
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {f["name"] for f in plan["fragments"]} >= {"act", "env_step", "learn"}
    for columns in (60, 80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= columns and any(line.startswith("  learn") for line in lines)


@pytest.mark.long
def test_explain_draws_plans_side_by_side(capsys, tmp_path):
    out = tmp_path / "plans.html"
    policies = ["--policy", "GPUOnly:num_devices=1", "--beside", "SingleLearnerCoarse:learners=1,actors=1", "--json"]
    policies[3:3] = ["gpuonly:num_devices=1"]  # the same again, which is drawn once
    assert main(["explain", *TINY, *policies, "--out", str(out)]) == 0
    plans = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert out.read_text().count("<figure>") == len(plans) == 2 and all(plan["policy"] in out.read_text() for plan in plans)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
def test_explain_shows_the_fragments_of_a_program_whose_name_is_cut(capsys):
    arguments = ["explain", "--algo", "sac", "--env", "Pendulum-v1", "--policy", "MultiLearner", "--num-envs", "8"]
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main(arguments) == 0
    words = " ".join(capsys.readouterr().out.split())
    long = [program["name"].split("+") for program in plan["programs"] if len(program["name"]) > 40]
    assert long and all(f"({len(names)} fragments): {', '.join(names)}" in words for names in long)
    actor = 3 * 256 + 256 + 256 * 256 + 256 + 256 * 2 + 2
    critics = 2 * (4 * 256 + 256 + 256 * 256 + 256 + 256 + 1)  # they see the action, and have one output
    assert plan["parameters"] == {"actor": actor, "critic": critics, "log_temperature": 1}
    assert f"parameters ({actor + critics + 1:,}) actor {actor:,} critic {critics:,}" in words


def test_as_many_cpu_devices_as_allowed_are_asked_for(monkeypatch):
    asked = {}
    monkeypatch.setattr(jax.config, "update", asked.__setitem__)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_collective_call_terminate_timeout_seconds=7")
    monkeypatch.setattr(Command, "__call__", lambda self, given: Output())
    assert main(["train", "--cpu-devices", str(MOST_CPU_DEVICES)]) == 0
    assert asked == {"jax_platforms": "cpu", "jax_num_cpu_devices": 1024}
    assert os.environ["XLA_FLAGS"].endswith(" --xla_cpu_collective_call_terminate_timeout_seconds=7")  # the user's comes last


def test_list_names_everything(capsys):
    assert main(["list", "--json"]) == 0
    names = json.loads(capsys.readouterr().out)
    assert "ppo" in names["algorithms"] and "CartPole-v1" in names["environments"] and "GPUOnly" in names["policies"]


def test_with_json_nothing_else_is_on_standard_output(monkeypatch, capsys):
    listing = command_line.COMMANDS["list"]

    def talking(self, given):
        print("hello from an environment")
        return Output("text", {"number": 1})

    monkeypatch.setattr(type(listing), "__call__", talking)
    assert main(["list", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.out == '{"number": 1}\n' and captured.err == "hello from an environment\n"
    assert main(["list"]) == 0
    assert capsys.readouterr().out == "hello from an environment\ntext\n"


def test_help_starts_no_device():
    # `--cpu-devices` can be obeyed only if nothing before it has started a backend.
    code = "import msrl_jax.cli, jax; jax.config.update('jax_num_cpu_devices', 3); print(len(jax.devices()))"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = processes.run([sys.executable, "-c", code], env=environment)
    assert done.stdout.split() == ["3"], done.stderr


FULL = "msrl-jax: error: cannot write to standard output: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    ("output", "said"),
    [
        pytest.param("2>&1 | head -1", "", marks=pytest.mark.long),
        pytest.param(">&- 2>/dev/full", "", marks=pytest.mark.slow),
        pytest.param(">/dev/full", FULL, marks=pytest.mark.slow),
    ],
)
def test_output_does_not_decide_over_training(output, said, tmp_path):
    words = command("train", "--total-steps", 64 * 40, "--chunk", 1, "--out", "run", "--eval-episodes", 0, *TINY)
    words += ["--progress", "none"] if said else []
    done = processes.run(["bash", "-c", f"{shlex.join(words)} {output}; echo code ${{PIPESTATUS[0]}}"], cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "code 0" and done.stderr == said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 40


def test_a_listing_that_cannot_be_written_is_an_error():
    done = processes.run(["bash", "-c", f"{shlex.join(command('list'))} >/dev/full"])
    assert done.returncode == 2 and done.stderr.startswith("msrl-jax: error: cannot write to standard output")


def test_a_reader_that_leaves_early_is_no_error():
    piped = " ".join(command("list")) + " | head -1; echo ${PIPESTATUS[0]}"
    done = processes.run(["bash", "-c", piped])
    assert done.stdout.splitlines() == ["algorithms", "0"] and done.stderr == ""


MINE = """
import dataclasses
from msrl_jax.algorithms import PPO, config, tunable
from msrl_jax.policies import Layout, Placement

@dataclasses.dataclass(frozen=True)
class Together:
    "A policy of my own."

    num_devices: int = 1

    def layout(self, devices, sizes):
        place = Placement.over("here", devices[: self.num_devices])
        return Layout(dict.fromkeys(("env", "actor", "learner"), place), policy="Together")

@config("mine")
class Mine:
    "PPO of my own."

    rate: float = tunable(default=1e-3, doc="step size.", above=0.0)

    def build(self, env):
        return PPO(
            learning_rate=self.rate, num_envs=8, unroll_length=8, num_epochs=1, num_minibatches=2, hidden_sizes=(8,)
        ).build(env)
"""


@pytest.mark.long
def test_an_algorithm_and_a_policy_of_ones_own_have_the_command_line(tmp_path):
    (tmp_path / "own.py").write_text(MINE)

    def run(*commands):  # as a console script does, which does not look for modules in this folder
        code = f"from msrl_jax.cli import main\nfor words in {[list(map(str, c)) for c in commands]}: assert main(words) == 0"
        return processes.run([sys.executable, "-P", "-c", code], cwd=tmp_path)

    common = ["--total-steps", 128, "--eval-episodes", 2, "--progress", "none"]
    trained = ["train", "--algo", "own:Mine", "--rate", "1e-3,1e-2", "--out", "run", "--policy", "own:Together", *common]
    swept = ["sweep", "--algo", "own:Mine", "--rate", "1e-3,1e-2", "--method", "grid", "--out", "sweep", *common]
    done = run(trained, swept)
    # The folder, and so the command, has the path of the file, which any working directory finds.
    assert done.returncode == 0 and f"msrl-jax train --algo {tmp_path}/own.py:Mine" in done.stdout, done.stderr
    on = ["train", "--out", "run", "--resume", "--trust", "--total-steps", 256, *common[2:]]
    done = run(on)
    assert done.returncode == 0 and "mine on CartPole-v1" in done.stdout, done.stderr
    assert json.loads((tmp_path / "run" / "config.json").read_text())["policy"] == "own:Together", "without --policy, too"
