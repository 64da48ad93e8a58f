"""Runs with networks of a user's own: what their folders say, and how they go on."""

import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.run.prepare import make_experiment
from tests.support.modules import FORMS, Linen
from tests.support.runs import assert_same_state

ENV, STEPS = "CartPole-v1:max_steps_in_episode=30", 4 * 64
SMALL = {"num_envs": 8, "unroll_length": 8, "num_epochs": 1, "num_minibatches": 2, "hidden_sizes": (6,)}
NAME = "tests.support.modules:nnx_module"


@pytest.fixture
def train(one_device):
    def train(**options):
        about = {"devices": one_device, "progress": False, "eval_episodes": 0, "chunk": 1}
        return msrl.train(**({"algo": "ppo", "env": ENV, "total_steps": STEPS} | SMALL | about | options))

    return train


def half(tick):
    return tick.step >= STEPS // 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [(FORMS["nnx"], None), (FORMS["linen"], Linen()), (NAME, FORMS["nnx"])],
    ids=["object", "object given again", "name"],
)
def test_a_run_goes_on_exactly_with_its_module(first, then, train, one_device, tmp_path):
    whole = train(network=first)
    train(network=first, out=tmp_path / "run", callbacks=[half])
    again = {"trust": True} if then is None else {"network": then}
    resumed = msrl.train(resume=tmp_path / "run", devices=one_device, progress=False, **again)
    assert resumed.status == "finished"
    assert_same_state(resumed.state, whole.state)
    loaded = msrl.Result.load(tmp_path / "run", **again)
    obs = np.ones(4, np.float32)
    assert loaded.act(obs) == whole.act(obs)
    assert_same_state(loaded.state, whole.state)


def test_networks_with_their_last_layers_are_no_members():
    whole = msrl.algorithms.CustomNetworks(actor="nets:actor", critic=(len, max))
    made = make_experiment("sac", "Pendulum-v1", seeds=2, network=whole, tau=[0.1, 0.2])
    assert made.algorithm.network == whole and made.settings == {"tau": (0.1, 0.2)}
