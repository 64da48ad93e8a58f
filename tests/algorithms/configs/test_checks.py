"""Configs and the registry refuse bad input before anything compiles, with a remedy."""

import dataclasses
import math

import pytest
from msrl_jax.algorithms.configs.base import field_docs

from msrl_jax import algorithms
from msrl_jax.algorithms import PPOConfig

from ..many_agents import Homes
from ..random_walk import RandomWalk


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("num_envs", 0, "an integer of at least 1"),
        ("num_envs", 4.0, "an integer of at least 1"),
        ("num_envs", None, "an integer of at least 1"),
        ("num_epochs", True, "an integer of at least 1"),
        ("total_steps", -1, "an integer of at least 1"),
        ("learning_rate", 0.0, "a finite number above 0"),
        ("learning_rate", math.nan, "a finite number above 0"),
        ("learning_rate", "fast", "a finite number above 0"),
        ("max_grad_norm", math.inf, "a finite number above 0"),
        ("clip_value", -1.0, "a finite number above 0"),
        ("target_kl", 0.0, "a finite number above 0"),
        ("discount", 1.01, "a finite number at least 0 and at most 1"),
        ("gae_lambda", -0.1, "a finite number at least 0 and at most 1"),
        ("entropy_coef", -0.01, "a finite number at least 0"),
        ("normalize_advantage", True, r"one of \['batch', 'minibatch', 'none'\]"),
        ("normalize_advantage", "minibatches", "use 'minibatch'"),
        ("normalize_rewards", 1, "True or False"),
        ("hidden_sizes", [64, 64], r"a tuple of positive integers, such as \(64, 64\)"),
        ("hidden_sizes", (64, 0), "a tuple of positive integers"),
        ("activation", "tahn", "use 'tanh'"),
        ("network", "transformer", r"one of \['auto', 'cnn', 'mlp'\]"),
    ],
)
def test_a_bad_field_is_named_with_its_value_and_a_remedy(field, value, remedy):
    with pytest.raises(ValueError, match=rf"PPOConfig\.{field}=.*: use .*{remedy}|PPOConfig\.{field}=.*{remedy}"):
        PPOConfig(**{field: value})


FIELDS = [(name, f.name) for name, algorithm in algorithms.ALGORITHMS.items() for f in dataclasses.fields(algorithm.config)]


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_every_field_of_every_algorithm_is_checked(name, field):
    config = algorithms.get(name).config
    with pytest.raises(ValueError, match=rf"{config.__name__}\.{field}=<object.*>: use "):
        config(**{field: object()})


def test_minibatches_must_divide_the_unroll():
    with pytest.raises(ValueError, match=r"unroll_length=10 .* num_minibatches=4 .* unroll_length=12"):
        PPOConfig(unroll_length=10, num_minibatches=4)


# The learning rates of these fall by default, if it is known over how many steps.
UNANNEALED = ("dqn", "apex_dqn", "r2d2", "qmix", "vdn", "bc", "cql", "iql", "self_play")


@pytest.mark.parametrize("name", [n for n, field in FIELDS if field == "anneal_learning_rate" and n not in UNANNEALED])
def test_annealing_needs_a_horizon(name):
    algorithm = algorithms.get(name)
    with pytest.raises(ValueError, match=rf"{algorithm.config.__name__}\.anneal_learning_rate needs total_steps"):
        algorithm.build(Homes() if algorithm.many_agents else RandomWalk(), algorithm.config(anneal_learning_rate=True))


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_every_field_is_documented_with_its_usual_value(name):
    config = algorithms.get(name).config
    texts = field_docs(config)
    assert list(texts) == [field.name for field in dataclasses.fields(config)]
    assert [field for field, text in texts.items() if "Usual: " not in text] == ["total_steps"]


def test_unknown_algorithms_suggest_the_nearest():
    assert algorithms.get("ppo") is algorithms.ALGORITHMS["ppo"]
    with pytest.raises(ValueError, match=r"unknown algorithm 'pppo' \(did you mean 'ppo'\?\); choose from"):
        algorithms.get("pppo")
    with pytest.raises(ValueError, match=r"choose from a2c.* ppo,"):
        algorithms.get("zzz")


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="'ppo' is registered already"):
        algorithms.register(dataclasses.replace(algorithms.PPO, config=int))
