"""Comparisons with other libraries: turns with another process, the record, and the table in a page."""

import sys
import textwrap

import pytest

from benchmarks.comparison import Peer, Setting, chosen, merge, others_seconds, rewrite, table

SETTING = Setting("ppo", "CartPole-v1", {"num_envs": 4, "unroll_length": 128})
PAGE = "# Speed\n\n<!-- rejax: begin -->\nold\n<!-- rejax: end -->\n\nText.\n<!-- other: begin -->\nkept\n<!-- other: end -->\n"


def row(label, ours, theirs, others=0.25):
    return {
        "label": label, "ours": sorted(ours)[1], "theirs": sorted(theirs)[1], "ratio": sorted(ours)[1] / sorted(theirs)[1],
        "our_runs": ours, "their_runs": theirs, "flops_per_step": 3e6, "peak_flops": 1e11, "load": 1.5, "others": others,
        "commit": "abc",
        "peer_versions": {"rejax": "0.1.3", "jax": "0.10"},
    }  # fmt: skip


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
        "ppo CartPole-v1 4 x 128", "dqn CartPole-v1 16 x 1, 2 x 128", "ppo CartPole-v1 4 x 128, 64 seeds",
    ]  # fmt: skip
    assert chosen(settings, []) == settings
    assert chosen(settings, ["dqn", "seeds"]) == [dqn, seeds]
    with pytest.raises(ValueError, match="'sac' in its label; the labels: ppo CartPole"):
        chosen(settings, ["dqn", "sac"])


@pytest.fixture
def worker(tmp_path):
    """A worker without JAX: it answers with a thousand times the seconds that it is asked for, and fails above 1 s."""
    path = tmp_path / "worker.py"
    path.write_text(textwrap.dedent("""\
        import json, sys
        assert json.loads(sys.argv[2])["env"] == "CartPole-v1"
        print(json.dumps({"compile_seconds": 2.5, "versions": {"a": "1"}, "device": "cpu"}), flush=True)
        for line in sys.stdin:
            if float(line) > 1:
                sys.exit(3)
            print(json.dumps({"steps_per_second": 1000 * float(line)}), flush=True)
        """))
    return [sys.executable, path]


def test_a_peer_answers_in_turns_and_ends(worker):
    with Peer(worker, SETTING) as peer:
        assert peer.about == {"compile_seconds": 2.5, "versions": {"a": "1"}, "device": "cpu"}
        assert [peer.run(0.25), peer.run(0.5)] == [250.0, 500.0]
        assert others_seconds(peer.pid) is None or others_seconds(peer.pid) >= 0
        with pytest.raises(RuntimeError, match="ended with code 3"):
            peer.run(2.0)
