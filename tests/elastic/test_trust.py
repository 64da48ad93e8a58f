"""What a learner names to an actor, or the folder of its run, is imported on the user's word alone; a link misleads no log."""

import json
import shutil
import sys

import pytest

import msrl_jax as msrl
from msrl_jax import algorithms
from msrl_jax.cli import main
from msrl_jax.elastic import actor, replay_arrivals
from msrl_jax.elastic.unroll_log import FILE
from msrl_jax.fragments.support.naming import TrustError
from msrl_jax.run import Experiment
from msrl_jax.run.experiment.plain_data import RunFolderError

EVIL = "import pathlib\npathlib.Path('MARK').touch()"
TOUCH = "os:system:command='touch MARK'"


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path, monkeypatch):
    """`evil.py` is where the commands run, and is not imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(EVIL)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    yield
    assert not (tmp_path / "MARK").exists() and "evil" not in sys.modules


@pytest.mark.parametrize("trust", [True, False])
def test_the_command_passes_the_users_trust_on(trust, monkeypatch):
    asked = []

    def noted(where, actor, limit, say):
        asked.append(actor.trust)
        return 3

    monkeypatch.setattr(actor, "_act_for_learner", noted)
    assert main(["act", "127.0.0.1:7000", *["--trust"] * trust]) == 0 and asked == [trust]


def test_a_learner_names_no_code_to_an_actor():
    class Learner:
        def __init__(self, said):
            self.said, self.heard = said, []

        def send(self, header, arrays=()):
            self.heard.append(header)

        def receive(self, payload=0):
            return {"run": "a", "codec": None, "experiment": self.said}, memoryview(b"")

    whole = Experiment(algorithm=algorithms.PPO(), env="CartPole-v1").to_json()
    for said in ({**whole, "env_spec": TOUCH}, {**whole, "class": "evil.py", "algorithm": "evil"}):
        learner = Learner(said)
        with pytest.raises(TrustError, match="the learner names code to run"):
            actor._Actor(None, trust=False).enter(learner)
        assert "the learner names code to run" in learner.heard[-1]["cannot"]
    for said in ({}, {**whole, "config": [1]}, {**whole, "env_spec": 5}, {**whole, "settings": {"learning_rate": 3}}, [], None):
        with pytest.raises(RunFolderError, match="cannot read the config of the learner"):
            actor._Actor(None, trust=False).enter(Learner(said))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    tiny = {"num_envs": 4, "unroll_length": 16, "hidden_sizes": (4,)}
    msrl.train("impala", total_steps=64, eval_episodes=0, out=folder, progress=False, policy="GPUOnly:num_devices=1", **tiny)
    return folder


def test_a_replay_runs_nothing(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    config = json.loads((trained / "config.json").read_text())
    (tmp_path / "run" / "config.json").write_text(json.dumps(config | {"env_spec": "evil:Env"}))
    (tmp_path / "run" / FILE).write_text(json.dumps({"run": "a"}) + "\n" + json.dumps({"begins": 0}) + "\n")
    with pytest.raises(TrustError, match="names code to run, env='evil:Env'"):
        replay_arrivals("run")


@pytest.mark.filterwarnings("ignore:total_steps changes")
def test_no_link_leads_the_log_of_a_run_elsewhere(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "run" / FILE).symlink_to(tmp_path / "notes")
    with pytest.raises(RunFolderError, match=rf"{FILE} is a symbolic link"):
        msrl.train(resume="run", total_steps=128, actors_at="127.0.0.1:7000", policy="SingleLearnerCoarse", progress=False)
    assert (tmp_path / "notes").read_text() == "mine"
