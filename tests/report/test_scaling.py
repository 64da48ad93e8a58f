"""Weak scaling on paper: with environments that grow with the devices, what each device receives and holds stays the same."""

import dataclasses
import functools
import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from msrl_jax import cli, envs
from msrl_jax.algorithms import A2C
from msrl_jax.cli import command_line, commands, launch
from msrl_jax.fragments.plan.kernels import Launches
from msrl_jax.report.scaling import format_plans, plans

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from benchmarks import scaling as script

SMALL = {"unroll_length": 4, "hidden_sizes": (16,)}


@pytest.fixture(scope="module")
def apart():
    """Plans with as many actors as learners."""
    return plans("a2c", "CartPole-v1", "SingleLearnerCoarse:learners={half}", ["cpu:2", "cpu:8"], 4, **SMALL)


def scaled(policy, devices, **others):
    return [row.to_dict() for row in plans("a2c", "CartPole-v1", policy, devices, 4, **SMALL | others)]


def parameters():
    agent = A2C(**SMALL).build(envs.make("CartPole-v1"))
    shapes = jax.eval_shape(agent.init, jax.random.key(0)).params
    return 4 * sum(x.size for x in jax.tree.leaves(shapes))


def test_together_each_device_reduces_one_gradient_however_many_there_are():
    one, *more = scaled("GPUOnly", ["cpu:1", "cpu:2", "cpu:8"])
    assert one["bytes_of_collectives"] == {"all": 0} and one["bytes_arriving"] == {"all": 0}
    assert [row["num_envs"] for row in more] == [8, 32]
    for row in more:
        assert row["bytes_of_collectives"] == more[0]["bytes_of_collectives"] and row["collectives"] == more[0]["collectives"]
        assert row["bytes_arriving"] == {"all": 0}
        np.testing.assert_allclose(row["memory"]["all"], one["memory"]["all"], rtol=0.1)
    assert parameters() <= more[0]["bytes_of_collectives"]["all"] <= parameters() + 100


@pytest.mark.long
def test_apart_each_actor_receives_the_parameters_and_each_learner_the_steps_of_its_environments(apart):
    rows = [row.to_dict() for row in apart]
    assert [row["sizes"] for row in rows] == [{"actors": n, "learners": n} for n in (1, 4)]
    for row in rows:
        assert row["bytes_arriving"] == rows[0]["bytes_arriving"]
    assert parameters() <= rows[0]["bytes_arriving"]["actors"] <= parameters() + 16
    (one,) = plans("a2c", "CartPole-v1", "SingleLearnerCoarse", ["cpu:8"], 4, **SMALL)
    arriving = one.to_dict()["bytes_arriving"]
    assert arriving["actors"] == rows[0]["bytes_arriving"]["actors"]
    assert arriving["learners"] > 3.5 * rows[0]["bytes_arriving"]["learners"]  # one learner receives the steps of all


def test_the_table_shows_every_placement(apart):
    text = format_plans(apart[:1])
    assert all(word in text for word in ("SingleLearnerCoarse", "cpu:2", "actors", "learners", "KiB"))


def test_launches_are_a_column_if_all_plans_count_them(apart):
    row = apart[0]
    counts = {"actors": Launches("act", (4, 5), 60, 2, 0, 1, 8), "learners": Launches("learn", (), 7, 0, 2, 0, 8)}
    programs = tuple(dataclasses.replace(p, launches=(counts[p.placement],)) for p in row.plan.programs)
    counted = dataclasses.replace(row, plan=dataclasses.replace(row.plan, programs=programs))
    runs = {name: sum(p.runs for p in programs if p.placement == name) for name in counts}
    assert runs == {"actors": 1, "learners": 1} and counted.to_dict()["launches"] == {"actors": 20 * 63, "learners": 9}
    text = " ".join(format_plans([counted, counted]).split())
    assert "launches" in text and text.count("actors 1,260, learners 9") == 2
    assert "launches" not in format_plans([counted, row])


