"""What a folder or a file names is imported only on the user's word, and called only if it is of the right kind."""

import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import algorithms, envs, policies
from msrl_jax.agents.schedules import read_schedule as read_schedule
from msrl_jax.cli import main
from msrl_jax.envs.base import close_simulators
from msrl_jax.fragments.support import naming
from msrl_jax.fragments.support.naming import TrustError
from msrl_jax.networks.custom_core import as_core
from msrl_jax.networks.modules import as_network
from msrl_jax.registry import code_names, resolve
from msrl_jax.run import Experiment, Result
from msrl_jax.run.disk import checkpoint, folder
from msrl_jax.run.experiment.plain_data import RunFolderError, fingerprint

EVIL = """
import pathlib
pathlib.Path("MARK").touch()
def opt(): pathlib.Path("MARK").touch()
"""
TOUCH = "os:system:command='touch MARK'"
PLACES = {
    "env, a command": {"env_spec": TOUCH},
    "env, a module": {"env_spec": "evil:Env"},
    "env, a function that is no environment": {"env_spec": "gymnax:make:env_id='CartPole-v1'"},
    "env, a program": {"env_spec": "envpool:D1Basic-v1:vzd_path='./evil.sh'"},
    "env, a file that names a program": {"env_spec": "envpool:D1Basic-v1:cfg_path='evil.cfg'"},
    "env, a file to write": {"env_spec": "envpool:D1Basic-v1:game_args='+logfile MARK'"},
    "env, a pickle": {"env_spec": "jaxmarl:jaxnav:map_id='Grid-Buffer',map_params={'map_size':(7,7),'dir_path':'.'}"},
    "algo, a file": {"algorithm": "evil", "class": "evil.py:Evil"},
    "algo, a module": {"algorithm": "evil", "class": "evil:Evil"},
    "algo, as if it were ours": {"algorithm": "evil.py", "class": "msrl_jax.algorithms.evil:Evil"},
    "optimizer": {"config": {"optimizer": "evil:opt"}},
    "network": {"config": {"network": "evil:opt"}},
    "learning_rate": {"config": {"learning_rate": "evil:opt"}},
    "settings": {"settings": {"learning_rate": ["evil:opt"]}},
    "core": {"algorithm": "recurrent_ppo", "config": {"core": "evil:opt"}},
    "teams": {"algorithm": "teams", "config": {"teams": ["agent=ippo:optimizer='evil:opt'"]}},
    "teams, a file": {"algorithm": "teams", "config": {"teams": ["agent=evil.py:Evil:agents=a|b"]}},
}
LOADING = (
    ["evaluate", "run"],
    ["export", "run", "policy.jaxexport"],
    ["record", "run", "--steps", "8", "--out", "a.npz"],
    ["video", "run"],
    ["train", "--out", "run", "--resume"],
    ["profile", "--run", "run"],
    ["report", "run", "--plans"],
)


@pytest.fixture
def sent(copy, tmp_path, monkeypatch):
    """A run that somebody sent, whose sums are right whatever its settings are; `evil.py` is where it is looked at."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(EVIL)
    monkeypatch.delitem(sys.modules, "evil", raising=False)

    def send(**changes):
        config = json.loads((copy / "config.json").read_text())
        config |= changes | {"config": config["config"] | changes.get("config", {})}
        (copy / "config.json").write_text(json.dumps(config))
        for saved in checkpoint.complete_checkpoints(copy):
            seal = json.loads((saved.path / "run.json").read_text())
            seal["progress"]["settings"] = fingerprint(config)
            (saved.path / "run.json").write_text(json.dumps(seal | {"sum": checkpoint._seal_checksum(seal)}))
        return copy

    yield send
    assert not (tmp_path / "MARK").exists() and "evil" not in sys.modules


def one_line(words, capsys):
    """The only line of a refused command."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2, words
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == "" and line.startswith("msrl-jax: error: "), words
    return line


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_somebody_sent_runs_nothing(place, sent, capsys):
    sent(**PLACES[place])
    # Every command reads a folder the same way, so they take turns; one place meets all of them.
    commands = LOADING if place == "env, a module" else [LOADING[list(PLACES).index(place) % len(LOADING)]]
    for words in commands:
        line = one_line(words, capsys)
        assert "run names code to run" in line and "--trust" in line, line
    if place == "settings":  # what the user gives instead of a field does not stand for its settings
        with pytest.raises(RunFolderError, match="cannot read the config"):
            Result.load("run", learning_rate=lambda progress: 1e-3)
    with pytest.raises(TrustError, match=rf"{place.partition(',')[0].replace('settings', 'learning_rate').split()[0]}="):
        Result.load("run")


