"""The comparison with Ray RLlib: turns with its worker, the time to a return, the record and the page."""

import json
import os
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from benchmarks import compare_rllib as rllib

PAGE = "# RLlib\n\n<!-- rllib: begin -->\nstale\n<!-- rllib: end -->\n"
WORKER = """\
    import json, sys
    options = json.loads(sys.argv[sys.argv.index("--options") + 1])
    print(json.dumps({"compile_seconds": 0.0, "device": "cpu", "versions": {"ray": "0"}}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, dict):
            assert not options["continuing"] and request["target"] == 9.0 and request["max_steps"] == 64
            answer = {"seconds": 2.0 + request["seed"], "steps": 3000, "return": 9.5, "reached": True, "start_seconds": 1.0}
        else:
            answer = {"steps_per_second": 1000.0}
        print(json.dumps(answer), flush=True)
    """
SMALL = {"num_envs": 2, "unroll_length": 8, "num_minibatches": 2, "num_epochs": 1}


@pytest.fixture
def setting():
    return rllib.Setting("ppo", "CartPole-v1", rllib.PPO | SMALL, only_ours=rllib.OURS["ppo"])


def test_the_mean_is_that_of_the_newest_iterations_with_enough_episodes():
    totals, counts = np.array([900.0, 10.0, 0.0, 60.0]), np.array([9.0, 1.0, 0.0, 2.0])
    assert rllib.last_episodes(totals, counts, 2) == 30.0
    assert rllib.last_episodes(totals, counts, 3) == 70 / 3
    assert rllib.last_episodes(totals, counts, 12) == 970 / 12
    assert np.isnan(rllib.last_episodes(totals, counts, 13)) and np.isnan(rllib.last_episodes(totals[:0], counts[:0]))


@pytest.mark.slow
def test_a_run_ends_at_the_return_or_at_its_limit(setting, monkeypatch):
    experiment, program = rllib.made(setting, "CartPole-v1")
    limited = rllib.reach(experiment, program, 1e9, 64, 60.0)
    assert (limited["steps"], limited["reached"]) == (64, False)
    monkeypatch.setattr(rllib.last_episodes, "__defaults__", (1,))
    reached = rllib.reach(experiment, program, 1.0, 10_000, 60.0)
    assert reached["reached"] and reached["return"] >= 1 and reached["steps"] < 10_000


@pytest.mark.slow
def test_tiny_runs_fill_the_record_and_the_page(setting, tmp_path, monkeypatch, capsys):
    page, record, worker = (tmp_path / name for name in ("rllib.md", "rllib.json", "rllib_worker.py"))
    page.write_text(PAGE)
    worker.write_text(textwrap.dedent(WORKER))
    monkeypatch.setattr(rllib, "SETTINGS", [setting])
    monkeypatch.setattr(rllib, "TARGETS", {"CartPole-v1": 9.0})
    monkeypatch.setattr(rllib, "__file__", str(tmp_path / "compare_rllib.py"))
    arguments = ["--rllib", sys.executable, "--seconds", "0.05", "--repeats", "3", "--returns", "2", "--max-steps", "64"]
    rllib.main([*arguments, "--json", str(record), "--docs", str(page)])
    (row,) = json.loads(record.read_text())["rows"]
    assert row["runs"][rllib.PEER] == [1000.0] * 3 and len(row["runs"][rllib.HOST]) == 3
    assert [run["seed"] for run in row["returns"][rllib.HOST]] == [0, 1]
    assert all(run["steps"] <= 64 for run in row["returns"][rllib.HOST])
    text = page.read_text()
    assert "stale" not in text and "1,000 (1,000 to 1,000)" in text
    assert "2.50 (2.00 to 3.00) after 1 to start; 3 k steps; 2 of 2" in text
    with pytest.raises(SystemExit):
        rllib.main([*arguments, "--json", str(record), "--only", "nothing"])


@pytest.mark.long
def test_ray_trains_a_setting_and_answers_with_its_speed_and_its_time():
    python = os.environ.get("RLLIB_PYTHON")
    if not python:
        pytest.skip("RLLIB_PYTHON names no Python with Ray RLlib")
    command = [python, Path(rllib.__file__).with_name("rllib_worker.py")]
    config = rllib.PPO | SMALL | {"unroll_length": 64}
    setting = rllib.Setting("ppo", "gymnasium:CartPole-v1", config, only_ours=rllib.OURS["ppo"])
    with rllib.peer(command, setting, continuing=True) as peer:
        assert peer.about["versions"]["ray"] and peer.run(0.1) > 0
        request = {"seed": 10_000, "target": 1.0, "max_steps": 20_000, "max_seconds": 60.0}
        answer = peer.ask(json.dumps(request))
    assert answer["reached"] and answer["return"] >= 1 and 100 < answer["steps"] < 20_000
