"""Tournaments: what the board keeps, which members are drawn, workers side by side, kills, and what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import cli
from msrl_jax.run import NotSavedError, Result, ResumeWarning, RunFolderError
from msrl_jax.run.prepare import make_experiment
from msrl_jax.tournament import Leaderboard
from msrl_jax.tournament.worker import _copy_run
from tests.support import processes
from tests.support.random_walk import RandomWalk

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SMALL = {"num_envs": 8, "unroll_length": 8, "hidden_sizes": (8,)}
ROUND = {"round_steps": 128, "total_steps": 512, "eval_episodes": 4}
ONE = {"seed": 0, "fresh": 0.0, "rounds": 1, **ROUND, **SMALL}
"""One round, which goes on with a member if there is one that can."""
WORKER = """
import sys
sys.path.insert(0, {root!r})
import jax
import msrl_jax as msrl
msrl.tournament.compete(
    {board!r}, {algo!r}, "CartPole-v1:max_steps_in_episode=40", round_steps=128, total_steps=1e6, eval_episodes=4, size=3,
    seed={seed}, devices=jax.devices()[:{devices}], policy={policy!r}, num_envs=8, unroll_length=8, hidden_sizes=(8,),
    callbacks=[lambda tick: print("tick", flush=True)],
)
"""


def folder_of(path, name):
    """A folder as a run leaves it, as far as the board looks at it."""
    (path / name).mkdir(parents=True)
    (path / name / "run").write_text(name)
    return path / name


def offer(board, path, name, score, parent=None):
    run = folder_of(path, name)
    kept = board.put(run, score, algorithm="ppo", step=1, finished=False, parent=parent, worker=name)
    assert kept != run.exists()
    return kept


def scores(board):
    return [entry.score for entry in board.entries]


def test_the_board_keeps_what_is_better(tmp_path):
    board = Leaderboard.make(tmp_path / "board", "Env", 2)
    assert offer(board, tmp_path, "a", 1.0) and offer(board, tmp_path, "b", 5.0)
    assert not offer(board, tmp_path, "c", 0.5) and not offer(board, tmp_path, "nan", float("nan"))
    assert scores(board) == [5.0, 1.0]
    worst = board.entries[-1]
    assert offer(board, tmp_path, "d", 2.0, worst), "a child takes the place of its parent"
    assert scores(board) == [5.0, 2.0] and board.best.worker == "b"
    assert not offer(board, tmp_path, "e", 4.0, board.best), "it is better than the worst, but not than its parent"
    assert offer(board, tmp_path, "f", 3.0, worst), "its parent is gone, so it takes the place of the worst"
    assert not offer(board, tmp_path, "tie", 5.0, board.best), "it is as good as its parent"
    assert not offer(board, tmp_path, "new", 3.0), "it is as good as the worst"
    assert scores(board) == [5.0, 3.0] and (board.best.path / "run").read_text() == "b"
    best = [row["best"] for row in board.rounds]
    assert best == sorted(best) == [1.0, *[5.0] * 8]
    assert [row["accepted"] for row in board.rounds] == [True, True, False, False, True, False, True, False, False]


def test_of_equal_scores_the_first_ranks_first(tmp_path):
    board = Leaderboard.make(tmp_path / "board", "Env", 3)
    assert all(offer(board, tmp_path, name, 1.0) for name in "abc")
    assert [entry.worker for entry in board.entries] == ["a", "b", "c"]


def test_ranks_are_drawn_with_halving_probabilities(tmp_path):
    """4,000 draws: a fair one fails with a probability below 1e-6."""
    board, rng = Leaderboard.make(tmp_path / "board", "Env", 4), np.random.default_rng(0)
    for name, score in (("a", 1.0), ("b", 3.0), ("c", 2.0)):
        offer(board, tmp_path, name, score)
    drawn = [board.draw(rng, "ppo").worker for _ in range(4000)]
    for name, share in (("b", 4 / 7), ("c", 2 / 7), ("a", 1 / 7)):
        assert abs(drawn.count(name) / 4000 - share) < 5 * np.sqrt(share * (1 - share) / 4000)
    assert board.draw(rng, "dqn") is None and board.draw(rng, "ppo", max_step=1) is None
    done = {"algorithm": "dqn", "step": 1, "finished": True, "parent": None, "worker": "d"}
    assert board.put(folder_of(tmp_path, "d"), 4.0, **done)
    assert board.draw(rng, "dqn") is None, "a member that has finished, of a worker with fewer steps, is not trained on"


@pytest.mark.slow
def test_members_go_on_where_they_were(tmp_path, one_device):
    options = {"devices": one_device, "seed": 0, **ROUND, **SMALL}
    first = msrl.tournament.compete(tmp_path / "board", "a2c", RandomWalk(), rounds=1, fresh=1.0, size=2, **options)
    (entry,) = first.entries
    assert (entry.step, entry.parent, entry.algorithm, entry.finished) == (128, None, "a2c", False)
    start = Result.load(entry.path, env=RandomWalk())
    assert start.history["step"][-1] == 128 and start.evaluation.mean_return == entry.score
    board = msrl.tournament.compete(tmp_path / "board", "a2c", RandomWalk(), rounds=3, fresh=0.0, **options)
    assert len(board.rounds) == 4 and all(row["step"] > 128 for row in board.rounds[1:])
    for child in board.entries:
        if child.parent is not None:
            assert Result.load(child.path, env=RandomWalk()).history["step"][0] == start.history["step"][0]
    assert not list((board.path / "workers").iterdir()), "no worker leaves anything behind"
    assert "rank" in str(board) and board.best.id in str(board)
    # A new algorithm starts members of its own.
    mixed = msrl.tournament.compete(tmp_path / "board", "ppo", RandomWalk(), rounds=1, fresh=0.0, num_minibatches=1, **options)
    assert mixed.rounds[-1]["algorithm"] == "ppo" and mixed.rounds[-1]["parent"] is None


def test_workers_come_and_go_and_the_best_score_never_falls(tmp_path):
    """Two workers of two algorithms on one and two devices; one of them is killed, and another takes its place."""
    board = tmp_path / "board"

    def start(seed, algo, devices=1, policy="GPUOnly"):
        code = WORKER.format(root=str(ROOT), board=str(board), algo=algo, seed=seed, devices=devices, policy=policy)
        return processes.start([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)

    workers = [start(0, "a2c", 2, "MultiLearner"), start(1, "impala")]
    try:
        wait_for(board, lambda rounds: len(rounds) >= 4 and {"a2c", "impala"} == {row["algorithm"] for row in rounds})
        os.kill(workers[0].pid, signal.SIGKILL)
        workers[0].wait()
        assert len(list((board / "workers").iterdir())) >= 1
        begun = len(Leaderboard(board).rounds)
        workers.append(start(2, "a2c"))
        wait_for(board, lambda rounds: "a2c" in [row["algorithm"] for row in rounds[begun:]])
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            worker.stdout.close()
    found = Leaderboard(board)
    best = [row["best"] for row in found.rounds]
    assert best == sorted(best) and {"a2c", "impala"} == {row["algorithm"] for row in found.rounds}
    assert 1 <= len(found.entries) <= 3 and found.best.score == best[-1]
    for entry in found.entries:
        assert Result.load(entry.path).evaluation.mean_return == entry.score
    with found.workplace():
        assert len(list((board / "workers").iterdir())) == 1, "what killed workers left is gone"


def wait_for(board, done):
    end = time.monotonic() + 240
    while not (board / "leaderboard.json").exists() or not done(Leaderboard(board).rounds):
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.slow
def test_the_command_line(tmp_path, capsys):
    flags = ["--round-steps", 128, "--total-steps", 256, "--rounds", 2, "--eval-episodes", 4, "--seed", 1, "--algo", "a2c"]
    flags += ["--num-envs", 8, "--unroll-length", 8, "--hidden-sizes", 8, "--progress", "none", "--json", "--fresh", 0]
    flags += ["--policy", "GPUOnly:num_devices=1"]
    command = ["compete", str(tmp_path / "board"), *map(str, flags)]
    assert cli.main(command) == 0
    entries = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert entries[0]["algorithm"] == "a2c" and len(Leaderboard(tmp_path / "board").rounds) == 2
    assert cli.main([*command, "--env", "Acrobot-v1"]) == 2
    assert "has env='CartPole-v1', and cannot continue with env='Acrobot-v1'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"round_steps": 0}, "round_steps=0: use an integer"),
        ({"fresh": 1.5}, "fresh=1.5: use a probability"),
        ({"target": float("nan")}, "target=nan: use a finite number"),
        ({"round_steps": 1024}, "round_steps=1024 exceeds total_steps=512"),
        ({"learning_rate": [1e-3, 1e-4]}, "learning_rate has several values, but a member has one"),
        ({"seeds": 2}, "seeds has several values, but a member has one"),
        ({"algo": "self_play", "env": "RockPaperScissors"}, "needs returns that rank members"),
    ],
    ids=["round", "fresh", "target", "long", "several", "seeds", "ranked"],
)
def test_bad_input_is_refused(options, message, tmp_path):
    asked = {"algo": "a2c", "round_steps": 128, "rounds": 1, "total_steps": 512} | options
    with pytest.raises(ValueError, match=message):
        msrl.tournament.compete(tmp_path / "board", **asked)


def test_other_folders_are_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RunFolderError, match=r"has other files \(thesis.tex\)"):
        msrl.tournament.compete(tmp_path, "a2c", round_steps=128)
    with pytest.raises(RunFolderError, match="does not contain a leaderboard"):
        Leaderboard(str(tmp_path)).best  # noqa: B018
    board = Leaderboard.make(tmp_path / "board", "Env", 2)
    with pytest.raises(RunFolderError, match="has size=2, and cannot continue with size=3"):
        Leaderboard.make(board.path, "Env", 3)
    with pytest.raises(ValueError, match="has no members yet"):
        _ = board.best
    with pytest.raises(RunFolderError, match=r"has env_params=None, and cannot continue with env_params=\{'gravity': '1.0'\}"):
        Leaderboard.make(board.path, "Env", 2, {"gravity": "1.0"})
    (board.path / "leaderboard.json").write_text("{")
    with pytest.raises(RunFolderError, match="is damaged"):
        Leaderboard.make(board.path, "Env", 2)


@pytest.fixture(scope="module")
def begun(tmp_path_factory, one_device):
    """A board after one round."""
    path = tmp_path_factory.mktemp("begun") / "board"
    return msrl.tournament.compete(path, "a2c", RandomWalk(), devices=one_device, **ONE).path


@pytest.fixture
def board(begun, tmp_path):
    """A copy of it, to be changed."""
    return Leaderboard(shutil.copytree(begun, tmp_path / "board"))


def test_a_damaged_member_is_left_out(board, one_device):
    (entry,) = board.entries
    shutil.rmtree(entry.path / "checkpoints")
    with pytest.warns(ResumeWarning, match=f"member {entry.id} cannot be read, so a new run starts"):
        msrl.tournament.compete(board.path, "a2c", RandomWalk(), devices=one_device, **ONE)
    assert board.rounds[-1]["parent"] is None and len(board.entries) == 2
    (entry.path / "entry.json").write_text("{")
    with pytest.warns(ResumeWarning, match=r"entry.json is damaged .* ignored"):
        assert len(board.entries) == 1


def test_copies_of_a_member_differ_in_their_random_numbers_alone(board, tmp_path):
    (parent,) = board.entries
    made = make_experiment("a2c", RandomWalk(), total_steps=512, env_params=None, **dict(SMALL))
    for number in (1, 2):
        assert _copy_run(parent, tmp_path / str(number), number, made)
    states = [Result.load(path, env=RandomWalk()).run_state for path in (parent.path, tmp_path / "1", tmp_path / "2")]
    of_keys = 0
    for leaves in zip(*map(jax.tree.leaves, states), strict=True):
        if jax.numpy.issubdtype(leaves[0].dtype, jax.dtypes.prng_key):
            data = [np.unique(jax.random.key_data(x).reshape(-1, 2), axis=0) for x in leaves]
            of_keys += len(data[0])
            assert len(np.unique(np.concatenate(data), axis=0)) == sum(map(len, data))
        else:
            assert all((np.asarray(x) == np.asarray(leaves[0])).all() for x in leaves)
    assert of_keys > 0


def test_a_round_that_could_not_be_saved_ends_the_worker(tmp_path, monkeypatch):
    """The board would hold a folder that nobody can read."""
    failed, policies = SimpleNamespace(save_error="No space left on device"), []
    monkeypatch.setattr("msrl_jax.tournament.worker.train", lambda **options: policies.append(options["policy"]) or failed)
    with pytest.raises(NotSavedError, match="No space left on device"):
        msrl.tournament.compete(tmp_path / "board", "a2c", RandomWalk(), **ONE)
    assert not Leaderboard(tmp_path / "board").entries
    assert policies == ["GPUOnly"], "and not the one that the folder of a member names"


def test_members_that_have_done_all_their_steps_are_drawn_no_more(board, one_device):
    msrl.tournament.compete(board.path, "a2c", RandomWalk(), devices=one_device, **ONE | {"total_steps": 128})
    assert [row["parent"] for row in board.rounds] == [None, None]
    assert sorted(entry.finished for entry in board.entries) == [False, True]


def test_a_time_limit_and_a_target_end_a_worker(tmp_path, one_device):
    options = {"devices": one_device, "seed": 0, **ROUND, **SMALL}
    board = msrl.tournament.compete(tmp_path / "board", "a2c", RandomWalk(), target=-1e9, **options)
    assert len(board.rounds) == 1
    start = time.monotonic()
    msrl.tournament.compete(tmp_path / "board", "a2c", RandomWalk(), time_limit=1.0, **options)
    assert time.monotonic() - start < 60 and len(jax.devices()) == 8
