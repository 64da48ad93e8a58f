"""Config files: they say what a command line says, mistakes are one line, and `run.toml` of a folder repeats its run."""

import contextlib
import dataclasses
import re

import jax
import pytest

from msrl_jax import PBT, Experiment, Result, algorithms, envs, train
from msrl_jax.algorithms import PPO
from msrl_jax.cli import main
from msrl_jax.cli.command import parse
from msrl_jax.cli.commands import COMMANDS, TRAIN
from msrl_jax.cli.options import OptionGroup
from msrl_jax.configs.names import all_fields, value_of
from msrl_jax.run.disk.run_toml import repeating
from msrl_jax.run.prepare import make_experiment
from tests.support.runs import assert_same_run
from tests.support.slow import mostly_slow

TINY = {"num_envs": 8, "unroll_length": 8, "num_epochs": 1, "num_minibatches": 2, "hidden_sizes": (8,)}
PLACE = {
    "policy": "GPUOnly",
    "eval_episodes": 2,
    "eval_every": None,
    "chunk": None,
    "rollbacks": [],
    "devices": {"platform": "cpu", "count": 1, "processes": 1},
}


def parsed(command, *words):
    """What a command gets."""
    return parse(f"msrl-jax {command}", COMMANDS[command], words).values


def split(given):
    """The arguments of `train` in what the command gets, and the fields of the config."""
    known = {option.name for option in OptionGroup(TRAIN).options()} | COMMANDS["train"].options().keys()
    return tuple({name: x for name, x in given.items() if (name in known) == own} for own in (True, False))


def experiment_of(file, *words):
    """The experiment that `train --config` computes."""
    options, fields = split(parsed("train", "--config", str(file), *words))
    names = [f.name for f in dataclasses.fields(Experiment) if options.get(f.name) is not None]
    return make_experiment(options["algo"], **fields, **{name: options[name] for name in names})


def changed(config):
    """Values of fields that are not their defaults and fit each other."""
    found = {}
    for name in all_fields(config):
        value = value_of(config, name)
        for new in (not value,) if isinstance(value, bool) else (0.25, 0.5, 1.0, 8, 16, 2, 0, None, (8, 9), "relu", "batch"):
            with contextlib.suppress(ValueError, TypeError):
                if name != "data" and value_of(algorithms.make(config, found | {name: new}), name) != value:
                    found[name] = new
                    break
    return found


def flag(name, value):
    """The words of a field of a config."""
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]


