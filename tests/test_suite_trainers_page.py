"""The comparison with the suites' own trainer: turns with its worker, the record and the page."""

import json
import os
import sys
import textwrap
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from benchmarks import suite_trainers

PAGE = "# Trainers\n\n<!-- suite_trainers: begin -->\nstale\n<!-- suite_trainers: end -->\n"
WORKER = """\
    import json, sys
    task = json.loads(sys.argv[sys.argv.index("--setting") + 1])
    print(json.dumps({"device": "cpu", "versions": {"brax": "0"}}), flush=True)
    for seed in map(json.loads, sys.stdin):
        answer = {"return": 10.0 * (seed + 1), "steps": task["total_steps"], "seconds": 3.0}
        print(json.dumps(answer), flush=True)
    """


def test_seeds_take_turns_and_fill_the_record_and_the_page(tmp_path, monkeypatch, capsys):
    def ours(task, seed):
        return {"return": 100.0 * (seed + 1), "steps": task.total_steps, "seconds": 2.0}

    page, record, worker = (tmp_path / name for name in ("page.md", "record.json", "brax_worker.py"))
    page.write_text(PAGE)
    worker.write_text(textwrap.dedent(WORKER))
    monkeypatch.setattr(suite_trainers, "ours", ours)
    monkeypatch.setattr(suite_trainers, "__file__", str(tmp_path / "suite_trainers.py"))
    arguments = ["--brax", sys.executable, "--json", str(record), "--docs", str(page), "--seeds", "3"]
    suite_trainers.main([*arguments, "--only", "inverted_pendulum"])
    said = [line.split()[1:4] for line in capsys.readouterr().out.splitlines() if line.startswith("brax:")]
    assert [(who, seed) for who, _, seed in said] == [
        ("ours", "0,"), ("theirs", "0,"), ("theirs", "1,"), ("ours", "1,"), ("ours", "2,"), ("theirs", "2,"),
    ]  # fmt: skip
    text = page.read_text()
    assert "stale" not in text
    assert "| 200 (100 to 300) | 20 (10 to 30) | 2 (2 to 2) | 3 (3 to 3) |" in text
    suite_trainers.main([*arguments, "--only", "Balance"])
    rows = json.loads(record.read_text())["rows"]
    assert [row["label"] for row in rows] == ["brax:inverted_pendulum", "playground:CartpoleBalance"]
    for wrong in (["--only", "nothing"], ["--seeds", "0"]):
        with pytest.raises(SystemExit):
            suite_trainers.main([*arguments, *wrong])


@pytest.mark.slow
def test_both_train_for_as_many_steps():
    python = os.environ.get("BRAX_PYTHON")
    if not python:
        pytest.skip("BRAX_PYTHON names no Python with Brax")
    task = suite_trainers.Task("brax:inverted_pendulum", 8192, suite_trainers.SHARED)
    command = [python, Path(suite_trainers.__file__).with_name("brax_worker.py")]
    row = suite_trainers.compare(task, command, [10_000])
    for (run,) in (row["ours"], row["theirs"]):
        assert run["steps"] == 8192 and 0 < run["return"] <= 1000