def test_a_page_and_a_plot_need_no_environment(sent, capsys):
    run = sent(env_spec=TOUCH, policy="evil:Policy", algorithm="evil", **{"class": "evil.py:Evil"})
    assert main(["report", str(run), "--out", "a.html"]) == 0 and "evil on CartPole-v1" in (run.parent / "a.html").read_text()
    assert main(["plot", str(run), "--out", "a.svg"]) == 0
    assert "run names code to run, policy='evil:Policy'" in one_line(["report", sent(**ours()), "--plans"], capsys)


@pytest.mark.parametrize(
    "changes",
    [
        {"seeds": 2**60},
        {"seeds": 2**19, "settings": {"discount": [0.9] * 9}},
        {"settings": {"a": 3}},
        {"devices": 3},
        {"pbt": {"a": 1}},
    ],
    ids=str,
)
def test_what_a_page_cannot_tell_is_damage_in_one_line(changes, sent, capsys):
    sent(**changes)
    assert "run/config.json does not describe a run" in one_line(["report", "run"], capsys)


def ours():
    return {"env_spec": "CartPole-v1:max_steps_in_episode=30", "algorithm": "ppo", "class": "msrl_jax.algorithms.ppo:PPO"}


def test_a_policy_of_a_folder_is_imported_by_nobody(sent, capsys):
    sent(policy="evil:Policy")
    assert "names code to run, policy='evil:Policy'" in one_line(["train", "--out", "run", "--resume"], capsys)
    assert "names code to run, policy='evil:Policy'" in one_line(["profile", "--run", "run"], capsys)


FILES = [
    ("train", 'env = "evil:Env"'),
    ("train", f'env = "{TOUCH}"'),
    ("train", 'algo = "evil.py"'),
    ("train", 'policy = "evil:P"'),
    ("train", 'learning_rate = "evil:opt"'),
    ("train", 'algo = "recurrent_ppo"\ncore = "evil:opt"'),
    ("train", 'algo = "teams"\nteams = ["a=ippo", "b=evil.py"]'),
    ("sweep", 'network = "auto,evil:opt"'),
    ("explain", 'beside = ["GPUOnly", "evil:P"]'),
    ("bench", 'algo = ["ppo", "evil.py"]'),
    ("profile", 'algo = "evil:Evil"'),
    ("compete", 'leaderboard = "board"\nenv = "evil:Env"'),
    ("check-env", 'env = "evil:Env"'),
    ("copy", 'algorithm = "evil.py"\nfile = "b.py"'),
    ("reproduce", 'names = ["ppo-cartpole"]\npolicy = "evil:P"'),
]


@pytest.mark.parametrize(("command", "text"), FILES)
def test_a_config_file_that_somebody_sent_runs_nothing(command, text, sent, tmp_path, capsys):
    (tmp_path / "a.toml").write_text(text)
    assert "a.toml names code to run" in one_line([command, "--config", "a.toml"], capsys)


def test_what_flags_give_in_place_of_a_file_needs_no_trust(sent, tmp_path, capsys):
    (tmp_path / "a.toml").write_text('env = "evil:Env"\noptimizer = "evil:opt"\ntotal_steps = "many"')
    words = ["train", "--config", "a.toml", "--env", "CartPole-v1"]
    assert "names code to run, optimizer=" in one_line(words, capsys)
    assert "a.toml, line 3: total_steps is 'many'" in one_line([*words, "--optimizer", "adam"], capsys)


def test_no_file_trusts_itself(sent, tmp_path, capsys):
    (tmp_path / "a.toml").write_text('trust = true\nenv = "evil:Env"')
    assert "names code to run" in one_line(["train", "--config", "a.toml"], capsys)
    (tmp_path / "a.toml").write_text("trust = true")
    assert "a config file cannot set it" in one_line(["train", "--config", "a.toml"], capsys)


