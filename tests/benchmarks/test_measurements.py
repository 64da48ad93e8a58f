"""What benchmarks compute, compared with NumPy, SciPy and Gymnasium; tiny runs fill their records and pages."""

import argparse
import gc
import json

import jax
import numpy as np
import pytest
from scipy import stats

from benchmarks import gpu, groups, offline, reactor, reactor_worker, thesis
from msrl_jax.cli.argument_types import new_file
from msrl_jax.report.statistics import Estimate

step_of_the_lake = jax.jit(lambda state, action: reactor.Lake().step(jax.random.key(0), state, action))


def test_the_lake_is_that_of_gymnasium():
    import gymnasium

    theirs, ours = gymnasium.make("FrozenLake-v1", is_slippery=False), reactor.Lake()
    for seed in range(3):
        theirs.reset(seed=seed)
        (state, _), ended, rng = ours.reset(jax.random.key(0)), False, np.random.default_rng(seed)
        while not ended:
            action = int(rng.integers(4))
            seen, reward, terminated, truncated, _ = theirs.step(action)
            state, *found = step_of_the_lake(state, action)
            assert [x.item() for x in found] == [seen, reward, terminated, truncated]
            ended = terminated or truncated


@pytest.mark.slow
def test_q_learning_finds_the_goal_in_jax_and_in_an_actor(monkeypatch):
    monkeypatch.setattr(reactor, "STEP_SIZE", 0.01)
    program, state = reactor.q_learning(reactor.Lake(), 4, 32, "GPUOnly")
    actor, q = reactor_worker.Simulators("FrozenLake-v1", {"is_slippery": False}, 4, 0), np.ones((16, 4), np.float32)
    for _ in range(150):
        q += 0.01 * actor.errors(q, 32)
    for table in (np.asarray(program.run(state, 150)[0][0]), q):
        state, obs = reactor.Lake().reset(jax.random.key(0))
        for _ in range(6):  # the shortest way
            state, obs, reward, *_ = step_of_the_lake(state, int(table[obs].argmax()))
        assert float(reward) == 1.0


@pytest.mark.slow
def test_all_agents_act_as_each_of_them_alone():
    program, state = reactor.inference(3, 2)
    (_, action), _ = program.run(state, 1)
    world, expected = reactor_worker.World(3), np.zeros(3, int)
    for _ in range(2):
        agents = [reactor_worker.Agent(w) for w in reactor_worker.networks(3)]
        expected = np.array([agent.act(row) for agent, row in zip(agents, world(expected), strict=True)])
    assert np.asarray(action).tolist() == expected.tolist()


@pytest.mark.slow
def test_tiny_runs_of_groups_fill_the_record_and_the_page(tmp_path, page, monkeypatch, capsys):
    page, record = page("groups"), tmp_path / "groups.json"
    monkeypatch.setattr(groups, "UNROLL", 2)
    monkeypatch.setattr(groups, "_CHUNK", 1)
    monkeypatch.setattr(groups, "HIDDEN", 8)
    monkeypatch.setattr(groups, "VARIANTS", {"both": (2, 1)})
    sizes = ["--delays", "0.05", "--workers", "2", "--repeats", "1", "--seconds", "0.01"]
    groups.main([*sizes, "--json", str(record), "--docs", str(page)])
    (row,) = json.loads(record.read_text())["rows"]
    # A worker has four environments, one after another: a step of all eight takes at least 0.2 s.
    assert 0 < row["runs"]["both"][0] <= 8 / 0.2
    text = page.read_text()
    assert "stale" not in text and "| 50 ms | 2 |" in text and groups.table(json.loads(record.read_text())) in text


@pytest.mark.long
def test_tiny_rows_are_measured_and_the_page_is_written(tmp_path, page, capsys):
    page, record = page("gpu"), tmp_path / "gpu.json"
    words = ["PBT of 16"]
    gpu.main(["--tiny", "--repeats", "1", "--seconds", "0.05", "--json", str(record), "--docs", str(page), "--only", *words])
    rows = json.loads(record.read_text())["rows"]
    assert len(rows) == 1 and all(row["rate"] > 0 and row["compile_seconds"] > 0 for row in rows)
    text = page.read_text()
    assert "stale" not in text and all(f"| {row['label']} | {row['rate']:,.0f} |" in text for row in rows)
    assert "PBT of 4 members" in text


@pytest.mark.slow
@pytest.mark.parametrize("row", gpu.ROWS, ids=lambda row: row.label)
def test_every_row_can_be_measured(row):
    try:
        assert gpu.measure(gpu.shrunk(row), 1, 0.05)["rate"] > 0
    except RuntimeError as error:
        if "connect to the internet" not in str(error):
            raise
        gc.collect()  # what git was started with
        pytest.skip(str(error))


def test_what_is_not_installed_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "missing", lambda row: "pip install it")
    record = tmp_path / "gpu.json"
    gpu.main(["--tiny", "--json", str(record), "--only", "brax:ant"])
    assert "Not installed: ppo brax:ant 8 x 8 (pip install it)." in capsys.readouterr().err and not record.exists()


def test_a_machine_without_a_gpu_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--json", str(tmp_path / "gpu.json")])
    assert "a GPU is measured here" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_tiny_runs_are_scored_and_ranked_as_by_hand(env, tmp_path, page, monkeypatch, capsys):
    page, record, svg = page("offline"), tmp_path / "offline.json", tmp_path / "offline.svg"
    monkeypatch.setattr(offline, "ALGORITHMS", {name: offline.ALGORITHMS[name] for name in ("bc", "awac")})
    monkeypatch.setattr(offline, "TARGETS", (0, 100))
    offline.main(["--tiny", "--only", env, "--json", str(record), "--docs", str(page), "--svg", str(svg)])
    row = json.loads(record.read_text())["environments"][env]
    text = page.read_text()
    assert "stale" not in text and svg.read_text().startswith("<?xml")
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


def measured(policy, delay, predicted, measured):
    same = {"case": "PPO", "steps": 8, "exchanges": 2}
    return same | {"policy": policy, "delay": delay, "predicted": predicted, "measured": measured}


def test_a_choice_costs_what_the_chosen_policy_was_measured_to_take():
    rows = [measured("GPUOnly", 0.0, 2.0, 3.0), measured("Central", 0.0, 1.0, 6.0)]
    rows += [measured("GPUOnly", 1.0, 2.0, 3.0), measured("Central", 1.0, 4.0, 9.0)]
    wrong, right = thesis.choices(rows)
    assert (wrong["best"]["policy"], wrong["chosen"]["policy"], wrong["regret"]) == ("GPUOnly", "Central", 2.0)
    assert (right["best"]["policy"], right["chosen"]["policy"], right["regret"]) == ("GPUOnly", "GPUOnly", 1.0)


@pytest.mark.slow
def test_tiny_runs_of_policies_fill_the_record_the_page_and_the_figure(tmp_path, page, monkeypatch, capsys):
    page, record, svg = page("thesis"), tmp_path / "thesis.json", tmp_path / "thesis.svg"
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


def test_a_file_without_a_folder_is_refused_before_what_it_shows(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--svg", type=new_file)
    assert parser.parse_args(["--svg", str(tmp_path / "x.svg")]).svg == tmp_path / "x.svg"
    refused = {tmp_path / "no" / "x.svg": f"needs the folder {tmp_path / 'no'}; create it", tmp_path: "is a folder"}
    for given, message in refused.items():
        with pytest.raises(SystemExit):
            parser.parse_args(["--svg", str(given)])
        assert message in " ".join(capsys.readouterr().err.split())
