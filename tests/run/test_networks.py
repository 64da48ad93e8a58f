"""Runs with networks of a user's own: what their folders say, and how they go on."""

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.cli import main
from msrl_jax.run.experiment.plain_data import RunFolderError
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


@pytest.mark.slow
def test_a_module_without_a_name_has_to_be_given_again(train, tmp_path):
    train(network=Linen(width=5), out=tmp_path / "run", callbacks=[half])
    with pytest.raises(RunFolderError, match=r"has a network object \(Linen.*pass it again: network=\.\.\."):
        msrl.Result.load(tmp_path / "run")
    with pytest.raises(RunFolderError, match="cannot resume with network="):
        msrl.train(resume=tmp_path / "run", progress=False, network=Linen(width=6))
    with pytest.raises(RunFolderError, match="cannot resume with network='mlp'"):
        msrl.train(resume=tmp_path / "run", progress=False, network="mlp")


@pytest.mark.slow
def test_the_command_line_takes_a_module_by_its_name(tmp_path, capsys):
    sizes = ["--num-envs", "8", "--unroll-length", "8", "--num-epochs", "1", "--num-minibatches", "2", "--hidden-sizes", "6"]
    words = ["train", "--env", ENV, "--total-steps", str(STEPS), "--eval-episodes", "0", "--progress", "none", *sizes]
    out = tmp_path / "run"
    assert main([*words, "--network", NAME, "--out", str(out)]) == 0
    loaded = msrl.Result.load(out, trust=True)
    assert loaded.experiment == make_experiment("ppo", ENV, total_steps=STEPS, **SMALL | {"network": NAME})
    given = make_experiment("ppo", ENV, **SMALL | {"network": FORMS["nnx"]}).behavior.state_type.params
    assert jax.tree.map(np.shape, loaded.state.params) == jax.tree.map(np.shape, given)
    assert main(["evaluate", str(out), "--episodes", "4", "--trust"]) == 0
    assert main([*words, "--network", "mpl"]) == 2
    assert "PPO.network='mpl': use 'mlp'" in capsys.readouterr().err
    assert main([*words, "--network", "tests.support.modules:nothing"]) == 2
    assert "has no attribute 'nothing'" in capsys.readouterr().err


def test_networks_with_their_last_layers_are_no_members():
    whole = msrl.algorithms.CustomNetworks(actor="nets:actor", critic=(len, max))
    made = make_experiment("sac", "Pendulum-v1", seeds=2, network=whole, tau=[0.1, 0.2])
    assert made.algorithm.network == whole and made.settings == {"tau": (0.1, 0.2)}
