"""The benchmark of learning from data alone: its numbers are those of NumPy and SciPy, and the page says them."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from benchmarks import offline
from msrl_jax.report.statistics import Estimate

PAGE = "# Offline\n\n<!-- offline: begin -->\nold\n<!-- offline: end -->\n"


@pytest.mark.slow
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_tiny_runs_are_scored_and_ranked_as_by_hand(env, tmp_path, monkeypatch, capsys):
    page, record, svg = (tmp_path / name for name in ("offline.md", "offline.json", "offline.svg"))
    page.write_text(PAGE)
    monkeypatch.setattr(offline, "ALGORITHMS", {name: offline.ALGORITHMS[name] for name in ("bc", "awac")})
    monkeypatch.setattr(offline, "TARGETS", (0, 100))
    offline.main(["--tiny", "--only", env, "--json", str(record), "--docs", str(page), "--svg", str(svg)])
    row = json.loads(record.read_text())["environments"][env]
    text = page.read_text()
    assert "old" not in text and svg.read_text().startswith("<?xml")
    assert row["expert"] == max(row["online_returns"])

    scale = (row["expert"] - row["random"]) / 100
    for kind in offline.DATA:
        for name in ("bc", "awac"):
            scores = [(x - row["random"]) / scale for x in row["returns"][kind][name]]
            found = offline.score_estimates(row, kind)[name]
            assert len(scores) == 2 and found.value == pytest.approx(sum(scores) / 2)
            assert found.low == pytest.approx(min(scores)) and found.high == pytest.approx(max(scores))
            assert f" {found} " in text

    chosen = row["selection"]
    assert len(set(chosen["names"])) == 4
    scores = (np.array(chosen["returns"]) - row["random"]) / scale
    np.testing.assert_allclose(chosen["scores"], scores)
    for kind, values in chosen["estimates"].items():
        ranks = [stats.rankdata(x) for x in (values, chosen["returns"])]
        assert chosen["spearman"][kind] == pytest.approx(np.corrcoef(*ranks)[0, 1])
        assert chosen["regret"][kind] == pytest.approx(max(scores) - scores[values.index(max(values))])
    if env == "Pendulum-v1":
        assert set(chosen["covered"].values()) == {None}
    else:
        assert chosen["covered"]["random"] == pytest.approx([0.5] * 4)
        assert all(0 < x < 1 for x in chosen["covered"]["expert"])


def test_a_winner_is_alone_and_others_are_ties():
    apart = {"bc": Estimate(10, 5, 15), "cql": Estimate(40, 35, 45), "iql": Estimate(90, 80, 95)}
    assert offline.winners(apart) == ["iql"]
    assert offline.winners(apart | {"crr": Estimate(70, 60, 80)}) == ["iql", "crr"]
    assert offline.winners(apart | {"crr": Estimate(70, 60, 79)}) == ["iql"]


def test_policies_are_the_nearest_to_their_targets_and_no_two_are_the_same():
    scores = [3.0, 96.0, 98.0, 40.0, -8.0]
    assert offline.nearest(scores, (0, 33, 67, 100)) == [0, 3, 1, 2]


def test_scores_are_those_of_the_paper():
    # D4RL's walker2d: random 1.629, expert 4592.3 (2004.07219).
    np.testing.assert_allclose(offline.normalized([1.629, 4592.3, 2296.9645], 1.629, 4592.3), [0, 100, 50])
