"""A page about runs says what they are, differ in and took; it is one file that loads nothing."""

import dataclasses
import html.parser
import re
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.cli import main
from msrl_jax.report.curves import mean_curve
from msrl_jax.report.runs_figure import groups_of
from msrl_jax.report.statistics import estimate, mean
from msrl_jax.run.evaluation.history import stack_rows
from tests.support.full_disk import no_file_above

pytestmark = pytest.mark.long

TINY = {
    "num_envs": 8,
    "unroll_length": 8,
    "num_epochs": 1,
    "num_minibatches": 2,
    "hidden_sizes": (8,),
    "total_steps": 6 * 64,
    "chunk": 1,
    "eval_episodes": 2,
    "eval_every": 128,
    "progress": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a run of three seeds."""
    path = tmp_path_factory.mktemp("runs") / "a<b"
    msrl.train("ppo", "CartPole-v1:max_steps_in_episode=30", seeds=3, out=path, devices=jax.devices()[:1], **TINY)
    return path


@pytest.fixture(scope="module")
def run(folder):
    return msrl.Result.load(folder)


class Reader(html.parser.HTMLParser):
    """The rows of all tables, the titles, and what is loaded."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.titles, self.loads, self.inside = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.inside = tag
        self.loads += [value for name, value in attrs if name in ("src", "href") and not value.startswith("#")]
        self.loads += [tag] * (tag in ("script", "link", "iframe", "img"))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside in ("td", "th"):
            self.rows[-1][-1] += data
        elif self.inside in ("h1", "h2", "h3"):
            self.titles.append(data.strip())


def test_a_page_has_the_scores_settings_and_times_of_every_run(folder, run, tmp_path):
    about = run.description | {"config": run.description["config"] | {"learning_rate": 1e-4}}
    other = dataclasses.replace(run, description=about, folder=None)
    page = msrl.runs_page({"first": folder, "second": other}, tmp_path / "page.html", title="a & b")
    text = page.read_text()
    found = Reader(text)
    assert found.titles[0] == "a & b" and not found.loads
    assert ["learning_rate", "0.003", "0.0001"] in found.rows  # what they differ in; the rest is told once
    assert ["num_envs", "8"] in found.rows and ["learning_rate", "0.003"] not in found.rows
    head, first, second = found.rows[:3]
    row = dict(zip(head, first, strict=True))
    greedy = row["greedy return"], str(estimate([run.evaluation.mean_return], mean))
    assert row["training return"] == str(estimate([run.final("episode_return")], mean)) and greedy[0] == greedy[1]
    assert (row["seeds"], row["algorithm"], row["steps"], row["status"]) == ("0 to 2", "ppo", "384", "finished")
    assert (first[0], second[0]) == ("first", "second") and first[1:] == second[1:] and "setting" not in head
    (times,) = [row for row in found.rows if row[0] == "first" and row[1].endswith(" s")]
    wall, *parts = (float(cell.removesuffix(" s").replace(",", "")) for cell in times[1:-2])
    assert times[-1] == f"{run.steps_per_second:,.0f}"
    assert abs(wall - run.wall_seconds) < 0.06 and abs(wall - sum(parts)) < 0.5
    assert text.count("FillBetweenPolyCollection") >= 4  # the returns and evaluations of two runs, with their intervals
    assert "run.toml</summary>" in text and "training return" in text


def test_every_fact_that_two_runs_differ_in_is_a_row(run, tmp_path):
    facts = {
        "algorithm": "a",
        "env": "b",
        "env_params": {"c": 1, "d": 0.5},
        "total_steps": 3_000_000,
        "seed": 30_000,
        "seeds": 3,
        "settings": {"discount": [0.5, 0.125]},
        "rank_by": "success",
        "guard": "skip",
        "data": {"path": "e"},
        "policy": "f",
    }
    other = dataclasses.replace(run, description=run.description | facts, folder=None)
    other = dataclasses.replace(other, history=stack_rows([], other.description), evaluation=None)
    found = Reader(msrl.runs_page({"first": run, "second": other}, tmp_path / "page.html").read_text())
    rows = {row[0]: row[1:] for row in found.rows}
    words = {
        "algorithm": ["ppo", "a"],
        "env": [run.description["env"], "b"],
        "env_params": ["-", "c: 1, d: 0.5"],
        "total_steps": ["384", "3,000,000"],
        "seed": ["0", "30000"],
        "seeds": ["3"],
        "discount": ["0.99", "0.5, 0.125"],
        "rank_by": ["return", "success"],
        "guard": ["halt", "skip"],
        "data": ["-", "path: e"],
        "policy": ["GPUOnly", "f"],
        "hidden_sizes": ["8"],
        "max_grad_norm": ["0.5"],
    }
    assert {name: rows[name] for name in words} == words and "settings" not in rows


def with_settings(run, count, pbt=None):
    """The run as if it had had `count` settings, of three seeds each, whose returns are 100 apart; seeds differ by 1."""
    about = run.description | {"settings": {"learning_rate": [10.0**-i for i in range(count)]}, "pbt": pbt}
    about |= {"seeds": 1} if pbt else {}
    returns = np.arange(count if pbt else count * 3)
    returns = returns if pbt else 100.0 * (returns // 3) + returns % 3
    history = {name: run.history[name] for name in ("step", "seconds", "iteration")}
    history["episode_return"] = np.tile(returns.astype(float), (len(history["step"]), 1))
    return dataclasses.replace(run, description=about, history=history, evaluation=None, folder=None)


def test_each_setting_has_a_row_and_a_curve_with_the_interval_of_its_own_seeds(run, tmp_path):
    sweep = with_settings(run, 3)
    head, *rows = Reader(msrl.runs_page({"rates": sweep}, tmp_path / "page.html").read_text()).rows[:4]
    assert [row[head.index("setting")] for row in rows] == ["learning_rate=1", "learning_rate=0.1", "learning_rate=0.01"]
    for i, row in enumerate(rows):
        assert row[head.index("training return")] == str(estimate([100.0 * i + np.arange(3)], mean))
        assert row[head.index("seeds")] == "0 to 2" and row[0] == "rates"
    (panel,) = msrl.plot_runs({"rates": sweep}).axes
    assert [line.get_ydata()[-1] for line in panel.get_lines()] == [1, 101, 201]
    assert all(np.ptp(band.get_paths()[0].vertices[:, 1]) <= 2 for band in panel.collections)
    (panel,) = msrl.plot_runs({"rates": sweep}, metrics=["seconds"]).axes
    (line,) = panel.get_lines()  # of all settings together
    assert line.get_label() == "rates" and line.get_ydata().tolist() == sweep.history["seconds"].tolist()


def with_seed(run, seed, rate, score, chunks, env=None):
    """One seed of the run, as if it had been trained by itself, with another return and number of chunks."""
    about = run.description | {"seed": seed, "seeds": 1, "config": run.description["config"] | {"learning_rate": rate}}
    about |= {"env": env or about["env"]}
    step = np.linspace(64, 384, chunks)
    history = {"step": step, "seconds": step / 64, "iteration": step // 64, "episode_return": step * score}
    return dataclasses.replace(run, description=about, history=history, evaluation=None, folder=None)


def test_seeds_that_were_trained_one_by_one_are_one_row_and_one_curve(run, tmp_path):
    seeds = {f"s{seed}": with_seed(run, seed, 0.1, seed, chunks) for seed, chunks in ((5, 6), (6, 4), (7, 11))}
    again = with_seed(run, 5, 0.1, 5, 6)  # the same seed again, as under another policy
    page = msrl.runs_page(seeds | {"again": again, "rates": with_settings(run, 2)}, tmp_path / "page.html").read_text()
    head, *rows = Reader(page).rows[:4]
    assert [(row[0], row[head.index("setting")], row[head.index("seeds")]) for row in rows] == [
        ("s5, s6, s7, rates", "learning_rate=0.1", "0, 1, 2, 5, 6, 7"),
        ("again", "learning_rate=0.1", "5"),
        ("rates", "learning_rate=1", "0 to 2"),
    ]
    returns = [*(run.final("episode_return") for run in seeds.values()), 100.0, 101.0, 102.0]
    assert rows[0][head.index("training return")] == str(estimate([returns], mean))
    (panel,) = msrl.plot_runs(seeds).axes
    (line,), (band,) = panel.get_lines(), panel.collections
    np.testing.assert_allclose(line.get_xdata(), np.linspace(64, 384, 4))  # the steps of the run with the fewest
    np.testing.assert_allclose(line.get_ydata(), 6 * line.get_xdata())  # the returns are linear, and interpolated
    assert line.get_label() == "s5, s6, s7" and np.ptp(band.get_paths()[0].vertices[:, 1]) > 64
    del seeds["s6"].history["episode_return"]  # no episode has ended yet, nor in one seed of the other run
    pair = with_settings(run, 2)
    pair.history["episode_return"][:, 3] = np.nan
    labels = [line.get_label() for line in msrl.plot_runs(seeds | {"rates": pair}).axes[0].get_lines()]
    assert labels == ["s5, s6, s7, rates, learning_rate=0.1", "rates, learning_rate=1"]


@pytest.mark.parametrize("fact", ["algorithm", "env", "env_params", "total_steps", "rank_by", "guard", "data", "config"])
def test_runs_that_differ_in_more_than_their_seeds_are_not_seeds_of_one_setting(fact):
    def run(seed, x):
        about = {"pbt": None, "config": {}, fact: {"x": x}}
        return SimpleNamespace(members=1, settings=[{"seed": seed}], description=about)

    groups = groups_of({"a": run(0, 1), "b": run(1, 1), "c": run(2, 2)}, max_settings=9)
    assert [group.names for group in groups] == ["a, b", "c"]


PBT = {"members": 4, "every": 2}


@pytest.mark.parametrize(("count", "pbt", "label"), [(11, None, "11 settings"), (4, PBT, "population of 4")])
def test_members_that_are_not_only_seeds_have_no_interval(run, tmp_path, count, pbt, label):
    mixed = with_settings(run, count, pbt)
    returns = mixed.history["episode_return"][-1]
    (panel,) = msrl.plot_runs({"a": mixed}).axes
    (line,), (band,) = panel.get_lines(), panel.collections
    assert line.get_label() == f"a, {label}, lowest to highest" and line.get_ydata()[-1] == pytest.approx(returns.mean())
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (returns.min(), returns.max())
    if pbt:
        head, row = Reader(text := msrl.runs_page({"a": mixed}, tmp_path / "page.html").read_text()).rows[:2]
        assert row[head.index("training return")] == "1.5 (0.0 to 3.0)" and row[head.index("setting")] == label
        assert "In parentheses: lowest and highest member" in text and "In brackets" not in text


def test_each_environment_has_a_panel_of_its_own(run, tmp_path):
    other = with_settings(run, 2)
    other = dataclasses.replace(other, description=other.description | {"env": "Acrobot-v1"})
    panels = msrl.plot_runs({"first": run, "second": other}, metrics=["episode_return", "entropy"]).axes
    assert [panel.get_title() for panel in panels] == [run.description["env"], "Acrobot-v1", run.description["env"]]
    assert [len(panel.get_lines()) for panel in panels] == [1, 2, 1]  # the second run has no entropy
    found = Reader(msrl.runs_page({"first": run, "second": other}, tmp_path / "page.html").read_text())
    curves = found.titles[found.titles.index("Curves") : found.titles.index("Settings")]
    assert curves == ["Curves", run.description["env"], "Acrobot-v1"]


def test_names_are_those_of_folders_and_are_escaped(folder, run, tmp_path):
    text = msrl.runs_page([folder, dataclasses.replace(run, folder=None)], tmp_path / "page.html").read_text()
    assert "a&lt;b" in text and "a<b" not in text and "seed 0" in text
    assert "All settings are equal." in text


def test_bars_of_times_have_one_scale_and_settings_that_one_run_lacks_differ(run, tmp_path):
    other = run.experiment.replaced(algorithm=msrl.algorithms.A2C(num_envs=8))
    slow = dataclasses.replace(run, wall_seconds=4 * run.wall_seconds, timings={"train_seconds": 3 * run.wall_seconds})
    slow = dataclasses.replace(slow, compile_seconds=0.0, description={**run.description, **other.to_json()}, folder=None)
    text = msrl.runs_page({"quick": run, "slow": slow}, tmp_path / "page.html").read_text()
    bars = [sum(map(float, re.findall(r"width:([\d.]+)%", bar))) for bar in re.findall('<div class="bar">(.*?)</div>', text)]
    np.testing.assert_allclose(bars, [25, 100], atol=0.1)
    rows = Reader(text).rows
    assert ["num_epochs", "1", "-"] in rows and ["algorithm", "ppo", "a2c"] in rows and ["num_envs", "8"] in rows


def test_a_curve_is_the_mean_over_seeds_with_its_interval():
    steps, nan = np.arange(1, 7) * 10, np.nan
    values = np.array([[1, 3], [2, nan], [3, 5], [4, 4], [nan, nan], [6, 8]])
    at, middle, low, high = mean_curve(steps, values)
    np.testing.assert_array_equal(at, steps)
    np.testing.assert_allclose(middle, [2, 2.5, 4, 4, 4, 7])  # the last value that is known counts
    assert (low <= middle).all() and (middle <= high).all() and low[0] >= 1 and high[0] <= 3
    long = np.arange(500.0)[:, None]
    at, middle, _, _ = mean_curve(np.arange(500), long)
    assert len(at) == 50 and at[-1] == 499
    np.testing.assert_allclose(middle, long.reshape(50, 10).mean(1))


def test_a_page_draws_plans_and_shows_the_last_film(folder, run, tmp_path):
    films = folder / "videos"
    films.mkdir()
    for step, content in ((64, b"first"), (128, b"last")):
        (films / f"{step}.gif").write_bytes(content)
    text = msrl.runs_page(folder, tmp_path / "page.html", plans=True).read_text()
    shutil.rmtree(films)
    assert text.count('<svg class="msrl-plan"') == 1 and "GPUOnly()" in text
    assert text.count("data:image/gif") == 1 and "data:image/gif;base64,bGFzdA==" in text and "after 128 steps" in text
    larger = dataclasses.replace(run, description={**run.description, "devices": {"count": 64, "platform": "cpu"}})
    with pytest.raises(ValueError, match="had 64 devices, but here are 8; use --cpu-devices 64"):
        msrl.runs_page(larger, tmp_path / "other.html", plans=True)


def test_a_full_disk_is_no_bad_input(folder, tmp_path, capsys):
    before = sorted(tmp_path.iterdir())
    with no_file_above(0):
        code = main(["report", str(folder), "--out", str(tmp_path / "page.html")])
    assert code == 3 and "File too large" in capsys.readouterr().err and sorted(tmp_path.iterdir()) == before


def test_a_figure_is_drawn_against_steps_or_time(folder, run, tmp_path, capsys):
    for x, column in (("steps", "step"), ("time", "seconds")):
        (panel,) = msrl.plot_runs({"one": folder}, metrics=["entropy"], x=x).axes
        (line,) = panel.get_lines()
        np.testing.assert_array_equal(line.get_xdata(), run.history[column])
        np.testing.assert_allclose(line.get_ydata(), run.history["entropy"].mean(1), rtol=1e-6)
    file = tmp_path / "curves.svg"
    assert main(["plot", str(folder), "--x", "time", "--out", str(file)]) == 0 and "<svg" in file.read_text()
    with pytest.raises(ValueError, match="x='epochs': use 'steps' or 'time'"):
        msrl.plot_runs(run, x="epochs")
    for name, message in (("curves.doc", "must end in .pdf or .svg or .png"), ("no/c.pdf", "does not exist; create it")):
        assert main(["plot", str(folder), "--out", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{folder}", "{folder}"], "two runs are named"),
        (["{folder}", "--metrics", "loss"], "no run has the metric 'loss'; they have approx_kl"),
        (["{folder}", "--out", "page.pdf"], "the page page.pdf must end in .html"),
        (["{folder}", "--out", "nowhere/page.html"], "the page nowhere/page.html: the folder"),
        (["nothing"], "the folder nothing does not exist"),
        ([], "no run was given"),
    ],
)
def test_bad_input_is_one_sentence(folder, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *(word.format(folder=folder) for word in words)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not list(tmp_path.iterdir())


def test_the_command_line_writes_it(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(folder), "--metrics", "value_loss", "entropy"]) == 0
    assert capsys.readouterr().out.strip() == "report.html" and "value loss" in (tmp_path / "report.html").read_text()
