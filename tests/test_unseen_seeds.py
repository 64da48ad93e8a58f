"""The benchmark of recipes on seeds that nobody chose anything on: its rule, and a tiny run."""

import json

import numpy as np
import pytest

from benchmarks import unseen_seeds


def row(best, last):
    return {"recipe": "x", "best": best, "first": 20_000, "scores": [[0.0, score] for score in last]}


@pytest.mark.parametrize(
    ("best", "last", "missed"),
    [
        (500.0, [500.0, 475.0, 474.9, float("nan")], [False, False, True, True]),
        (-100.0, [-80.0, -105.0, -105.1], [False, False, True]),
        (0.0, [0.0, -0.1], [False, True]),
    ],
)
def test_a_last_agent_misses_if_it_is_more_than_a_twentieth_below_the_best(best, last, missed):
    assert unseen_seeds.misses(row(best, last)).tolist() == missed


@pytest.mark.parametrize(("bad", "word"), [(2, "yes"), (3, "no")])
def test_two_of_twenty_may_miss(bad, word):
    record = {"rows": [row(500.0, [100.0] * bad + [500.0] * (20 - bad))], "machine": {"cores": 2}, "versions": {"jax": "0"}}
    line = unseen_seeds.page(record).splitlines()[2]
    assert line == f"| x | 500.0 | {500 - 20 * bad:.1f} | 100.0 | {20 - bad} of 20 | {word} |"


@pytest.mark.long
def test_a_tiny_run_fills_the_record_and_the_page(tmp_path):
    page, record = tmp_path / "page.md", tmp_path / "record.json"
    page.write_text("<!-- unseen_seeds: begin -->\n\n<!-- unseen_seeds: end -->\n")
    args = ["ppo-cartpole", "--seeds", "2", "--total-steps", "8192", "--json", str(record), "--docs", str(page)]
    unseen_seeds.main(args)
    (found,) = json.loads(record.read_text())["rows"]
    assert np.shape(found["scores"])[0] == 2 and found["best"] == 500.0
    assert "| ppo-cartpole | 500.0 |" in page.read_text()
    unseen_seeds.main(args)  # takes the place of its row
    assert len(json.loads(record.read_text())["rows"]) == 1
