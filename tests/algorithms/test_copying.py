"""A copy of an algorithm is a file that trains the same bits as the original, in everything that takes an algorithm."""

import dataclasses
import importlib
import inspect
import json
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import algorithms, cli
from msrl_jax.algorithms import copying
from msrl_jax.algorithms.config import ALGORITHMS, OF_RUNS, config
from msrl_jax.experiment.arguments import make_experiment
from tests.support.runs import ENV, RUNS, assert_same_state, stop_after
from tests.support.slow import mostly_slow
from tests.support.small_runs import PARTICULAR, SMALL
from tests.support.transitions import noise

STOCK = algorithms.names()
CONTINUOUS = ("td3", "ddpg", "sac")
PPO = RUNS["ppo"][2]
QMIX = {
    "num_envs": 4, "unroll_length": 4, "hidden_sizes": (8,), "memory_size": 4, "learning_starts": 64, "capacity": 512,
    "batch_size": 16, "num_updates": 1, "trace_length": 4, "mixing_size": 4, "hyper_size": 4,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory whose algorithms are forgotten in the end."""
    monkeypatch.chdir(tmp_path)
    modules, known = set(sys.modules), set(ALGORITHMS)
    yield tmp_path
    for name in set(ALGORITHMS) - known:
        del ALGORITHMS[name]
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """A copy of every algorithm."""
    folder = tmp_path_factory.mktemp("copies")
    for name in STOCK:
        algorithms.copy(name, folder / f"our_{name}.py")
    yield folder
    for name in STOCK:
        ALGORITHMS.pop(f"our_{name}", None)
        sys.modules.pop(f"our_{name}", None)


def programs(algo, **more):
    """The programs of a small run as text without places in files, the initial state's shapes, and its logical axes."""
    algo, _, option = algo.partition("+")
    kind = algorithms.get(algo)
    name, fields = kind.name.removeprefix("our_"), {f.name for f in dataclasses.fields(kind)}
    game = "pgx:tic_tac_toe" if name == "alphazero" else "KuhnPoker"
    env = game if kind.many_agents else "Pendulum-v1" if name in CONTINUOUS else "CartPole-v1"
    options = PARTICULAR.get(f"{name}+{option}" if option else name, {})
    given = {k: x for k, x in (SMALL | options).items() if k in fields}
    given |= {"data": noise(msrl.envs.make(env))} if kind.offline else {}
    given |= {"teams": "player_0=ippo player_1=random"} if name == "teams" else {}
    experiment = make_experiment(algo, env, overrides=given | more)
    agent, state = experiment.agent, jax.eval_shape(experiment.initial_state)
    texts = jax.jit(agent.init).lower(experiment.key).as_text(), jax.jit(agent.iteration).lower(state).as_text()
    return texts, jax.tree.map(lambda x: (x.shape, str(x.dtype)), state), agent.axes


@pytest.mark.parametrize("name", mostly_slow(STOCK, "ppo"))
def test_a_copy_is_the_same_program(copies, name):
    file = str(copies / f"our_{name}.py")
    copy, original = algorithms.get(file), algorithms.get(name)
    assert copy is not original and copy.name == f"our_{name}" and copy.__name__ == f"Our{original.__name__}"
    assert copy.__doc__ == original.__doc__
    facts = lambda kind: [(f.name, f.default, f.metadata) for f in dataclasses.fields(kind)]  # noqa: E731
    assert facts(copy) == facts(original)
    for option in ("", "+gru", "+batch_norm") if name == "sac" else ("",):
        (texts, state, axes), (same_texts, same_state, same_axes) = programs(file + option), programs(name + option)
        assert texts == same_texts
        # Their classes are the copy's own.
        assert jax.tree.leaves(state) == jax.tree.leaves(same_state)
        assert list(map(str, jax.tree.leaves(axes))) == list(map(str, jax.tree.leaves(same_axes)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a2c", "a3c", "impala"])
def test_a_copy_has_the_memory_too(copies, name):
    assert programs(str(copies / f"our_{name}.py"), core="gru")[0] == programs(name, core="gru")[0]


def test_copies_are_clean_and_import_only_what_is_public(copies):
    for path in copies.glob("*.py"):
        imports = re.findall(r"^(?:from|import) .*?(?:\([^)]*\))?$", path.read_text(), re.MULTILINE)
        assert imports and not [line for line in imports if re.search(r"[ .]_|algorithms\.loops", line)], path
    root = Path(msrl.__file__).parents[1]
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "--config", root / "pyproject.toml", copies]
        done = subprocess.run(ruff, cwd=root, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "env"),
    [
        pytest.param("ppo", ENV, marks=pytest.mark.long),
        pytest.param("dqn", ENV, marks=pytest.mark.slow),
        pytest.param("a2c", ENV, marks=pytest.mark.slow),  # with a memory
        pytest.param("qmix", "RockPaperScissors", marks=pytest.mark.slow),
    ],
)
def test_from_the_command_line_a_copy_trains_the_same_bits(folder, name, env, capsys):
    given = RUNS[name][2] if name in RUNS else QMIX
    flags = [f"--{'' if value is not False else 'no-'}{key.replace('_', '-')}" + f"={value}" * (not isinstance(value, bool))
             for key, value in given.items() if key != "hidden_sizes"]  # fmt: skip
    assert cli.main(["copy", name, "mine.py"]) == 0
    assert re.search(rf"mine.py has {name} in \d+ lines; msrl-jax train --algo mine.py trains it", capsys.readouterr().out)
    for algo in (name, "mine.py"):
        steps = str(12 * given["num_envs"] * given["unroll_length"])
        options = ["--algo", algo, "--env", env, "--out", f"of-{algo}", "--total-steps", steps, "--eval-episodes", "0"]
        assert cli.main(["train", *options, "--hidden-sizes", "8", "--progress", "none", *flags]) == 0
    mine, original = msrl.Result.load("of-mine.py"), msrl.Result.load(f"of-{name}")
    assert type(mine.experiment.algorithm).__name__ == "Mine" and mine.history["step"][-1] == int(steps)
    assert_same_state(jax.tree.leaves(mine.state), jax.tree.leaves(original.state))
    for column in set(original.history) - {"seconds", "steps_per_second"}:
        np.testing.assert_array_equal(mine.history[column], original.history[column], err_msg=column)


@pytest.mark.slow
def test_a_run_of_a_file_goes_on_from_anywhere(folder, monkeypatch, capsys):
    algorithms.copy("ppo", "my_ppo.py")
    common = {"total_steps": 64 * 12, "chunk": 3, "eval_episodes": 0, "progress": False} | PPO
    common["anneal_learning_rate"] = False
    whole = msrl.train("my_ppo.py", ENV, policy="SingleLearnerCoarse", devices=jax.devices()[:4], **common)
    assert pickle.loads(pickle.dumps(whole.experiment.algorithm)) == whole.experiment.algorithm
    msrl.train("my_ppo.py:MyPPO", ENV, out="run", callbacks=[stop_after(6)], **common)
    assert json.loads((folder / "run/config.json").read_text())["class"] == f"{folder}/my_ppo.py:MyPPO"
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    forget()
    again = msrl.train(resume="../run", policy="MultiLearner", devices=jax.devices()[:4], eval_episodes=0, progress=False)
    assert type(again.experiment.algorithm) is not type(whole.experiment.algorithm)  # the file was run again
    for x, y in zip(jax.tree.leaves(again.state.params), jax.tree.leaves(whole.state.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=1e-5)
    # The file may move into the working directory, or be given again.
    forget()
    shutil.move(folder / "my_ppo.py", "my_ppo.py")
    assert cli.main(["evaluate", "../run", "--episodes", "2"]) == 0
    forget()
    (folder / "other").mkdir()
    shutil.move("my_ppo.py", folder / "other")
    capsys.readouterr()
    assert cli.main(["evaluate", "../run", "--episodes", "2"]) == 2
    assert "my_ppo.py cannot be read: there is no such file; give the path" in capsys.readouterr().err
    longer = ["--out", "../run", "--total-steps", str(64 * 14), "--eval-episodes", "0", "--progress", "none"]
    assert cli.main(["train", "--resume", "--algo", "../other/my_ppo.py", *longer]) == 0


def forget():
    """Forgets the file `my_ppo.py`, as a new process does."""
    ALGORITHMS.pop("my_ppo")
    sys.modules.pop("my_ppo")


@pytest.mark.slow
def test_members_populations_and_sweeps_of_a_file(folder):
    algorithms.copy("ppo", "my_ppo.py")
    common = {"total_steps": 64 * 4, "eval_episodes": 0, "progress": False} | PPO
    rates = [1e-3, 1e-2]
    mine, original = (msrl.train(a, ENV, learning_rate=rates, **common) for a in ("my_ppo.py", "ppo"))
    assert_same_state(jax.tree.leaves(mine.state), jax.tree.leaves(original.state))
    pbt = "members=2,every=2,learning_rate=log_uniform:1e-3:1e-2"
    mine, original = (msrl.train(a, ENV, pbt=pbt, **common) for a in ("my_ppo.py", "ppo"))
    assert_same_state(jax.tree.leaves(mine.state), jax.tree.leaves(original.state))
    swept = msrl.sweep("my_ppo.py", ENV, method="grid", learning_rate=rates, out="sweep", **common)
    assert f"--algo {folder}/my_ppo.py:MyPPO" in swept.command()


def test_a_changed_file_is_run_again(folder):
    path = algorithms.copy("ppo", "my_ppo.py")
    before = algorithms.get("my_ppo.py")
    assert algorithms.get(str(path.absolute())) is before is algorithms.get("my_ppo.py:MyPPO") is algorithms.get("my_ppo")
    path.write_text(path.read_text().replace("default=3e-3", "default=2e-3"))
    assert algorithms.get("my_ppo.py")().learning_rate == 2e-3 and before().learning_rate == 3e-3
    path.write_text("import nothing_like_it\n")
    with pytest.raises(ValueError, match=r"my_ppo.py, line 1: ModuleNotFoundError: No module named 'nothing_like_it'"):
        algorithms.get("my_ppo.py")


def test_a_file_is_the_module_that_a_program_has_imported(folder, monkeypatch):
    algorithms.copy("ppo", "my_ppo.py")
    monkeypatch.syspath_prepend(folder)
    module = importlib.import_module("my_ppo")
    assert algorithms.get("my_ppo.py") is module.MyPPO
    (folder / "json.py").write_text((folder / "my_ppo.py").read_text().replace("my_ppo", "my_json").replace("MyPPO", "MyJSON"))
    own = algorithms.get("json.py")
    assert own.__name__ == "MyJSON" and sys.modules["json"] is json is not sys.modules[own.__module__]


@pytest.mark.parametrize(
    ("algorithm", "file", "message"),
    [
        ("poo", "x.py", r"unknown algorithm 'poo' \(did you mean 'ppo'\?\)"),
        ("ppo", "x", r"x does not end in \.py; name a file such as my_ppo\.py"),
        ("ppo", "my-ppo.py", r"'my-ppo' cannot be a name in Python"),
        ("ppo", "class.py", r"'class' cannot be a name in Python"),
        ("ppo", "DQN.py", r"an algorithm named 'DQN' is registered already"),
        ("ppo", "gone/x.py", r"there is no folder gone; make it first"),
        ("ppo", "taken.py", r"taken\.py exists; name another file, or delete it first"),
        ("ppo", "agent.py", r"the class would be Agent, and the file has that already"),
    ],
)
def test_what_cannot_be_copied(folder, capsys, algorithm, file, message):
    (folder / "taken.py").write_text("")
    assert cli.main(["copy", algorithm, file]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert [path.name for path in folder.iterdir()] == ["taken.py"]


CONFIG = """
@msrl_jax.algorithms.config("{0}")
class {1}:
    def build(self, env):
        return env
"""


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gone.py", None, r"gone\.py cannot be read: there is no such file"),
        ("own.py", "x = 1", r"own\.py has no config; decorate a class"),
        ("own.py", "x = 1\ny = (", r"own\.py, line 2: SyntaxError: '\(' was never closed"),
        (
            "own.py",
            "import msrl_jax" + CONFIG.format("a", "A") + CONFIG.format("b", "B"),
            r"A, B; say which: own\.py:A",
        ),
        ("own.py:Walk", "import msrl_jax" + CONFIG.format("a", "Talk"), r"no config 'Walk' \(did you mean 'Talk'\?\)"),
        ("own.py", "import msrl_jax" + CONFIG.format("ppo", "A"), r"named 'ppo' is registered already; choose another name"),
    ],
)
def test_what_is_no_file_of_an_algorithm(folder, name, text, message):
    if text is not None:
        (folder / "own.py").write_text(text)
    with pytest.raises(ValueError, match=message):
        algorithms.get(name)


def test_names_of_classes():
    names = {"my_ppo": "MyPPO", "ppo2": "PPO2", "fast_ppo_v2": "FastPPOV2", "clipped": "Clipped", "_x9_y": "X9Y"}
    assert {name: copying.named("ppo", "PPO", name) for name in names} == names
    assert copying.named("apex_dqn", "ApexDQN", "my_apex_dqn") == "MyApexDQN"


def test_long_names_are_split_over_lines_and_short_ones_joined():
    long = copying.text_of("ippo", "x", "ANameOfAnAlgorithmThatIsLong")
    assert (
        """
def _centralized_network(
    observation_space: Space, action_space: Space, state_size: int, config: ANameOfAnAlgorithmThatIsLong
) -> RecurrentNetwork:
"""
        in long
    )
    split = copying.Definition("", "f", "def f(\n    config: ANameOfAnAlgorithm\n) -> int:\n    return 1")
    assert copying.renamed(split, "ANameOfAnAlgorithm", "A") == "def f(config: A) -> int:\n    return 1"


def test_a_file_may_be_the_algorithm_of_a_team(folder):
    algorithms.copy("ippo", "my_ippo.py")
    teams = algorithms.make("teams", {"teams": {"a": "my_ippo.py:learning_rate=3e-4", "b": "ippo"}}).teams
    assert teams == (f"a={folder}/my_ippo.py:MyIPPO:learning_rate=0.0003", "b=ippo")
    assert algorithms.make("teams", {"teams": teams}).teams == teams


def test_no_field_has_the_name_of_an_argument_of_train():
    parameters = inspect.signature(msrl.train).parameters.values()
    assert {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} == OF_RUNS
    with pytest.raises(TypeError, match=r"has the field 'total_steps', but that is an argument of msrl\.train"):

        @config("counting")
        class Counting:
            total_steps: int = algorithms.field(default=1, doc="steps.")

            def build(self, env):
                return env


@pytest.fixture
def bare(folder):
    """The arguments of a run of a config without fields."""
    path = algorithms.copy("ppo", "base.py")
    path.write_text(path.read_text() + CONFIG.format("bare", "Bare").replace("msrl_jax.algorithms.", "")
                    .replace("return env", "return Base(**SIZES).build(env)") + f"\n\nSIZES = {PPO}\n")  # fmt: skip
    return ["--algo", "base.py:Bare", "--env", ENV, "--total-steps", "256", "--progress", "none"]


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
        cli.main(["train", "--algo", "base.py:Bare", "--help"])