def test_what_the_user_types_needs_no_trust(sent, tmp_path, capsys):
    config = {"optimizer": "tests.support.transformations:falling", "anneal_learning_rate": False}
    run = sent(env_spec="tests.support.corridor:Corridor", config=config)
    with pytest.raises(TrustError, match="if you trust its author"):
        Result.load(run, env="tests.support.corridor:Corridor")  # the optimizer is the folder's word
    with pytest.raises(TrustError, match=r"names code to run, env='.*', optimizer='.*pass env and optimizer again"):
        Result.load(run, trust="no")  # type: ignore[arg-type]
    description = json.loads((run / "config.json").read_text())
    given = {"env": "tests.support.corridor:Corridor", "optimizer": "tests.support.transformations:falling"}
    typed = Experiment.from_json(description, **given)
    assert typed == Experiment.from_json(description, trust=True)
    assert Experiment.from_json(description, **{k: x for k, x in typed.objects.items() if x is not None}) == typed


@pytest.mark.parametrize("trust", [["--trust"], []])
def test_with_trust_the_kind_is_checked_before_a_call(trust, sent, tmp_path, capsys):
    code = f"import pathlib\nfrom os import system\n{EVIL.splitlines()[-1]}\nclass Thing: pass\n"
    (tmp_path / "kinds.py").write_text(code)
    for path, message in {
        "os:system": "is in Python's standard library",
        "kinds:system": "is in Python's standard library",
        "kinds:opt": "annotate what it returns: def opt(...) -> ...",
        "kinds:Thing": "is not an environment",
        "kinds:pathlib": "is not an environment",
        "builtins:print": "is in Python's standard library",
    }.items():
        words = ["check-env", path] if not trust else ["evaluate", sent(env_spec=path), *trust]
        assert message in one_line(words, capsys)


MINE = """
import gymnasium, numpy as np
from msrl_jax.envs import GymnasiumEnvironment
class Cart(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    def reset(self, seed=None, options=None): return np.ones(2, np.float32), {}
    def step(self, action): return np.ones(2, np.float32), 0.0, False, False, {}
def make() -> GymnasiumEnvironment: return GymnasiumEnvironment(Cart)
"""


@pytest.mark.long
def test_processes_that_this_one_starts_import_nothing_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # as that of msrl-jax
    (tmp_path / "mine.py").write_text(MINE)
    for name in ("enum", "numpy", "jax"):
        (tmp_path / f"{name}.py").write_text("open('MARK', 'w')")
    start = "from msrl_jax.cli.launch import launch; raise SystemExit(launch(['--version'], 1))"
    subprocess.run([sys.executable, "-P", "-c", start], env=os.environ | {"PYTHONPATH": naming.paths()}, check=True)
    for env in ("gymnasium:CartPole-v1", "mine:make"):  # that the user names the second lets workers find its module
        made = envs.make(env).vectorize(1)
        _, obs = made.reset(jax.random.key(0))
        assert np.isfinite(obs).all()
        close_simulators(made)
    assert not (tmp_path / "MARK").exists()


def test_every_command_passes_the_users_trust_on(sent, tmp_path, monkeypatch):
    """What a folder names may run then."""
    sent()
    asked = []

    def noted(*args, trust=False, **options):
        asked.append(trust)
        raise OSError("noted")

    monkeypatch.setattr(Result, "load", noted)
    monkeypatch.setattr(msrl.run, "train", noted)
    for words in LOADING:
        assert main([*words, "--trust"]) == 2 and asked.pop() is True, words


def test_a_module_that_fails_is_told_as_it_is_and_leaves_no_path(tmp_path, monkeypatch):
    """One that lacks another module is there itself; and afterwards modules are not looked for in the working directory."""
    (tmp_path / "lacking.py").write_text("import not_installed_here")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'not_installed_here'$"):
        envs.make("lacking:Env")
    with pytest.raises(ValueError, match=r"env(ironment)? 'lackin:Env': No module named 'lackin'; give MODULE:NAME of"):
        envs.make("lackin:Env")
    assert sys.path == before


def test_what_may_return_something_else_is_not_called():
    def either() -> Experiment | int: ...  # type: ignore[empty-body]
    def both() -> Experiment | Result: ...  # type: ignore[empty-body]

    fits = lambda kind: issubclass(kind, (Experiment, Result))
    assert naming.makes(both, fits) and naming.makes(Result, fits) and not naming.makes(either, fits)


