"""A file of an algorithm is one in everything that takes an algorithm; what is none is refused."""

import importlib
import json
import pickle
import shutil
import sys

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import algorithms, cli
from msrl_jax.registry.table import ALGORITHMS
from tests.support.runs import ENV, RUNS, stop_after

PPO = RUNS["ppo"][2]


@pytest.mark.slow
def test_a_run_of_a_file_goes_on_from_anywhere(folder, monkeypatch, capsys):
    algorithms.copy("ppo", "my_ppo.py")
    common = {"total_steps": 64 * 12, "chunk": 3, "eval_episodes": 0, "progress": False} | PPO
    common["anneal_learning_rate"] = False
    whole = msrl.train("my_ppo.py", ENV, policy="SingleLearnerCoarse", devices=jax.devices()[:4], **common)
    assert pickle.loads(pickle.dumps(whole.experiment.algorithm)) == whole.experiment.algorithm
    msrl.train("my_ppo.py:PPO", ENV, out="run", callbacks=[stop_after(6)], **common)
    assert json.loads((folder / "run/config.json").read_text())["class"] == f"{folder}/my_ppo.py:PPO"
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    reset_carry()
    again = msrl.train(
        resume="../run", trust=True, policy="MultiLearner", devices=jax.devices()[:4], eval_episodes=0, progress=False
    )
    assert type(again.experiment.algorithm) is not type(whole.experiment.algorithm)  # the file was run again
    for x, y in zip(jax.tree.leaves(again.state.params), jax.tree.leaves(whole.state.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=1e-5)
    # The file may move into the working directory, or be given again.
    reset_carry()
    shutil.move(folder / "my_ppo.py", "my_ppo.py")
    assert cli.main(["evaluate", "../run", "--episodes", "2", "--trust"]) == 0
    reset_carry()
    (folder / "other").mkdir()
    shutil.move("my_ppo.py", folder / "other")
    capsys.readouterr()
    assert cli.main(["evaluate", "../run", "--episodes", "2", "--trust"]) == 2
    assert "my_ppo.py cannot be read: the file does not exist; give the path" in capsys.readouterr().err
    longer = ["--out", "../run", "--total-steps", str(64 * 14), "--eval-episodes", "0", "--progress", "none"]
    assert cli.main(["train", "--resume", "--algo", "../other/my_ppo.py", *longer]) == 0


def reset_carry():
    """Forgets the file `my_ppo.py`, as a new process does."""
    ALGORITHMS.pop("my_ppo")
    sys.modules.pop("my_ppo")


def test_a_changed_file_is_run_again(folder):
    path = algorithms.copy("ppo", "my_ppo.py")
    before = algorithms.get("my_ppo.py")
    assert algorithms.get(str(path.absolute())) is before is algorithms.get("my_ppo.py:PPO") is algorithms.get("my_ppo")
    path.write_text(path.read_text().replace("default=3e-3", "default=2e-3"))
    assert algorithms.get("my_ppo.py")().learning_rate == 2e-3 and before().learning_rate == 3e-3
    path.write_text(path.read_text().replace("default=2e-3", "default=1e-3"))
    assert algorithms.get("my_ppo")().learning_rate == 1e-3  # as a run that goes on finds it
    path.write_text(path.read_text().replace("class PPO", "class Mine"))
    assert algorithms.get("my_ppo.py") is algorithms.get("my_ppo") and algorithms.get("my_ppo").__name__ == "Mine"
    path.write_text("import nothing_like_it\n")
    with pytest.raises(ValueError, match=r"my_ppo.py, line 1: ModuleNotFoundError: No module named 'nothing_like_it'"):
        algorithms.get("my_ppo.py")


def test_a_file_that_failed_is_run_again_once_it_is_corrected(folder, monkeypatch):
    path = algorithms.copy("ppo", "my_ppo.py")
    good = path.read_text()
    path.write_text(f"{good}\nraise KeyError('the last line')\n")  # the config has its name by then
    with pytest.raises(ValueError, match="KeyError: 'the last line'; correct the file"):
        algorithms.get("my_ppo.py")
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(KeyError):
        importlib.import_module("my_ppo")
    path.write_text(good)
    importlib.invalidate_caches()
    assert algorithms.get("my_ppo.py") is algorithms.get("my_ppo")


def test_a_file_is_the_module_that_a_program_has_imported(folder, monkeypatch):
    algorithms.copy("ppo", "my_ppo.py")
    monkeypatch.syspath_prepend(folder)
    module = importlib.import_module("my_ppo")
    assert algorithms.get("my_ppo.py") is module.PPO
    (folder / "json.py").write_text((folder / "my_ppo.py").read_text().replace("my_ppo", "my_json"))
    own = algorithms.get("json.py")
    assert own.name == "my_json" and sys.modules["json"] is json is not sys.modules[own.__module__]


CONFIG = """
@msrl_jax.algorithms.config("{0}")
class {1}:
    def build(self, env):
        return env
"""


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gone.py", None, r"gone\.py cannot be read: the file does not exist"),
        ("own.py", "x = 1", r"own\.py has no config; decorate a class"),
        ("own.py", "x = 1\ny = (", r"own\.py, line 2: SyntaxError: '\(' was never closed"),
        ("own.py", "import msrl_jax" + CONFIG.format("a", "A") + CONFIG.format("b", "B"), r"A, B; say which: own\.py:A"),
        ("own.py:Walk", "import msrl_jax" + CONFIG.format("a", "Talk"), r"no config 'Walk' \(did you mean 'Talk'\?\)"),
        ("own.py", "import msrl_jax" + CONFIG.format("ppo", "A"), r"named 'ppo' is registered already; choose another name"),
    ],
)
def test_what_is_no_file_of_an_algorithm(folder, name, text, message):
    if text is not None:
        (folder / "own.py").write_text(text)
    with pytest.raises(ValueError, match=message):
        algorithms.get(name)


def test_a_file_may_be_the_algorithm_of_a_team(folder):
    algorithms.copy("ippo", "my_ippo.py")
    teams = algorithms.make("teams", {"teams": {"a": "my_ippo.py:learning_rate=3e-4", "b": "ippo"}}).teams
    assert teams == (f"a={folder}/my_ippo.py:IPPO:learning_rate=0.0003", "b=ippo")
    assert algorithms.make("teams", {"teams": teams}).teams == teams


@pytest.fixture
def bare(folder):
    """The arguments of a run of a config without fields."""
    built = f"return msrl_jax.algorithms.PPO(**{PPO}).build(env)"
    (folder / "bare.py").write_text("import msrl_jax" + CONFIG.format("bare", "Bare").replace("return env", built))
    return ["--algo", "bare.py", "--env", ENV, "--total-steps", "256", "--progress", "none"]


@pytest.mark.slow
def test_a_config_of_ones_own_needs_no_field(bare):
    assert cli.main(["train", *bare, "--seeds", "2", "--eval-episodes", "2", "--out", "run"]) == 0
    assert cli.main(["evaluate", "run", "--episodes", "2"]) == 0


def test_what_needs_a_field_is_refused_by_a_config_without_any(bare, capsys):
    for command, message in [
        (["sweep", *bare, "--method", "grid", "--out", "s"], "no field has several values"),
        (["train", *bare, "--pbt", "members=2,every=2,rate=uniform:0:1"], "Bare has no field 'rate'; it can search nothing"),
        (["bench", *bare[:4], "--num-envs", "8"], "Bare has no field 'num_envs'; its fields are none"),
    ]:
        capsys.readouterr()
        assert cli.main(command) == 2 and message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["train", "--algo", "bare.py", "--help"])
