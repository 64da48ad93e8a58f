"""Offline selection: rank correlations by hand, policies of a run, and the claim that data tell which policy is better."""

import types

import numpy as np
import pytest

from examples import offline_selection as example
from msrl_jax.experiment import FittedQ, OffPolicyEstimate


def policy_of(value):
    """A policy with a known estimate."""
    estimate = OffPolicyEstimate(value, (value - 1, value + 1), np.array([value]), 0.9)
    return types.SimpleNamespace(evaluate=lambda data, settings: estimate)


def test_ranks_by_hand():
    returns = np.array([10.0, 20.0, 30.0, 40.0])
    found = example.ranked([policy_of(v) for v in (1.0, 3.0, 2.0, 4.0)], returns, None, FittedQ())
    assert found["spearman"] == pytest.approx(1 - 6 * 2 / (4 * 15)) and found["selected"] == 40
    assert found["estimates"] == [1, 3, 2, 4] and found["intervals"][1] == (2, 4)
    reversed_ = example.ranked([policy_of(-v) for v in returns], returns, None, FittedQ())
    assert reversed_["spearman"] == -1 and reversed_["selected"] == 10
    studies = [{"env": "CartPole-v1", "seed": 0, "returns": returns.tolist(), "data": dict.fromkeys(example.EPSILON, found)}]
    figure = example.figure(studies)
    assert "CartPole-v1" in figure and figure.count("rank correlation 0.80") == 3


@pytest.mark.long
def test_policies_are_one_run_after_more_and_more_steps():
    task = example.Task("dqn", 640, {"hidden_sizes": (8,), "learning_starts": 256})
    policies = example.make_policies("CartPole-v1", task, 0, number=3)
    assert [int(policy.history["step"][-1]) for policy in policies] == [640, 1280, 1920]
    data = example.make_data(policies, np.array([10.0, 90.0, 50.0]), 300, 0)
    assert data.keys() == example.EPSILON.keys() and all(len(each) == 300 for each in data.values())


@pytest.mark.slow
@pytest.mark.parametrize("env", example.TASKS)
def test_medium_data_rank_policies(env):
    found = example.study(env, 0)
    assert found["data"]["medium"]["spearman"] > 0.7
