"""Weak scaling on paper: with environments that grow with the devices, what each device receives and holds stays the same."""

import jax
import numpy as np
import pytest

from msrl_jax.training.scaling import format_markdown, format_table, plans
from msrl_jax.training.setup import resolve

SMALL = {"unroll_length": 4, "hidden_sizes": (16,)}
DEVICES = ("cpu:1", "cpu:2", "cpu:4", "cpu:8")


def scaled(policy, devices=DEVICES, **others):
    return [row.to_dict() for row in plans("a2c", "CartPole-v1", policy, devices, 4, **SMALL | others)]


def parameters():
    agent = resolve("a2c", "CartPole-v1", overrides=SMALL).behavior.agent
    shapes = jax.eval_shape(agent.init, jax.random.key(0)).params
    return 4 * sum(x.size for x in jax.tree.leaves(shapes))


def test_together_each_device_reduces_one_gradient_however_many_there_are():
    one, *more = scaled("GPUOnly")
    assert one["bytes_of_collectives"] == {"all": 0} and one["bytes_arriving"] == {"all": 0}
    assert [row["num_envs"] for row in more] == [8, 16, 32]
    for row in more:
        assert row["bytes_of_collectives"] == more[0]["bytes_of_collectives"] and row["collectives"] == more[0]["collectives"]
        assert row["bytes_arriving"] == {"all": 0}
        np.testing.assert_allclose(row["memory"]["all"], one["memory"]["all"], rtol=0.1)
    assert parameters() <= more[0]["bytes_of_collectives"]["all"] <= parameters() + 100


def test_apart_each_actor_receives_the_parameters_and_each_learner_the_steps_of_its_environments():
    rows = scaled("SingleLearnerCoarse:learners={half}", ["cpu:2", "cpu:8"])
    assert [row["sizes"] for row in rows] == [{"actors": n, "learners": n} for n in (1, 4)]
    for row in rows:
        assert row["bytes_arriving"] == rows[0]["bytes_arriving"]
    assert parameters() <= rows[0]["bytes_arriving"]["actors"] <= parameters() + 16
    (one,) = plans("a2c", "CartPole-v1", "SingleLearnerCoarse", ["cpu:8"], 4, **SMALL)
    arriving = one.to_dict()["bytes_arriving"]
    assert arriving["actors"] == rows[0]["bytes_arriving"]["actors"]
    assert arriving["learners"] > 3.5 * rows[0]["bytes_arriving"]["learners"]  # one learner receives the steps of all


def test_a_split_server_holds_less_on_each_device():
    policies = [f"Central:workers=4,shards={shards}" for shards in (1, 4)]
    whole, part = (scaled(policy, ["cpu:8"], hidden_sizes=(64, 64))[0]["memory"]["server"] for policy in policies)
    assert whole / 4.5 < part < whole / 3


def test_the_tables_show_every_placement():
    rows = plans("a2c", "CartPole-v1", "SingleLearnerCoarse", ["cpu:2"], 4, **SMALL)
    for text in (format_table(rows), format_markdown(rows)):
        assert all(word in text for word in ("SingleLearnerCoarse", "cpu:2", "actors", "learners", "KiB"))


def test_two_numbers_of_environments_are_refused():
    with pytest.raises(ValueError, match="num_envs and envs_per_device both choose"):
        plans("a2c", "CartPole-v1", "GPUOnly", ["cpu:1"], 4, num_envs=8)
