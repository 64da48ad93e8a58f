"""An experiment is checked when it is made, whoever makes it."""

import dataclasses

import jax
import numpy as np
import pytest

from msrl_jax import envs
from msrl_jax.algorithms import PPO
from msrl_jax.run import Experiment
from msrl_jax.run.experiment.check_metrics import RESERVED, check_metrics
from msrl_jax.run.experiment.plain_data import difference
from tests.support.random_walk import RandomWalk


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"algorithm": "ppo"}, "give a config, such as PPO"),
        ({"algorithm": type("Sub", (PPO,), {})()}, "Sub is a subclass of the config PPO"),
        ({"settings": {"learning_rat": (1e-3, 1e-2)}}, "has 'learning_rat'; members of PPO can differ in learning_rate"),
        ({"settings": {"learning_rate": (1e-3, -1e-2)}}, r"PPO\.learning_rate=-0\.01: use a finite number above 0"),
        ({"settings": {"learning_rate": (1e-3,), "discount": (0.9, 0.99)}}, "the same number of values"),
        ({"guard": "skp"}, r"guard='skp' \(did you mean 'skip'\?\)"),
        ({"seed": 2**33}, "a seed has 32 bits"),
        ({"total_steps": "512"}, "total_steps='512': use an integer"),
        ({"pbt": "members=4"}, "give a PBT"),
    ],
)
def test_what_cannot_be_run_is_refused(given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Experiment(**{"algorithm": PPO(), **given})


def test_environments_are_compared_by_what_they_show():
    given = ["CartPole-v1", *(envs.TimeLimit(envs.make("CartPole-v1"), steps) for steps in (10, 20))]
    named, short, long = (Experiment(algorithm=PPO(), env=env).to_json() for env in given)
    assert difference(short, short) is None and difference(short, long)[0] == "env_object"
    assert difference(named, long)[0] == "env_object"
    assert difference(short | {"env_object": None}, long) is None  # of before, when GymnaxEnvironment did not show what it is


LOST = [
    *((name, 1.0) for name in RESERVED),
    ("waves", np.complex64(1j)),
    ("note", "good"),
    ("nothing", None),
    ("tree", {"loss": 1.0}),
    ("key", jax.random.key(0)),
]


@pytest.mark.parametrize(("metric", "value"), LOST)
def test_metrics_that_would_be_lost_are_refused(metric, value):
    agent = PPO(num_envs=8, unroll_length=8, hidden_sizes=(4,)).build(RandomWalk())
    loud = check_metrics(dataclasses.replace(agent, iteration=lambda state, progress: (state, {metric: value})), "own")
    with pytest.raises((TypeError, ValueError), match=f"'own' reports the metric '{metric}'"):
        loud.iteration(None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps_per_iteration": 0}, "'own': Agent.steps_per_iteration=0: use an integer of at least 1"),
        ({"steps_per_iteration": 1.5}, "Agent.steps_per_iteration=1.5"),
        ({"updates_per_iteration": -1}, "Agent.updates_per_iteration=-1: use an integer of at least 0"),
        ({"iteration": lambda state, progress: state}, "its iteration returns a .*return .state, metrics."),
        ({"iteration": lambda state, progress: (state, 1.0)}, "its iteration returns a tuple"),
    ],
)
def test_agents_of_wrong_numbers_or_results_are_refused(change, message):
    agent = dataclasses.replace(PPO(num_envs=8, unroll_length=8, hidden_sizes=(4,)).build(RandomWalk()), **change)
    with pytest.raises((TypeError, ValueError), match=message):
        check_metrics(agent, "own").iteration(None, None)
