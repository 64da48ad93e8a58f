"""A board that somebody sent runs nothing, and leads nowhere else."""

import json
import shutil
import sys

import pytest

from msrl_jax import algorithms
from msrl_jax.run import Experiment
from msrl_jax.run.disk import store
from msrl_jax.run.disk.store import ResumeWarning
from msrl_jax.run.experiment.plain_data import RunFolderError
from msrl_jax.tournament import Leaderboard
from msrl_jax.tournament.worker import _copy_run

DEPLOYED = {
    "format": store.FORMAT,
    "policy": "GPUOnly",
    "eval_episodes": 2,
    "eval_every": None,
    "chunk": None,
    "record": None,
    "rollbacks": [],
    "resumed": [],
}
"""Where a run ran, in its `config.json`."""


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path, monkeypatch):
    """`evil.py` is where the worker runs, and is not imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("import pathlib\npathlib.Path('MARK').touch()")
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    yield
    assert not (tmp_path / "MARK").exists() and "evil" not in sys.modules


def test_a_board_runs_nothing_and_leads_nowhere_else(tmp_path):
    (run := tmp_path / "run").mkdir()
    told = Experiment(algorithm=algorithms.PPO(), env="CartPole-v1").to_json() | DEPLOYED | {"env_spec": "evil:Env"}
    (run / "config.json").write_text(json.dumps(told))
    board = Leaderboard.make(tmp_path / "board", "CartPole-v1", 2)
    about = {"score": 1.0, "algorithm": "ppo", "step": 1, "parent": None, "worker": "w", "seconds": 1.0, "finished": False}
    (precious := tmp_path / "precious").mkdir()
    for name, stated in (("a", "a"), ("b", "../../../precious"), ("c", str(precious)), ("d", "d")):
        shutil.copytree(run, member := board.path / "members" / name)
        (member / "entry.json").write_text(json.dumps(about | {"id": stated} | ({"score": "high"} if name == "d" else {})))
    with pytest.warns(ResumeWarning, match="was not written by a worker"):
        (member,) = board.entries
    assert member.id == "a" and precious.exists()
    with pytest.warns(ResumeWarning, match="cannot be read, so a new run starts"):
        assert not _copy_run(member, tmp_path / "new", 0, Experiment(algorithm=algorithms.SAC(), env="Pendulum-v1"))


@pytest.mark.parametrize("name", ["members", "lock"])
def test_no_link_leads_a_board_elsewhere(name, tmp_path):
    board = Leaderboard.make(tmp_path / "board", "CartPole-v1", 2)
    (tmp_path / "home" / "precious").mkdir(parents=True)
    (board.path / name).unlink(missing_ok=True)
    (board.path / name).symlink_to(tmp_path / "home")
    with pytest.raises(RunFolderError, match=rf"{name} is a symbolic link"):
        Leaderboard.make(tmp_path / "board", "CartPole-v1", 2)
    assert (tmp_path / "home" / "precious").exists()
