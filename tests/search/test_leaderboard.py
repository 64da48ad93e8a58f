"""What a leaderboard keeps, and which members are drawn."""

import numpy as np

from msrl_jax.search import Leaderboard


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
    assert scores(board) == [5.0, 3.0] and (board.best.path / "run").read_text() == "b"
    best = [row["best"] for row in board.rounds]
    assert best == sorted(best) == [1.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    assert [row["accepted"] for row in board.rounds] == [True, True, False, False, True, False, True]



def test_ranks_are_drawn_with_halving_probabilities(tmp_path):
    """4,000 draws: a fair one fails with a probability below 1e-6."""
    board, rng = Leaderboard.make(tmp_path / "board", "Env", 4), np.random.default_rng(0)
    for name, score in (("a", 1.0), ("b", 3.0), ("c", 2.0)):
        offer(board, tmp_path, name, score)
    drawn = [board.draw(rng, "ppo").worker for _ in range(4000)]
    for name, share in (("b", 4 / 7), ("c", 2 / 7), ("a", 1 / 7)):
        assert abs(drawn.count(name) / 4000 - share) < 5 * np.sqrt(share * (1 - share) / 4000)
    assert board.draw(rng, "dqn") is None

