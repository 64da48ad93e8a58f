"""A copy of an algorithm is its file under another name: the same algorithm, until you change it."""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import algorithms, cli
from msrl_jax.run.prepare import make_experiment
from tests.support.runs import ENV, RUNS, assert_same_state
from tests.support.slow import mostly_slow
from tests.support.transitions import noise

STOCK = algorithms.names()
COPIED = [name for name in STOCK if not name.endswith("_rnd")]  # a function makes the others
CONTINUOUS = ("td3", "ddpg", "sac")
PPO = RUNS["ppo"][2]
CONFIG = """
@msrl_jax.algorithms.config("{0}")
class {1}:
    def build(self, env):
        return env
"""


def initial(algorithm, name):
    """The shapes of the state at the start of a run."""
    kind = algorithms.get(algorithm)
    game = "pgx:tic_tac_toe" if name == "alphazero" else "KuhnPoker"
    env = game if kind.multi_agent else "Pendulum-v1" if name in CONTINUOUS else "CartPole-v1"
    given = {"data": noise(msrl.envs.make(env))} if kind.offline else {}
    given |= {"teams": "player_0=ippo player_1=random"} if name == "teams" else {}
    experiment = make_experiment(algorithm, env, **given)
    assert experiment.environment is not None, "it is made outside of the trace"
    state = jax.eval_shape(experiment.initial_state)
    return [(x.shape, str(x.dtype)) for x in jax.tree.leaves(state)]


@pytest.mark.parametrize("name", mostly_slow(COPIED, "apex_dqn", "cql", "mappo", "recurrent_ppo", "teams"))
def test_every_algorithm_can_be_copied_and_builds(folder, name):
    algorithms.copy(name, "mine.py")
    copy, original = algorithms.get("mine.py"), algorithms.get(name)
    assert set(algorithms.names()) == {*STOCK, "mine"}  # and no variant, or what it is one of
    assert copy is not original and copy.name == "mine"
    facts = lambda kind: [(f.name, repr(f.default), f.metadata) for f in dataclasses.fields(kind)]
    assert facts(copy) == facts(original)
    assert inspect.getdoc(copy) == inspect.getdoc(original)
    for fact in ("__name__", "multi_agent", "offline", "privileged"):
        assert getattr(copy, fact) == getattr(original, fact)
    assert initial("mine.py", name) == initial(name, name)


def test_copies_are_clean(folder):
    for name in COPIED:
        algorithms.copy(name, f"our_{name}.py")
    root = Path(msrl.__file__).parents[1]
    # Without the names of variants, an import may fit on one line; it may also stay on several.
    lines = ["--config", "lint.isort.split-on-trailing-comma=true", "--config", "format.skip-magic-trailing-comma=false"]
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "--config", root / "pyproject.toml", *lines, folder]
        done = subprocess.run(ruff, cwd=root, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param("ppo", PPO, marks=pytest.mark.long),
        pytest.param("apex_dqn", {k: x for k, x in RUNS["dqn"][2].items() if k != "n_step"}, marks=pytest.mark.slow),
    ],
)
def test_from_the_command_line_a_copy_trains_the_same_bits(folder, name, config, capsys):
    flags = [
        f"--{'' if value is not False else 'no-'}{key.replace('_', '-')}" + f"={value}" * (not isinstance(value, bool))
        for key, value in config.items()
        if key != "hidden_sizes"
    ]
    assert cli.main(["copy", name, "mine.py"]) == 0
    assert re.search(rf"mine.py has {name} in \d+ lines; train it with msrl-jax train --algo mine.py", capsys.readouterr().out)
    steps = str(12 * config["num_envs"] * config["unroll_length"])
    for algo in (name, "mine.py"):
        options = ["--algo", algo, "--env", ENV, "--out", f"of-{algo}", "--total-steps", steps, "--eval-episodes", "0"]
        assert cli.main(["train", *options, "--hidden-sizes", "8", "--progress", "none", *flags]) == 0
    mine, original = msrl.Result.load("of-mine.py"), msrl.Result.load(f"of-{name}")
    assert mine.experiment.algorithm.name == "mine" and mine.history["step"][-1] == int(steps)
    assert_same_state(jax.tree.leaves(mine.state), jax.tree.leaves(original.state))
    for column in set(original.history) - {"seconds", "steps_per_second"}:
        np.testing.assert_array_equal(mine.history[column], original.history[column], err_msg=column)


@pytest.mark.slow
def test_members_populations_and_sweeps_of_a_copy(folder):
    algorithms.copy("ppo", "my_ppo.py")
    common = {"total_steps": 64 * 4, "eval_episodes": 0, "progress": False} | PPO
    rates = [1e-3, 1e-2]
    for more in ({"learning_rate": rates}, {"pbt": "members=2,every=2,learning_rate=log_uniform:1e-3:1e-2"}):
        mine, original = (msrl.train(a, ENV, **more, **common) for a in ("my_ppo.py", "ppo"))
        assert_same_state(jax.tree.leaves(mine.state), jax.tree.leaves(original.state))
    swept = msrl.sweep("my_ppo.py", ENV, method="grid", learning_rate=rates, out="sweep", **common)
    assert f"--algo {folder}/my_ppo.py:PPO" in swept.command()


def test_a_file_of_ones_own_can_be_copied_and_so_can_a_copy(folder):
    own = folder / "own.py"
    own.write_text("import msrl_jax\n\nTEXT = 'own, änderung'\n" + CONFIG.format("own", "Own"), "utf-8")
    algorithms.copy("own.py", "second.py")
    third = algorithms.copy("second.py", "third.py").read_text("utf-8")
    start = f"# A copy of `second` of {folder}/second.py.\n# A copy of `own` of {own}.\n"
    assert third == start + own.read_text("utf-8").replace('"own"', '"third"')
    assert algorithms.get("third.py").name == "third"


@pytest.mark.parametrize(
    ("algorithm", "file", "message"),
    [
        ("poo", "x.py", r"unknown algorithm 'poo' \(did you mean 'ppo'\?\)"),
        ("ppo", "x", r"x does not end in \.py; name a file such as my_ppo\.py"),
        ("ppo", "my-ppo.py", r"'my-ppo' cannot be a name in Python"),
        ("ppo", "class.py", r"'class' cannot be a name in Python"),
        ("ppo", "DQN.py", r"an algorithm named 'DQN' is registered already"),
        ("ppo", "gone/x.py", r"the folder gone does not exist; create it first"),
        ("ppo", "taken.py", r"taken\.py exists; name another file, or delete it first"),
        ("taken.py:B", "x.py", r"taken\.py has the config A too, which a copy would register again; move it to another file"),
        ("hidden.py", "x.py", r"the config make\.<locals>\.A is not in a file, as in a notebook; write it to a file"),
        ("named.py", "x.py", r"named\.py has no decorator with the name 'a1'; write @config\('a1'\) before the class A"),
    ],
)
def test_what_cannot_be_copied(folder, capsys, algorithm, file, message):
    files = {
        "taken.py": CONFIG.format("a", "A") + CONFIG.format("b", "B"),
        "hidden.py": "def make():" + CONFIG.format("a", "A").replace("\n", "\n    ") + "return A\n\nA = make()",
        "named.py": CONFIG.format("a1", "A").replace('"a1"', "'a' + '1'"),
    }
    for name, text in files.items():
        (folder / name).write_text("import msrl_jax\n" + text)
    assert cli.main(["copy", algorithm, file]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert {path.name for path in folder.glob("*.py")} == set(files)