@pytest.mark.parametrize("algo", mostly_slow(algorithms.names(), "ppo", "sac", "teams"))
def test_a_printed_file_is_the_command_line(algo, tmp_path, capsys):
    config = algorithms.get(algo)()
    others = {} if algo == "teams" else changed(config)
    assert len(others) >= 4 or algo == "teams"
    teams = ["--teams", "adversary=mappo:learning_rate=7e-4", "agent=ippo"] if algo == "teams" else []
    words = ["--algo", algo, "--seed", "3", "--total-steps", "1e6", "--guard", "skip", "--out", "a 'b'", *teams]
    words += [word for name, value in others.items() for word in flag(name, value)]
    expected = parsed("train", *words)
    assert expected.keys() >= others.keys() and main(["train", *words, "--print-config"]) == 0
    file = tmp_path / "run.toml"
    file.write_text(capsys.readouterr().out)
    found = parsed("train", "--config", str(file))
    assert found == expected | {"config": file}
    assert main(["train", "--config", str(file), "--print-config"]) == 0 and capsys.readouterr().out == file.read_text()
    # Everything that can be said is in the file, with its line of text; what has its default is a comment.
    named = re.findall(r"^#?\"?([\w.]+)\"? = ", file.read_text(), re.MULTILINE)
    options, fields = COMMANDS["train"].options(), all_fields(type(config))
    assert {*named, "recipe", "trust", "config", "print_config"} == {*options, *fields} and len(named) == len(set(named))
    (file.parent / "all.toml").write_text(re.sub(r"^#(\w+ = )", r"\1", file.read_text(), flags=re.MULTILINE))
    uncommented, _ = split(parsed("train", "--config", str(file.parent / "all.toml")))
    usual = {name: option.default for name, option in options.items()} | {"config": file.parent / "all.toml"}
    assert uncommented == {name: (usual | expected)[name] for name in uncommented}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train", ["--learning-rate", "1e-4,3e-4", "--policy", "SingleLearnerCoarse:learners=2", "--clip-value", "None"]),
        ("train", ["--learning-rate", "1e-4,", "--no-normalize-rewards", "--checkpoint-every", "1000", "--processes", "2"]),
        ("train", ["--pbt", "members=4,every=2,learning_rate=log_uniform:1e-5:1e-2", "--network", "a.nets:Mine", "--trust"]),
        ("sweep", ["--learning-rate", "log:1e-4:1e-2", "--hidden-sizes", "64,64", "128", "--activation", "relu,tanh"]),
        ("sweep", ["--num-envs", "8,16", "--method", "grid", "--halving", "3", "--hidden-sizes", "8,8"]),
        ("explain", ["--algo", "sac", "--devices", "tpu:v5e:8x8", "gpu:h100:8", "--envs-per-device", "4", "--json"]),
        ("bench", ["--algo", "dqn", "ppo", "--num-envs", "8", "16", "--learning-rate", "1e-3", "--against", "jit"]),
        ("compete", ["board", "--fresh", "0.5", "--rounds", "3"]),
        ("evaluate", ["--checkpoint", "7", "my run", "--episodes", "4"]),
        ("record", ["run", "--steps", "100", "--out", "x.npz", "--epsilon", "0.1"]),
        ("check-env", ["CartPole-v1", "--steps", "7"]),
    ],
)
def test_every_command_reads_its_file(command, words, tmp_path, capsys):
    assert main([command, *words, "--print-config"]) == 0
    (tmp_path / "a.toml").write_text(capsys.readouterr().out)
    trust = ["--trust"] if "--trust" in words else []
    found = parsed(command, "--config", str(tmp_path / "a.toml"), *trust)
    assert found.pop("config") == tmp_path / "a.toml" and found == parsed(command, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learning-rate", "1e-3,-1"], "member 1 (learning_rate=-1): PPO.learning_rate=-1.0: use a finite number above 0"),
        (["--algo", "sac", "--burn-in", "2"], "SAC.burn_in has no effect without a core; leave it out"),
        (["--pbt", "members=1,learning_rate=uniform:1e-4:1e-3"], "PBT.members=1: use an integer of at least 2"),
        (["--policy", "GPUOnlyy"], "GPUOnly"),
    ],
)
def test_only_a_file_that_would_train_is_printed(words, message, capsys):
    assert main(["train", *words, "--print-config"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and message in printed.err and printed.err.count("\n") == 1


def test_flags_win(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('algo = "dqn"\nlearning-rate = 1e-3 # a comment\ntarget = "double"\nhidden_sizes = [\n  8,\n]\nseed = 5\n')
    options, fields = split(parsed("train", f"--config={file}", "--seed", "7", "--target", "greedy", "--hidden-sizes", "4"))
    assert (options["algo"], options["seed"]) == ("dqn", 7)
    assert fields == {"learning_rate": 1e-3, "target": "greedy", "hidden_sizes": (4,)}
    file.write_text('run = "there"\nepisodes = 3\n')
    assert str(parsed("evaluate", "--config", str(file))["run"]) == "there"
    found = parsed("evaluate", "here", "--config", str(file))
    assert (str(found["run"]), found["episodes"]) == ("here", 3)


MISTAKES = [
    ("lerning_rate = 3", "line 1: unknown key 'lerning_rate' (did you mean 'learning_rate'?)"),
    ("seed = 1\ndata = 'x.npz'", "line 2: unknown key 'data', which is one of apex_dqn, bc,"),
    ("env = CartPole-v1", "line 1: bad TOML (Invalid value); write key = value, with text in double quotes"),
    ("seed = 1\nnum_envs = 7\nseed = 2", "line 3: seed is given twice, first in line 1"),
    ("\n# one\nseed = 1.5", "line 3: seed is '1.5', which is not a whole number"),
    ("learning_rate = nan", "line 1: learning_rate is nan; use a finite number"),
    ("seed = 1\nlearning_rate = -1.0", "line 2: PPO.learning_rate=-1.0: use a finite number above 0"),
    ("learning_rate = [1e-3, -1.0]", "line 1: member 1 (learning_rate=-1)"),
    ("[ppo]\nlearning_rate = 1", "line 2: unknown key 'ppo.learning_rate'"),
    ("seed.x = 1", "line 1: unknown key 'seed.x'"),
    ('algo = "dqn"\nexploration.base = 2', "line 2: DQN.exploration.base=2: exploration is annealed, which has no base"),
    ('target = "greedy"\ntarget.scale = 1', 'line 2: target has a value and parts; write "target.scale" = ..., in quotes'),
    ('target.scale = 1\ntarget = "greedy"', 'line 2: target has a value and parts; write "target.scale" = ..., in quotes'),
    ('algo = "dqn"\nreplay.n_step = 0', "line 2: DQN.replay.n_step=0: use an integer of at least 1"),
    ("seed = [1, 2]", "line 1: seed takes one value; [1, 2] is an array; give one value; msrl-jax sweep"),
    ("hidden_sizes = []", "line 1: hidden_sizes is an empty array"),
    ('hidden_sizes = ["--seed"]', "line 1: PPO.hidden_sizes=('--seed',): use a tuple of positive integers"),
    ("total_steps = 2020-01-01", "line 1: total_steps is a date or time (2020-01-01)"),
    ("normalize_rewards = 1", "line 1: normalize_rewards is 1; use true or false"),
    ("out = 3", "line 1: out is the number 3; write text in double quotes"),
    ('out = "a\\u0000"', "line 1: out has a character that cannot be printed"),
    ("num_envs = 8\nnum_minibatches = 7", "line 2: PPO.unroll_length=128 cannot be split into num_minibatches=7"),
    ('config = "b.toml"', "line 1: config belongs on the command line"),
    ('env = {object = "Mine()"}', "line 1: env was an object (Mine()), which a file cannot hold; name one with --env"),
    ("a = " + "[" * 5000, "too many brackets"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[text[:30] for text, _ in MISTAKES])
def test_a_mistake_in_a_file_is_one_line(text, message, capsys, tmp_path, monkeypatch):
    (tmp_path / "a.toml").write_text(text + "\n")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    monkeypatch.setattr(jax, "jit", lambda *args, **kwargs: pytest.fail("something is compiled"))
    assert main(["train", "--config", "../a.toml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(("msrl-jax: error: ../a.toml, ", "msrl-jax: error: --config ../a.toml ")) and message in line
    assert list((tmp_path / "there").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config"], "--config needs a file"),
        (["--config", "nothere"], "--config nothere: the file does not exist"),
        (["--config", "folder"], "--config folder is a folder; give a file, such as folder/run.toml"),
        (["--config", "binary"], "--config binary is not UTF-8 text"),
        (["--config", "a.toml", "--config", "a.toml"], "--config is given 2 times"),
        (["--confg", "a.toml"], "did you mean '--config'?"),
        (["--config", "a.toml", "--seed", "x"], "error: --seed is 'x', which is not a whole number"),
    ],
)
def test_a_mistake_about_a_file_is_one_line(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(b"seed = \xff\xfe")
    (tmp_path / "a.toml").write_text("seed = 1\n")
    assert main(["train", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_an_empty_file_says_nothing(tmp_path):
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbf# nothing\r\n")
    assert parsed("train", "--config", str(tmp_path / "a.toml")).keys() == {"config"}


def test_help_names_the_file_once(capsys):
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert capsys.readouterr().out.count("--config ") == 1
    assert main(["--help"]) == 0 and capsys.readouterr().out.count("--config") == 1


SEARCH = {"learning_rate": envs.log_uniform(1e-5, 1e-2), "entropy_coef": envs.choice([0.0, 0.01])}
EXPERIMENTS = {
    "members": {"learning_rate": [1e-4, 3e-4], "discount": [0.9, 0.95], "seeds": 3, "max_grad_norm": 0.1, "seed": 5},
    "one setting": {"learning_rate": [1e-4]},
    "population": {"pbt": PBT(SEARCH, members=4, every=2, explore="resample")},
    "population from given values": {"pbt": PBT(SEARCH, members=2), "learning_rate": [1e-3, 1e-4]},
    "a metric": {"env": "tests.support.measured:Measured", "rank_by": "place"},
    "parameters": {"env": "CartPole-v1:max_steps_in_episode=30", "env_params": {"length": envs.uniform(0.25, 1), "gravity": 9}},
    "schedules": {"learning_rate": "cosine:3e-4,warmup=0.1", "entropy_coef": "linear:0.01"},
    "a rate that adapts": {"algo": "ppo_rnd", "learning_rate": "kl:0.01", "intrinsic_coef": 0.25},
    "an own optimizer": {"optimizer": "tests.support.transformations:falling"},
    "an optimizer of optax": {"optimizer": "adamw:weight_decay=0.1"},
    "critics": {"algo": "sac", "env": "Pendulum-v1", "returns": "tqc", "num_critics": 3},
    "replay": {"algo": "dqn", "replay": "replay:priorities=prioritized(beta=None)"},
}


OWN = ("a metric", "an own optimizer")  # which name code of the user's


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_file_of_a_run_is_its_experiment(name, tmp_path):
    given = dict(EXPERIMENTS[name])
    options = {key: given.pop(key) for key in ("algo", "env", "env_params", "seed", "seeds", "pbt", "rank_by") if key in given}
    small = {"num_envs": 8} if "algo" in options else TINY
    experiment = make_experiment(**options, **small | given, guard="skip", total_steps=10_000)
    (tmp_path / "run.toml").write_text(repeating(experiment, experiment.to_json() | PLACE))
    trust = ["--trust"] if name in OWN else []
    again = experiment_of(tmp_path / "run.toml", *trust)
    assert again.difference(experiment) is None and again.settings == experiment.settings
    assert dataclasses.replace(again, env_params=None) == dataclasses.replace(experiment, env_params=None)
    assert again.to_json() == experiment.to_json()


@pytest.mark.parametrize("algo", mostly_slow(algorithms.names(), "bc", "dqn", "recurrent_ppo", "teams"))
def test_the_file_of_a_run_has_every_field_of_every_algorithm(algo, tmp_path):
    teams = {"teams": {"adversary": "mappo:learning_rate=7e-4", "agent": "ippo"}} if algo == "teams" else {}
    data = {"data": str(tmp_path / "nothere.npz")} if algo in ("bc", "cql", "iql") else {}
    config = algorithms.make(algo, {"num_envs": 16} | teams if "num_envs" in vars(algorithms.get(algo)()) else data)
    experiment = Experiment(algorithm=config)
    about = experiment._plain_data() | {"data": {"path": data.get("data"), "sha256": ""}} | PLACE
    (tmp_path / "run.toml").write_text(repeating(experiment, about))
    options, fields = split(parsed("train", "--config", str(tmp_path / "run.toml")))
    assert algorithms.make(options["algo"], fields) == config
    assert fields.keys() == {f.name for f in dataclasses.fields(config)}


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (("cpu", 1, 1), (None, None)),
        (("cpu", 8, 1), (8, None)),
        (("cpu", 2, 2), (None, 2)),
        (("cpu", 8, 2), (4, 2)),
        (("gpu", 8, 1), (None, None)),
    ],
)
def test_the_file_of_a_run_asks_for_as_many_cpu_devices(devices, options, tmp_path):
    experiment = Experiment(algorithm=PPO(**TINY))
    about = dict(zip(("platform", "count", "processes"), devices, strict=True))
    (tmp_path / "run.toml").write_text(repeating(experiment, experiment.to_json() | PLACE | {"devices": about}))
    found = parsed("train", "--config", str(tmp_path / "run.toml"))
    assert (found.get("cpu_devices"), found.get("processes")) == options


def test_rates_are_those_before_rollbacks(tmp_path):
    experiment = make_experiment(**{**TINY, "learning_rate": 3e-4})
    halved = experiment.replaced(algorithm=dataclasses.replace(experiment.algorithm, learning_rate=3e-4 / 4))
    (tmp_path / "run.toml").write_text(repeating(halved, halved.to_json() | PLACE | {"rollbacks": [{}, {}]}))
    assert experiment_of(tmp_path / "run.toml") == experiment


@pytest.mark.slow
def test_the_file_in_a_folder_repeats_the_run(tmp_path, capsys):
    first = train(
        PPO(**TINY),
        "CartPole-v1",
        learning_rate=[1e-3, 3e-3],
        seed=2,
        total_steps=512,
        policy="GPUOnly:num_devices=1",
        env_params="length=uniform:0.25:1",
        eval_episodes=2,
        chunk=4,
        out=tmp_path / "first",
        progress=False,
    )
    file = tmp_path / "first" / "run.toml"
    assert main(["train", "--config", str(file), "--out", str(tmp_path / "second"), "--progress", "none"]) == 0
    second = Result.load(tmp_path / "second")
    assert second.experiment.difference(first.experiment) is None
    assert_same_run(second, first)
    assert (tmp_path / "second" / "run.toml").read_text() == file.read_text()
    second.save(tmp_path / "third")
    assert (tmp_path / "third" / "run.toml").read_text() == file.read_text()


@pytest.mark.long
def test_an_object_has_no_place_in_a_file(tmp_path, capsys):
    env = envs.make("CartPole-v1")
    train(
        PPO(**TINY), env, total_steps=64, policy="GPUOnly:num_devices=1", eval_episodes=0, out=tmp_path / "run", progress=False
    )
    file = tmp_path / "run" / "run.toml"
    assert main(["train", "--config", str(file), "--out", str(tmp_path / "again")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(
        r"run\.toml, line \d+: env was an object \(.*CartPole.*\), which a file cannot hold; name one with --env", line
    )
    assert experiment_of(file, "--env", "CartPole-v1") == Experiment(algorithm=PPO(**TINY), total_steps=64)
