"""A2C, IMPALA and A3C solve CartPole with their defaults, IMPALA also with actors that lag behind."""

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.experiment.spec import make_experiment

pytestmark = pytest.mark.slow

SEEDS = 6


def final_returns(name, total_steps, policy="GPUOnly", **parameters):
    """Mean return of the episodes that ended in the last tenth of training. `[SEEDS]`"""
    experiment = make_experiment(name, total_steps=total_steps, seeds=SEEDS)
    program, length = experiment.compile(msrl.policies.get(policy, **parameters), jax.devices()[:2]), experiment.iterations
    _, metrics = program.run(experiment.start(program), length)
    assert np.all(metrics["parameter_age"][-1] == parameters.get("staleness", 0))
    return metrics["episode_return"][-(length // 10) :].mean(axis=0)


@pytest.mark.parametrize(("name", "total_steps"), [("a2c", 500_000), ("impala", 500_000), ("a3c", 750_000)])
def test_defaults_solve_cartpole_on_five_of_six_seeds(name, total_steps):
    assert (final_returns(name, total_steps) >= 475).sum() >= 5


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_impala_solves_cartpole_with_actors_that_lag_behind(staleness):
    returns = final_returns("impala", 500_000, "SingleLearnerCoarse", staleness=staleness)
    assert (returns >= 475).sum() >= 5
