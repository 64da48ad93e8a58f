"""Flags: the fields of commands and of configs, and how their values are read."""

import dataclasses
import importlib
import inspect
import itertools
import operator
import re

import pytest

import msrl_jax as msrl
from msrl_jax import algorithms, cli
from msrl_jax.algorithms import PPO
from msrl_jax.cli import main
from msrl_jax.cli.command import Output, command, parse
from msrl_jax.cli.commands import COMMANDS
from msrl_jax.cli.options import OptionGroup


def given(command, *words):
    """What the words of a command say."""
    return parse(f"msrl-jax {command}", COMMANDS[command], words).values


@pytest.mark.parametrize(("text", "number"), [("1e6", 1_000_000), ("250_000", 250_000), ("6.4e1", 64), ("8.0", 8)])
def test_whole_numbers_may_be_written_as_floats(text, number):
    assert given("train", "--hidden-sizes", f"{text},8", "9") == {"hidden_sizes": (number, 8, 9)}
    found = given("train", "--total-steps", text, "--num-envs", text)
    assert found == {"total_steps": number, "num_envs": number} and {*map(type, found.values())} == {int}


def test_every_field_of_every_algorithm_is_a_flag(capsys):
    for name in algorithms.names():
        with pytest.raises(SystemExit):
            main(["train", "--algo", name, "--help"])
        text = capsys.readouterr().out
        for field in dataclasses.fields(algorithms.get(name)):
            assert f"--{field.name.replace('_', '-')}" in text, (name, field.name)
            assert f"{{{field.name.replace('_', '-')}:" not in text, (name, field.name, "is a subcommand")


def test_teams_are_texts_of_one_flag():
    teams = ("adversary=mappo:learning_rate=7e-4", "agent=ippo")
    found = given("train", "--algo", "teams", "--teams", *teams, "--num-envs", "8")
    assert found == {"algo": "teams", "teams": teams, "num_envs": 8}


def test_a_flag_that_equals_its_default_was_given():
    default = algorithms.get("ppo")()
    flags = ["--learning-rate", str(default.learning_rate), "--no-normalize-rewards", "--hidden-sizes", "8", "9"]
    assert given("train", *flags) == {
        "learning_rate": default.learning_rate,
        "normalize_rewards": False,
        "hidden_sizes": (8, 9),
    }


def test_help_of_several_algorithms_names_their_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--algo", "dqn", "ppo", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    rates = [algorithms.get(algo)().learning_rate for algo in ("dqn", "ppo")]
    assert f"(default: {rates[0]} of dqn, {rates[1]} of ppo)" in text


def test_help_shows_every_field_of_the_config(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["train", "--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    assert text.count("--total-steps") == 1
    words = re.sub(r"\W+", "", text)  # whatever the lines and the frame of the table
    for field, about in ((f.name, f.metadata["doc"]) for f in dataclasses.fields(PPO)):
        assert f"--{field.replace('_', '-')}" in text
        assert re.sub(r"\W+", "", about) in words, field


def test_words_and_sequences_are_swept_on_the_command_line(capsys):
    assert given("sweep", "--hidden-sizes", "64,64", "128", "--activation", "relu,tanh") == {
        "hidden_sizes": [(64, 64), (128,)],
        "activation": ["relu", "tanh"],
    }
    assert given("sweep", "--hidden-sizes", "64,64", "--activation", "relu") == {"hidden_sizes": (64, 64), "activation": "relu"}
    for words, message in (
        (["--activation", "relu,gelub"], "'gelub', which is not one of tanh, relu"),
        (["--hidden-sizes", "64,6x"], "'64,6x', which is not a whole number"),
    ):
        assert cli.main(["sweep", *words]) == 2 and message in capsys.readouterr().err


def test_several_numbers_of_a_flag_are_several_members():
    found = given("train", "--learning-rate", "1e-4,3e-4", "--discount", "0.9,", "--clip-value", "None")
    assert found == {"learning_rate": (1e-4, 3e-4), "discount": (0.9,), "clip_value": None}


def test_the_options_of_a_command_are_the_arguments_of_its_functions():
    for name in COMMANDS:
        options = COMMANDS[name].options()
        assert all(option.doc and option.name == key for key, option in options.items()), name
        assert {"json", "trust", "config"} <= options.keys() and "callbacks" not in options, name
    train = inspect.signature(msrl.train).parameters
    assert train.keys() - {"devices", "callbacks", "overrides"} <= COMMANDS["train"].options().keys()
    assert COMMANDS["evaluate"].options()["episodes"].default == 128


def test_signatures_that_are_read_from_sources_are_those_of_the_functions():
    parts = [part for command in COMMANDS.values() for part in command.parts if isinstance(part.source, str)]
    assert {"msrl_jax.run.training:train", "msrl_jax.data.rollout:record"} < {part.source for part in parts}
    for part in parts:
        module, _, path = part.source.partition(":")
        real = dataclasses.replace(part, source=operator.attrgetter(path)(importlib.import_module(module)))
        for read, known in itertools.zip_longest(part.options(), real.options()):
            assert dataclasses.replace(read, kind=None) == dataclasses.replace(known, kind=None), part
            shown = [(o.metavar, o.is_flag, o.choices, o.numbers, o.is_sequence) for o in (read, known)]
            assert shown[0] == shown[1], (part, read.name)


def test_values_go_to_every_function_that_takes_them():
    seen = []
    part = OptionGroup(lambda *, seed=0, trust=False: None)

    @command(part, OptionGroup("msrl_jax.run.training:train", only=("algo", "seed")))
    def tried(first, second, *, seed: int = 3) -> Output:
        """Try.

        Args:
          seed: a number.
        """
        seen.append((first, second, seed))
        return Output()

    tried({"seed": 5, "trust": True, "algo": "dqn", "num_envs": 8})
    assert seen == [({"seed": 5, "trust": True}, {"seed": 5, "algo": "dqn", "num_envs": 8}, 5)]
