"""The benchmarks beside Ray's actors and of groups of simulators: turns, what both sides compute, the records and the page."""

import json
import os
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from benchmarks import groups, reactor, reactor_worker

WORKER = """\
    import json, sys
    print(json.dumps({"versions": {"ray": "0"}}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps({"steps_per_second": {"step": 100.0, "unroll": 1000.0}[request["call"]]}), flush=True)
    """


step_of_the_lake = jax.jit(lambda state, action: reactor.Lake().step(jax.random.key(0), state, action))


def page_of(path, name):
    path.write_text(f"# Claims\n\n<!-- {name}: begin -->\nstale\n<!-- {name}: end -->\n")
    return path


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


def test_turns_with_a_peer_fill_the_record_and_the_page(tmp_path, monkeypatch, capsys):
    page, record, worker = page_of(tmp_path / "claims.md", "reactor"), tmp_path / "r.json", tmp_path / "reactor_worker.py"
    worker.write_text(textwrap.dedent(WORKER))
    monkeypatch.setattr(reactor, "__file__", str(tmp_path / "reactor.py"))
    arguments = ["--ray", sys.executable, "--only", "inference 2", "--repeats", "3", "--seconds", "0.01"]
    reactor.main([*arguments, "--json", str(record), "--docs", str(page)])
    (row,) = json.loads(record.read_text())["rows"]
    assert row["runs"][reactor.STEP] == [100.0] * 3 and len(row["runs"][reactor.HOST]) == 3
    ratios = sorted(x / 100 for x in row["runs"][reactor.HOST])
    text = page.read_text()
    assert "stale" not in text and f"{ratios[1]:,.2f} ({ratios[0]:,.2f} to {ratios[2]:,.2f})" in text
    with pytest.raises(SystemExit):
        reactor.main([*arguments[:2], "--json", str(record), "--only", "nothing"])


@pytest.mark.slow
def test_tiny_runs_of_groups_fill_the_record_and_the_page(tmp_path, monkeypatch, capsys):
    page, record = page_of(tmp_path / "claims.md", "groups"), tmp_path / "groups.json"
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
def test_ray_answers_with_its_speed():
    python = os.environ.get("RLLIB_PYTHON")
    if not python:
        pytest.skip("RLLIB_PYTHON names no Python with Ray")
    (setting,) = reactor.chosen(reactor.SETTINGS, ["inference 2"])
    command = [python, Path(reactor_worker.__file__)]
    with reactor.Peer(command, setting) as peer:
        assert reactor.Calling(peer, "step").run(0.1) > 0