def test_a_data_set_is_no_code_and_tuples_are_read_as_lists_are():
    assert code_names.code_of({"data": "minari:Door", "optimizer": "adam:eps=1e-5"}) == {}
    for kind in (list, tuple):
        assert code_names.code_of({"teams": kind(["a=ippo", "b=evil.py"])}).keys() == {"teams"}
    assert code_names.code_of({"teams": {"a": "ippo", "b": "evil.py"}}).keys() == {"teams"}
    assert code_names.code_of({"teams": {"a": "ippo:optimizer='evil:opt'"}}).keys() == {"teams"}
    for field in ("network", "core", "exploration", "learning_rate"):  # a module may have the name of a kind of schedule
        for text in ("linear:Net", " kl:Net(0.1)", "replay(priorities=cosine:Net())"):
            assert code_names.code_of({field: text}).keys() == {field}
    assert code_names.code_of({"teams": ["a=qmix:exploration=linear:Evil()"]}).keys() == {"teams"}


def test_no_kind_of_name_reaches_the_standard_library():
    def optimizer(name):
        return resolve.objects(algorithms.PPO(optimizer=name))

    for read in (envs.make, policies.get, algorithms.get, as_network, as_core, read_schedule, optimizer):
        for path in ("os:system", "os.path:join", "builtins:exec", "subprocess:Popen"):
            with pytest.raises(ValueError, match="is in Python's standard library"):
                read(path)
        with pytest.raises(ValueError):
            read("..os:system")
    for path in ("os :system", "os:system()", ".os:system", "os:", ":system", "a b:c"):
        assert not naming.is_path(path)


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "run.toml", "checkpoints"])
def test_no_link_leads_what_a_run_writes_elsewhere(name, sent, tmp_path, capsys):
    run = sent()
    (precious := tmp_path / "precious").mkdir()
    (precious / "notes").write_text("mine")
    shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(precious if name == "checkpoints" else precious / "notes")
    one_line(["train", "--out", "run", "--resume", "--progress", "none"], capsys)
    with pytest.raises(RunFolderError, match="is a symbolic link"), folder.locked(run):
        pass
    assert [p.name for p in precious.iterdir()] == ["notes"] and (precious / "notes").read_text() == "mine"


def test_no_link_among_checkpoints_leads_to_those_of_another_run(sent, tmp_path, capsys):
    shutil.copytree(run := sent(), other := tmp_path / "other")
    for saved in checkpoint.complete_checkpoints(run):  # the next save would delete the seals of old ones
        shutil.rmtree(saved.path)
        saved.path.symlink_to(other / "checkpoints" / saved.path.name)
    assert "is a symbolic link" in one_line(["train", "--out", "run", "--resume", "--progress", "none"], capsys)


@pytest.mark.parametrize("name", ["run.toml", "videos/9.gif", "videos"])
def test_no_link_has_a_page_show_another_file(name, sent, tmp_path, capsys):
    run = sent()
    (home := tmp_path / "home").mkdir()
    (home / "9.gif").write_text("secret")
    (run / "run.toml").unlink(missing_ok=True)
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(home if name == "videos" else home / "9.gif")
    assert f"{name} is a symbolic link" in one_line(["report", "run"], capsys)


def test_a_sweep_that_somebody_sent_runs_nothing(sent):
    run = sent(**{"class": "evil.py:Evil"}, algorithm="evil")
    sweep = json.loads((run / "config.json").read_text())
    (run / "sweep.json").write_text(json.dumps({"sweep": sweep}))
    trial = {"number": 0, "program": 0, "values": {}, "returns": [1.0], "run": 0, "member": 0, "steps": 1, "rung": 0}
    (run / "table.json").write_text(json.dumps({"status": "finished", "stop_reason": "", "runs": ["."], "trials": [trial]}))
    found = msrl.SweepResult.load(run)
    assert msrl.SweepResult.load(run, trust=True).trust and not found.trust
    for look in (found.command, found.run):
        with pytest.raises(TrustError, match=r"names code to run, algo='evil\.py:Evil'"):
            look(0)


@pytest.mark.long
def test_an_own_experiment_takes_nothing_from_its_folder(sent, stopped):
    experiment = Result.load(stopped).experiment
    run = sent(env_spec="evil:Env", policy="evil:P")
    here = {"policy": "GPUOnly", "devices": jax.devices()[:1], "progress": False, "eval_episodes": 0}
    done = msrl.train(experiment, resume=run, callbacks=[lambda tick: True], **here)
    assert done.experiment.env == experiment.env