def explain(capsys, *flags):
    """The code, what is printed, and the message of `msrl-jax explain`, which finds JAX started with eight devices."""
    code = cli.main(["explain", "--algo", "a2c", "--unroll-length", "4", "--hidden-sizes", "16", *flags])
    return code, *capsys.readouterr()


@pytest.mark.long
def test_explain_plans_for_named_devices(capsys, monkeypatch):
    asked = []
    monkeypatch.setattr("msrl_jax.report.scaling.plans", functools.cache(plans))  # the table shows what the JSON does
    for module in (commands, launch):
        monkeypatch.setattr(module, "use_cpu_devices", asked.append)
    code, out, _ = explain(capsys, "--num-envs", "8", "--devices", "cpu:2", "--json")
    assert (code, json.loads(out)["placements"]) == (0, {"all": ["cpu:0", "cpu:1"]})
    code, out, _ = explain(capsys, "--envs-per-device", "4", "--devices", "cpu:1", "cpu:2", "--json")
    assert code == 0 and [row["num_envs"] for row in json.loads(out)] == [4, 8]
    code, out, _ = explain(capsys, "--envs-per-device", "4", "--devices", "cpu:1", "cpu:2")
    assert code == 0 and "cpu:1" in out and "cpu:2" in out and [n for n in asked if n] == [2, 2, 2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--devices", "tpu:v9:2x2"], "unknown TPU 'v9'"),
        (["--devices", "cpu:2", "--cpu-devices", "2"], "--devices and --cpu-devices both choose devices"),
        (["--envs-per-device", "4"], "--envs-per-device needs --devices"),
    ],
)
def test_explain_refuses_wrong_devices_in_one_line(capsys, monkeypatch, flags, message):
    for module in (commands, launch):
        monkeypatch.setattr(module, "use_cpu_devices", lambda count: None)
    code, _, error = explain(capsys, *flags)
    assert code == command_line.BAD_INPUT and message in error and error.count("\n") == 1


@pytest.mark.slow
def test_the_script_writes_its_tables_and_what_was_refused(tmp_path, capsys):
    given = ["--algo", "a2c", "--policy", "GPUOnly", "Central:shards=2", "--devices", "cpu:2", "cpu:4"]
    config = json.dumps(SMALL | {"hidden_sizes": [16]})
    script.main([*given, "--envs-per-device", "4", "--config", config, "--out", str(tmp_path / "it")])
    found = json.loads((tmp_path / "it.json").read_text())
    assert [(row["policy"], row["count"]) for row in found["rows"]] == [("GPUOnly", 2), ("GPUOnly", 4), ("Central:shards=2", 4)]
    assert all(row["tracing_seconds"] > 0 and row["xla_seconds"] > 0 for row in found["rows"])
    assert "needs 3 devices" in found["refused"][0]["why"] and "needs 3 devices" in capsys.readouterr().out
    head, _, first, second, third = (tmp_path / "it.md").read_text().splitlines()
    assert head.startswith("| policy | devices |") and first.startswith("| `GPUOnly` | cpu:2 | 0 | 1 |")
    assert second.startswith("|  | cpu:4 | 0 | 1 |") and third.startswith("| `Central:shards=2` | cpu:4 |")
    page, record = tmp_path / "page.md", tmp_path / "record.json"
    page.write_text("<!-- scaling: begin -->\n<!-- scaling: end -->\n")
    written = ["--json", str(record), "--docs", str(page), "--svg", str(tmp_path / "it.svg")]
    script.main(["--rows", str(tmp_path / "it.json"), *written])
    found = json.loads(record.read_text())
    text = page.read_text()
    assert script.page(found) in text and re.search(r"^\| a2c, `Central` \| \d+ \| - \| \d", text, re.MULTILINE)
    drawn = (tmp_path / "it.svg").read_text()
    assert all(f">{text}<" in drawn for text in ("a2c", "GPUOnly", "Central", "a2c, XLA", "compiling"))
