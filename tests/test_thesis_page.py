"""The benchmark of policies over slower networks: what it predicts and measures is what the page says."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from benchmarks import thesis

PAGE = "# Thesis\n\n<!-- thesis: begin -->\nstale\n<!-- thesis: end -->\n"


def row(policy, delay, predicted, measured):
    same = {"case": "PPO", "steps": 8, "exchanges": 2}
    return same | {"policy": policy, "delay": delay, "predicted": predicted, "measured": measured}


def test_a_choice_costs_what_the_chosen_policy_was_measured_to_take():
    rows = [row("GPUOnly", 0.0, 2.0, 3.0), row("Central", 0.0, 1.0, 6.0)]
    rows += [row("GPUOnly", 1.0, 2.0, 3.0), row("Central", 1.0, 4.0, 9.0)]
    wrong, right = thesis.choices(rows)
    assert (wrong["best"]["policy"], wrong["chosen"]["policy"], wrong["regret"]) == ("GPUOnly", "Central", 2.0)
    assert (right["best"]["policy"], right["chosen"]["policy"], right["regret"]) == ("GPUOnly", "GPUOnly", 1.0)


def test_cases_are_of_two_algorithms():
    found = thesis.cases([8], [3])
    assert {name: (e.name, e.steps_per_iteration) for name, e in found.items()} == {
        "PPO, 8 environments": ("ppo", 8 * 16), "MAPPO, 3 agents": ("mappo", 32 * 16),
    }  # fmt: skip
    with pytest.raises(SystemExit):
        thesis.main(["--envs", "--agents", "--json", "never.json"])


@pytest.mark.slow
def test_tiny_runs_fill_the_record_the_page_and_the_figure(tmp_path, monkeypatch, capsys):
    page, record, svg = (tmp_path / name for name in ("thesis.md", "thesis.json", "thesis.svg"))
    page.write_text(PAGE)
    monkeypatch.setattr(thesis, "POLICIES", ("GPUOnly", "SingleLearnerCoarse"))
    monkeypatch.setattr(thesis, "FIXED", {"unroll_length": 4, "num_minibatches": 2, "num_epochs": 1})
    sizes = ["--envs", "8", "--agents", "--delays", "0", "0.1", "--seconds", "0.05", "--repeats", "1"]
    thesis.main([*sizes, "--json", str(record), "--docs", str(page), "--svg", str(svg)])
    rows = json.loads(record.read_text())["rows"]
    assert [(r["case"], r["policy"], r["delay"]) for r in rows] == [
        (n, p, d) for n in ("PPO, 8 environments",) for p in thesis.POLICIES for d in (0, 0.1)
    ]
    # Two transfers of an iteration take 0.2 s longer, and one program of all devices none.
    slow = [r for r in rows if r["policy"] != "GPUOnly" and r["delay"]]
    assert all(r["exchanges"] == 2 and r["measured"] > 0.2 and r["predicted"] > 0.2 for r in slow)
    assert all(r["exchanges"] == 0 for r in rows if r["policy"] == "GPUOnly")
    text = page.read_text()
    assert "stale" not in text and " of 2 cases" in text and "| PPO, 8 environments | 100 ms |" in text
    assert svg.read_text().startswith("<?xml") and thesis.page(json.loads(record.read_text())) in text
