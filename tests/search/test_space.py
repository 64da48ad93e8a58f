"""What a sweep tries: fields with several values, the values of trials, and the rungs of successive halving."""

import math

import numpy as np
import pytest

from msrl_jax import envs
from msrl_jax.algorithms import IQL, PPO, CustomNetworks
from msrl_jax.search.space import Trial, choose_trials, ranked, read_axes, rung_steps, survivors


def axes_of(**fields):
    return read_axes(PPO, fields)[0]


@pytest.mark.parametrize(
    ("value", "kind", "numbers"),
    [
        ("log:1e-4:1e-2", "log_uniform", (1e-4, 1e-2)),
        ("uniform:0.9:1", "uniform", (0.9, 1)),
        ("1e-4,3e-4", "choice", (1e-4, 3e-4)),
        ("choice:1e-4:3e-4", "choice", (1e-4, 3e-4)),
        ([1e-4, 3e-4], "choice", (1e-4, 3e-4)),
        (np.array([0.25, 0.5]), "choice", (0.25, 0.5)),
        (envs.log_uniform(1e-4, 1e-2), "log_uniform", (1e-4, 1e-2)),
    ],
    ids=["log", "uniform", "comma", "choice", "list", "array", "object"],
)
def test_a_field_is_swept_as_text_a_list_or_a_distribution(value, kind, numbers):
    (axis,) = axes_of(learning_rate=value)
    assert (axis.values.kind, axis.values.numbers) == (kind, numbers)


def test_a_field_of_sequences_is_swept_by_a_list_of_them():
    axes, constants = read_axes(PPO, {"hidden_sizes": [[8], (8, 8)], "activation": ["tanh", "relu"]})
    assert [axis.values.numbers for axis in axes] == [((8,), (8, 8)), ("tanh", "relu")] and constants == {}
    _, constants = read_axes(PPO, {"hidden_sizes": [8, 8], "activation": "tanh", "gae_lambda": [0.5]})
    assert constants == {"hidden_sizes": [8, 8], "activation": "tanh"}


def test_an_option_may_be_no_value():
    (axis,) = axes_of(clip_value="None,0.2")
    assert (axis.values.kind, axis.values.numbers) == ("choice", (None, 0.2))


def test_integers_stay_integers():
    (axis,) = axes_of(num_envs="uniform:4:6")
    drawn = [axis.at(u) for u in (0.0, 0.32, 0.34, 0.66, 0.67, 0.9999)]
    assert drawn == [4, 4, 5, 5, 6, 6] and {type(x) for x in drawn} == {int}
    (axis,) = axes_of(num_envs="log:8:64")
    assert axis.points(4) == [8, 16, 32, 64] and {type(x) for x in axis.points(4)} == {int}
    assert {axis.at(0.0), axis.at(0.9999)} == {8, 64}
    assert axes_of(num_envs="8,1e3")[0].points(None) == [8, 1000]


def test_a_grid_has_all_combinations():
    axes = axes_of(learning_rate="log:1e-4:1e-2", num_envs=[8, 16])
    chosen = choose_trials(axes, "grid", 3, 0)
    np.testing.assert_allclose([row["learning_rate"] for row in chosen], np.repeat([1e-4, 1e-3, 1e-2], 2))
    assert [row["num_envs"] for row in chosen] == [8, 16] * 3


@pytest.mark.parametrize("method", ["random", "sobol"])
def test_values_lie_within_bounds_and_follow_the_seed(method):
    axes = axes_of(learning_rate="log:1e-4:1e-2", gae_lambda=envs.uniform(0.9, 1.0))
    chosen = choose_trials(axes, method, 256, 0)
    rates, lambdas = (np.array([row[name] for row in chosen]) for name in ("learning_rate", "gae_lambda"))
    assert (rates >= 1e-4).all() and (rates <= 1e-2).all() and (lambdas >= 0.9).all() and (lambdas <= 1.0).all()
    assert 100 <= (rates < 1e-3).sum() <= 156, "half of them lie in each decade"
    assert chosen == choose_trials(axes, method, 256, 0) != choose_trials(axes, method, 256, 1)


def test_sobol_points_have_one_value_in_each_interval():
    chosen = choose_trials(axes_of(learning_rate="uniform:0:16", gae_lambda="uniform:0:1"), "sobol", 16, 5)
    assert sorted(int(row["learning_rate"]) for row in chosen) == list(range(16))
    assert sorted(int(16 * row["gae_lambda"]) for row in chosen) == list(range(16))


def test_rungs_by_hand():
    assert rung_steps(900, 3, None, 9, 10) == [100, 300, 900]
    assert rung_steps(900, 3, None, 9, 200) == [300, 900]
    assert rung_steps(900, 3, 300, 9, 10) == [300, 900]
    assert rung_steps(1000, 3, 50, 9, 10) == [50, 150, 450, 1000]
    trials = [Trial(i, {}, 0, returns=(x,)) for i, x in enumerate([1.0, math.nan, 5.0, 3.0, 4.0])]
    assert [t.number for t in survivors(trials, 2)] == [2, 3, 4]
    assert [t.number for t in survivors(trials[:2], 1)] == [0]


@pytest.mark.parametrize(
    "whole", [CustomNetworks("nets:actor", "nets:critic", "nets:value"), CustomNetworks((len, max), (len, max))]
)
def test_networks_with_their_last_layers_are_one_value(whole):
    axes, constants = read_axes(IQL, {"network": whole, "critic.expectile": [0.7, 0.9]})
    assert [axis.field for axis in axes] == ["critic.expectile"] and constants == {"network": whole}


def test_a_list_with_functions_is_a_list():
    axes, _ = read_axes(IQL, {"network": ["mlp", len], "learning_rate": [1e-3, abs]})
    assert [axis.values.numbers for axis in axes] == [("mlp", len), (1e-3, abs)]


def test_trials_that_went_further_rank_before_those_that_were_dropped():
    """Whatever their returns; then the higher return, nan last, and then the lower number. One was never trained."""
    found = [(9.0, 0), (1.0, 1), (4.0, 2), (9.0, 0), (math.nan, 1), (3.0, 2), (math.nan, 0), (2.0, 1)]
    trials = [Trial(i, {}, 0, returns=(x,), rung=rung) for i, (x, rung) in enumerate(found)]
    assert [trial.rank for trial in ranked([*trials, Trial(8, {}, 0)])] == [6, 4, 1, 7, 5, 2, 8, 3, None]
