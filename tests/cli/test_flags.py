"""Flags: the fields of commands and of configs, and how their values are read."""

import dataclasses
import re

import pytest

from msrl_jax import algorithms, cli
from msrl_jax.algorithms import PPO
from msrl_jax.cli import flags, main
from msrl_jax.cli.commands import Sweep, Train
from msrl_jax.cli.flags import parse


@pytest.mark.parametrize(("text", "number"), [("1e6", 1_000_000), ("250_000", 250_000), ("6.4e1", 64), ("8.0", 8)])
def test_whole_numbers_may_be_written_as_floats(text, number):
    args, config = parse("train", Train, ["--total-steps", text, "--num-envs", text])
    assert parse("train", Train, ["--hidden-sizes", f"{text},8", "9"])[1] == {"hidden_sizes": (number, 8, 9)}
    assert args.total_steps == number and config == {"num_envs": number} and type(config["num_envs"]) is int



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
    _, config = parse("train", Train, ["--algo", "teams", "--teams", *teams, "--num-envs", "8"])
    assert config == {"teams": teams, "num_envs": 8}


def test_a_flag_that_equals_its_default_was_given():
    default = algorithms.get("ppo")()
    flags = ["--learning-rate", str(default.learning_rate), "--no-normalize-rewards", "--hidden-sizes", "8", "9"]
    assert parse("train", Train, flags)[1] == {
        "learning_rate": default.learning_rate, "normalize_rewards": False, "hidden_sizes": (8, 9),
    }  # fmt: skip



def test_help_of_several_algorithms_names_their_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--algo", "dqn", "ppo", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    rates = [algorithms.get(algo)().learning_rate for algo in ("dqn", "ppo")]
    assert f"(default: {rates[0]} of dqn, {rates[1]} of ppo)" in text and "(default: each algorithm's own)" in text



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
    def parsed(*words):
        return flags.parse("msrl-jax sweep", Sweep, words)[1]

    assert parsed("--hidden-sizes", "64", "64,128", "--activation", "relu,tanh") == {
        "hidden_sizes": [(64, 64), (128,)], "activation": ["relu", "tanh"],
    }  # fmt: skip
    assert parsed("--hidden-sizes", "64", "64", "--activation", "relu") == {"hidden_sizes": (64, 64), "activation": "relu"}
    for words, message in (
        (["--activation", "relu,gelub"], "'gelub' is not one of tanh, relu"),
        (["--hidden-sizes", "64,6x"], "'6x' is not a whole number"),
        (["--hidden-sizes", "64,"], "'64,' has an empty value"),
    ):
        assert cli.main(["sweep", *words]) == 2 and message in capsys.readouterr().err



def test_several_numbers_of_a_flag_are_several_members(capsys):
    _, config = flags.parse("msrl-jax train", Train, ["--learning-rate", "1e-4,3e-4", "--clip-value", "None"])
    assert config == {"learning_rate": (1e-4, 3e-4), "clip_value": None}
    assert cli.main(["train", "--learning-rate", "1e-4,x"]) == 2 and "--learning-rate" in capsys.readouterr().err

