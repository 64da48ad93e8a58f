"""Pages of results say what the records say; the records of the repository make them."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from msrl_jax import cli
from msrl_jax.report import pages
from msrl_jax.report.pages import ResultRow, curve, rows, write_pages
from msrl_jax.run import recipes
from msrl_jax.run.recipes import Recipe, Record

DOCS = Path(__file__).parents[2] / "docs"
RECORDS = Path(__file__).parents[2] / "benchmarks" / "records"
VALUES = {"algo": "ppo", "env": "CartPole-v1", "total_steps": 490_000, "learning_rate": 0.1}
RECORD = Record(
    recipe="mine",
    settings=VALUES,
    config={},
    seeds=[0, 1],
    steps=[100, 200, 300],
    returns=[[None, 2.0, 4.0], [None, None, 6.0]],
    last=[4.0, 6.0],
    best=[7.0, 9.0],
    best_steps=[300, 300],
    evaluations=[300],
    episodes=256,
    score="return",
    seconds={"wall": 12.0, "compile": 3.0},
    commit="abc",
    date="2026-01-01",
    versions={"jax": "1", "gymnax": "2", "msrl-jax": "3"},
    hardware={"platform": "cpu", "kind": "cpu", "count": 1, "processor": "A CPU", "cores": 2},
)


@pytest.fixture
def records(tmp_path, monkeypatch):
    """A folder of records, in place of that of the clone."""
    folder = tmp_path / "records"
    folder.mkdir()
    monkeypatch.setattr(recipes, "RECORDS", (folder,))
    return folder


@pytest.fixture
def mine(tmp_path, records, monkeypatch):
    """A folder of recipes that has one of its own, which has a record."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    (records / "published.toml").write_text((RECORDS / "published.toml").read_text())
    (folder / "mine.toml").write_text("# Made up.\n" + "".join(f"{k} = {v!r}\n" for k, v in VALUES.items()))
    RECORD.write(records / "mine.json")
    monkeypatch.setattr(recipes, "FOLDER", folder)
    return folder


def test_pages_have_scores_settings_and_published_returns_at_equal_steps(mine, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "thesis.md").write_text("stays")
    (docs / "old.md").write_text(f"gone {pages._MARK}")
    names = {path.name for path in write_pages(docs)}
    assert names == {"index.md", "ppo.md", "mine.svg", "classic-control.md", "classic-control-cartpole-v1.svg"}
    assert not (docs / "old.md").exists() and (docs / "thesis.md").read_text() == "stays"
    index, algorithm = (docs / "index.md").read_text(), (docs / "ppo.md").read_text()
    cells = "| [mine](ppo.md#mine) | CartPole-v1 | 490,000 | 5.0 [4.0, 6.0] | 8.0 [7.0, 9.0] | 490 ± 6.1 [CleanRL]"
    assert cells in index and "| 12 s, 2 seeds, 2 cores |" in index
    below = "5.0 [4.0, 6.0] against 490 ± 6.1 [CleanRL]"
    assert f"Below others: {below}" in algorithm and f"- mine: {below}" in index.partition("## Where others are better")[2]
    about = ("Made up.", "`msrl-jax reproduce mine --seeds 19`; learning_rate=0.1.", "A CPU, 2 cores: wall 12 s")
    for part in (*about, "Seeds 0 to 1, 2026-01-01, jax 1, gymnax 2, msrl-jax 3, commit abc"):
        assert part in algorithm
    again = {path.name: path.read_text() for path in write_pages(tmp_path / "again")}
    assert again == {path.name: path.read_text() for path in write_pages(docs)}


