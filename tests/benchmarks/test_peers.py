"""Comparisons with other libraries, which train in other processes: turns, records, and tables in pages."""

import json
import sys
import textwrap

import numpy as np
import pytest

from benchmarks import compare_rllib as rllib
from benchmarks import reactor, suite_trainers
from benchmarks.comparison import Peer, Setting, chosen, merge, others_seconds, rewrite, table

SETTING = Setting("ppo", "CartPole-v1", {"num_envs": 4, "unroll_length": 128})
PAGE = "# Speed\n\n<!-- rejax: begin -->\nold\n<!-- rejax: end -->\n\nText.\n<!-- other: begin -->\nkept\n<!-- other: end -->\n"
SMALL = {"num_envs": 2, "unroll_length": 8, "num_minibatches": 2, "num_epochs": 1}
BRAX = """\
    import json, sys
    task = json.loads(sys.argv[sys.argv.index("--setting") + 1])
    print(json.dumps({"device": "cpu", "versions": {"brax": "0"}}), flush=True)
    for seed in map(json.loads, sys.stdin):
        answer = {"return": 10.0 * (seed + 1), "steps": task["total_steps"], "seconds": 3.0}
        print(json.dumps(answer), flush=True)
    """
RLLIB = """\
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
RAY = """\
    import json, sys
    print(json.dumps({"versions": {"ray": "0"}}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps({"steps_per_second": {"step": 100.0, "unroll": 1000.0}[request["call"]]}), flush=True)
    """


def row(label, ours, theirs, others=0.25):
    return {
        "label": label,
        "ours": sorted(ours)[1],
        "theirs": sorted(theirs)[1],
        "ratio": sorted(ours)[1] / sorted(theirs)[1],
        "our_runs": ours,
        "their_runs": theirs,
        "flops_per_step": 3e6,
        "peak_flops": 1e11,
        "load": 1.5,
        "others": others,
        "commit": "abc",
        "peer_versions": {"rejax": "0.1.3", "jax": "0.10"},
    }


def record(*rows, **changes):
    machine = {"cpu": "A CPU", "cores": 2, "device": "cpu"}
    versions = {"jax": "0.10"}
    same = {"peer": "Rejax", "machine": machine, "versions": versions, "repeats": 3, "seconds": 2.0}
    return same | {"rows": list(rows)} | changes


def test_the_table_has_medians_ratios_versions_and_the_machine():
    found = table(record(row("ppo a", [3000.0, 1000.0, 2000.0], [1000.0] * 3), row("dqn b", [10.0] * 3, [20.0] * 3, None)))
    assert found == textwrap.dedent("""\
        | setting | msrl_jax | Rejax | ratio | ratio of each round | share of peak | cores of others | commit |
        |---|---|---|---|---|---|---|---|
        | ppo a | 2,000 | 1,000 | 2.00 | 1.00 to 3.00 | 6% | 0.25 | abc |
        | dqn b | 10 | 20 | 0.50 | 0.50 to 0.50 | 0% | - | abc |

        Medians of 3 rounds of 2 s, on 2 cores of A CPU (cpu). msrl_jax: jax 0.10; Rejax: rejax 0.1.3, jax 0.10.""")


def test_only_the_marked_part_of_a_page_is_rewritten():
    once = rewrite(PAGE, "rejax", "new")
    assert once == PAGE.replace("\nold\n", "\n\nnew\n\n")
    assert rewrite(once, "rejax", "new") == once


@pytest.mark.parametrize("page", ["", PAGE + PAGE, "<!-- rejax: end --> <!-- rejax: begin -->"])
def test_a_page_without_one_pair_of_markers_is_refused(page):
    with pytest.raises(ValueError, match="needs one line '<!-- rejax: begin -->'"):
        rewrite(page, "rejax", "new")


def test_rows_of_one_machine_and_version_make_one_record():
    old, new = row("a", [1.0] * 3, [1.0] * 3), row("a", [2.0] * 3, [1.0] * 3)
    other = row("b", [1.0] * 3, [1.0] * 3)
    assert merge(None, record(new)) == record(new)
    assert merge(record(old, other), record(new)) == record(new, other)
    with pytest.raises(ValueError, match="versions"):
        merge(record(old, versions={"jax": "0.11"}), record(new))
    with pytest.raises(ValueError, match="several versions of Rejax"):
        merge(record(old, other | {"peer_versions": {"rejax": "0.1.2"}}), record(new))


def test_settings_are_chosen_by_words_in_their_labels():
    dqn = Setting("dqn", "CartPole-v1", {"num_envs": 16, "unroll_length": 1, "num_updates": 2, "batch_size": 128})
    seeds = Setting("ppo", "CartPole-v1", SETTING.config, seeds=64)
    settings = [SETTING, dqn, seeds]
    assert [s.label for s in settings] == [
        "ppo CartPole-v1 4 x 128",
        "dqn CartPole-v1 16 x 1, 2 x 128",
        "ppo CartPole-v1 4 x 128, 64 seeds",
    ]
    assert chosen(settings, []) == settings
    assert chosen(settings, ["dqn", "seeds"]) == [dqn, seeds]
    with pytest.raises(ValueError, match="'sac' in its label; the labels: ppo CartPole"):
        chosen(settings, ["dqn", "sac"])


@pytest.fixture
def command(tmp_path):
    """A worker without JAX: it answers a number of seconds with a thousand times that, and fails above 1 s."""
    path = tmp_path / "worker.py"
    path.write_text(
        textwrap.dedent("""\
        import json, sys
        assert json.loads(sys.argv[2])["env"] == "CartPole-v1"
        print(json.dumps({"compile_seconds": 2.5, "versions": {"a": "1"}, "device": "cpu"}), flush=True)
        for line in sys.stdin:
            if float(line) > 1:
                sys.exit(3)
            print(json.dumps({"steps_per_second": 1000 * float(line)}), flush=True)
        """)
    )
    return [sys.executable, path]


def test_a_peer_answers_in_turns_and_ends(command):
    with Peer(command, SETTING) as peer:
        assert peer.about == {"compile_seconds": 2.5, "versions": {"a": "1"}, "device": "cpu"}
        assert [peer.run(0.25), peer.run(0.5)] == [250.0, 500.0]
        assert others_seconds(peer.pid) is None or others_seconds(peer.pid) >= 0
        with pytest.raises(RuntimeError, match="ended with code 3"):
            peer.run(2.0)


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
def test_tiny_runs_fill_the_record_and_the_page(setting, tmp_path, page, worker, monkeypatch, capsys):
    page, record = page("rllib"), tmp_path / "record.json"
    worker(rllib, "rllib_worker.py", RLLIB)
    monkeypatch.setattr(rllib, "SETTINGS", [setting])
    monkeypatch.setattr(rllib, "TARGETS", {"CartPole-v1": 9.0})
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


def test_seeds_take_turns_and_fill_the_record_and_the_page(tmp_path, page, worker, monkeypatch, capsys):
    def ours(task, seed):
        return {"return": 100.0 * (seed + 1), "steps": task.total_steps, "seconds": 2.0}

    page, record = page("suite_trainers"), tmp_path / "record.json"
    worker(suite_trainers, "brax_worker.py", BRAX)
    monkeypatch.setattr(suite_trainers, "ours", ours)
    arguments = ["--brax", sys.executable, "--json", str(record), "--docs", str(page), "--seeds", "3"]
    suite_trainers.main([*arguments, "--only", "inverted_pendulum"])
    said = [line.split()[1:4] for line in capsys.readouterr().out.splitlines() if line.startswith("brax:")]
    assert [(who, seed) for who, _, seed in said] == [
        ("ours", "0,"),
        ("theirs", "0,"),
        ("theirs", "1,"),
        ("ours", "1,"),
        ("ours", "2,"),
        ("theirs", "2,"),
    ]
    text = page.read_text()
    assert "stale" not in text
    assert "| 200 (100 to 300) | 20 (10 to 30) | 2 (2 to 2) | 3 (3 to 3) |" in text
    suite_trainers.main([*arguments, "--only", "Balance"])
    rows = json.loads(record.read_text())["rows"]
    assert [row["label"] for row in rows] == ["brax:inverted_pendulum", "playground:CartpoleBalance"]
    for wrong in (["--only", "nothing"], ["--seeds", "0"]):
        with pytest.raises(SystemExit):
            suite_trainers.main([*arguments, *wrong])


def test_turns_with_ray_fill_the_record_and_the_page(tmp_path, page, worker):
    page, record = page("reactor"), tmp_path / "record.json"
    worker(reactor, "reactor_worker.py", RAY)
    arguments = ["--ray", sys.executable, "--only", "inference 2", "--repeats", "3", "--seconds", "0.01"]
    reactor.main([*arguments, "--json", str(record), "--docs", str(page)])
    (row,) = json.loads(record.read_text())["rows"]
    assert row["runs"][reactor.STEP] == [100.0] * 3 and len(row["runs"][reactor.HOST]) == 3
    ratios = sorted(x / 100 for x in row["runs"][reactor.HOST])
    text = page.read_text()
    assert "stale" not in text and f"{ratios[1]:,.2f} ({ratios[0]:,.2f} to {ratios[2]:,.2f})" in text
    with pytest.raises(SystemExit):
        reactor.main([*arguments[:2], "--json", str(record), "--only", "nothing"])