def test_pages_overwrite_nothing_that_they_did_not_write(mine, tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("mine")
    for names in ([], ["mine"]):  # which is not trained before
        assert cli.main(["reproduce", *names, "--pages", str(tmp_path / "docs"), "--out", str(tmp_path / "out")]) == 2
        assert "index.md, which it did not write; choose another folder" in capsys.readouterr().err
    (tmp_path / "docs" / "index.md").unlink()
    for name in ("mine.svg", "classic-control.md", "classic-control-cartpole-v1.svg"):
        (tmp_path / "docs" / name).write_text("mine")
        assert cli.main(["reproduce", "mine", "--pages", str(tmp_path / "docs"), "--out", str(tmp_path / "out")]) == 2
        assert f"{name}, which it did not write; choose another folder" in capsys.readouterr().err
        (tmp_path / "docs" / name).unlink()
    (tmp_path / "file").write_text("")
    assert cli.main(["reproduce", "mine", "--pages", str(tmp_path / "file"), "--out", str(tmp_path / "out")]) == 2
    assert "file (File exists); choose another folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "docs").iterdir())


def test_returns_published_at_other_steps_are_left_out_but_not_those_that_tell_none(mine, records):
    (row,) = rows()
    assert {x["source"] for x in row.published} == {"CleanRL", "gymnax"}
    (mine / "mine.toml").write_text((mine / "mine.toml").read_text().replace("490000", "400000"))
    dataclasses.replace(RECORD, settings=VALUES | {"total_steps": 400_000}).write(records / "mine.json")
    (row,) = rows()
    assert row.cells()[5] == "500 [gymnax](https://github.com/RobertTLange/gymnax), checkpoint, steps not told"


def test_higher_returns_after_fewer_steps_are_shown_and_remarks_say_why(mine, records):
    row = 'source = "They"\nurl = "u"\nalgo = "ppo"\nenv = "CartPole-v1"\nscore = "greedy"\n'
    higher, lower = (f"[[row]]\n{row}steps = 50_000\nvalue = {value}\n" for value in (9, 7))
    (records / "published.toml").write_text(f'{higher}remark = "Why."\n{lower}')
    (found,) = rows()
    assert found.cells()[5] == "9 [They](u), greedy, after 50,000 steps"
    rows_of_variant = higher.replace("algo", 'variant = "ppo-wide"\nalgo').replace("They", "Wide")
    (records / "published.toml").write_text(higher + rows_of_variant)
    (mine / "ppo-wide-cartpole.toml").write_text((mine / "mine.toml").read_text())
    RECORD.write(records / "ppo-wide-cartpole.json")
    assert [[x["source"] for x in row.published] for row in rows()] == [["They"], ["Wide"]]
    assert found.below() == ["8.0 [7.0, 9.0] against 9 [They](u), greedy, after 50,000 steps, within the interval. Why."]


def test_a_curve_is_the_mean_over_the_seeds_once_all_have_returns():
    steps, middle, low, high = curve(RECORD)
    np.testing.assert_array_equal(steps, [300])
    np.testing.assert_array_equal([middle[0], low[0], high[0]], [5.0, 4.0, 6.0])


def test_a_suite_says_which_variant_is_better(mine, records, tmp_path):
    """By hand: 4 and 6 against 5 and 5, against 3 and 3; at other steps there is nothing to compare."""
    others = {"ppo-wide-cartpole": [5.0, 5.0], "dqn-cartpole": [3.0, 3.0], "pqn-cartpole": [9.0, 9.0]}
    (mine / "mine.toml").rename(mine / "ppo-cartpole.toml")
    (records / "mine.json").rename(records / "ppo-cartpole.json")
    for name, last in others.items():
        values = VALUES | {"total_steps": 100_000 if name == "pqn-cartpole" else VALUES["total_steps"]}
        (mine / f"{name}.toml").write_text("".join(f"{k} = {v!r}\n" for k, v in values.items()))
        best = [8.0, 8.0]  # against 7 and 9
        dataclasses.replace(RECORD, recipe=name, settings=values, last=last, best=best).write(records / f"{name}.json")
    write_pages(tmp_path)
    page = (tmp_path / "classic-control.md").read_text()
    for title, beside_dqn in (("### In training", "1.00 [1.00, 1.00] (1)"), ("### Their best agents", "0.50 [0.00, 1.00] (1)")):
        parts = [line.split("|") for line in page.partition(title)[2].partition("###")[0].splitlines()]
        table = {cells[1].strip(): [c.strip() for c in cells[2:-1]] for cells in parts if len(cells) == 7}
        assert list(table) == ["", "---", "dqn", "ppo", "ppo-wide", "pqn"]
        assert table["ppo"] == [beside_dqn, "", "0.50 [0.00, 1.00] (1)", ""]
        assert table["pqn"] == [""] * 4


def test_suites_are_found_by_the_environment():
    def suite(env):
        return ResultRow(Recipe("mine", Path(), "", VALUES | {"env": env}), RECORD, ()).suite

    found = [suite(env) for env in ("Pendulum-v1", "Breakout-MinAtar", "craftax:Craftax-Symbolic-v1", "gymnasium:Hopper-v5")]
    assert found == ["Classic control", "MinAtar", "Craftax", "Gymnasium"]


def test_the_command_writes_pages_without_names(mine, tmp_path, capsys):
    assert cli.main(["reproduce", "--pages", str(tmp_path / "docs")]) == 0
    assert "5 files" in capsys.readouterr().out
    assert cli.main(["reproduce"]) == 2 and "name recipes" in capsys.readouterr().err


@pytest.mark.long
def test_the_records_of_the_repository_make_pages_that_show_their_numbers_and_have_no_dead_link(tmp_path, monkeypatch):
    for name, drawn in {"curve": (), "draw_curve": None, "finished": None, "svg_of": "<svg>\n</svg>\n"}.items():
        monkeypatch.setattr(pages, name, lambda *args, drawn=drawn: drawn)  # drawing takes most of the time
    texts = {path.name: path.read_text() for path in write_pages(tmp_path / "results")}
    assert set(texts) == {path.name for path in (tmp_path / "results").iterdir()}
    (tmp_path / "results.md").write_text((DOCS / "results.md").read_text())
    for name, text in texts.items():
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^):]*)?\)", text):
            assert (tmp_path / "results" / link).exists(), (name, link)
    records, index = {path.stem: Record.read(path) for path in RECORDS.glob("*.json")}, texts["index.md"]
    assert {row.recipe.name for row in rows()} == set(records)
    for name, record in records.items():
        assert texts[f"{name}.svg"].splitlines()[-2] == f"<!-- {record.sum} -->"
        line, page = re.search(rf"^\| \[{name}\]\((\w+\.md)#{name}\).*", index, re.MULTILINE).group(0, 1)
        shown = [float(cell.split()[0]) for cell in line.split("|")[4:6]]
        np.testing.assert_allclose(shown, [np.mean(record.last), np.mean(record.best)], rtol=0.02, atol=0.005)
        assert f"\n## {name}\n" in texts[page] and line in texts[page]
