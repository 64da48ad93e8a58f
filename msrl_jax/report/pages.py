"""Pages of results, written from the records of recipes: tables with published returns, and curves with their intervals.

index.md            all recipes
ALGORITHM.md        the recipes of an algorithm: settings, curves, versions, hardware
SUITE.md            the environments of a suite, the algorithms side by side
NAME.svg            curves
"""

import dataclasses
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from msrl_jax.envs.suites import catalog
from msrl_jax.report.curves import draw_curve, figure_of, finished, mean_curve, styled, svg_of
from msrl_jax.report.statistics import Estimate, estimate, fewest, mean, probability_of_improvement
from msrl_jax.run import recipes
from msrl_jax.run.disk.folder import write_text
from msrl_jax.run.recipes import Recipe, Record

_PUBLISHED = "published.toml"  # published returns, in the folder of the records
_INDEX = "index.md"
_BACK = "[All results](index.md)"
_SAME_LENGTH = 0.05  # relative difference at which the steps of published returns count as equal
_MARK = "<!-- written by msrl-jax reproduce --pages, from the records of recipes -->"  # at the end of every file
_HEAD = ("recipe", "environment", "steps", "training", "best agent", "published", "time")
_ABOUT = """*Training* is the mean return over the last tenth of training, with exploration. *Best agent* is the mean of 256
greedy episodes of the best of about 20 evaluated agents. Both are means over seeds with the 95% interval of a bootstrap
([Agarwal et al.](https://arxiv.org/abs/2108.13264)). With few seeds the interval is too narrow: it contains the true mean in
about 75% of cases with three seeds, 80% with five, and 90% with ten. Returns are undiscounted. *Published* are returns of
others at equal steps, ± a standard deviation over their seeds, and higher ones at fewer steps; some pages do not state the
steps, and some use Gym's environments where ours are gymnax's. *Time* is that of all seeds together on the named hardware,
where other work may have run."""


class Files(NamedTuple):
    """The names of the pages and figures that show a recipe."""

    algorithm: str
    curve: str
    suite: str
    curves: str  # of all recipes for its environment


@dataclasses.dataclass(frozen=True)
class ResultRow:
    """A recipe with its record, and returns that others have published at equal or unknown steps."""

    recipe: Recipe
    record: Record
    published: tuple[dict[str, Any], ...]

    @property
    def algo(self) -> str:
        """The name of the algorithm."""
        return str(self.recipe.values["algo"])

    @property
    def variant(self) -> str:
        """The algorithm with its options, from the name of the recipe: `ppo-cnn` for `ppo-cnn-breakout`."""
        return self.recipe.name.rpartition("-")[0] or self.algo

    @property
    def env(self) -> str:
        """The name of the environment."""
        return str(self.recipe.values["env"])

    @property
    def suite(self) -> str:
        """The title of the environment's suite."""
        return _title(self.env)

    @property
    def files(self) -> Files:
        """The files that show it."""
        return _files_of(self.recipe)

    def cells(self, link: str = "") -> list[str]:
        """Returns the cells of a table row; the recipe's name links to `link`, by default to the page of its algorithm."""
        record, name, published = self.record, self.recipe.name, "<br>".join(map(_format_published, self.published)) or "-"
        return [
            f"[{name}]({link or f'{self.files.algorithm}#{name}'})",
            self.env,
            f"{self.recipe.values['total_steps']:,}",
            str(_mean(record.last)),
            str(_mean(record.best)),
            published,
            f"{record.seconds['wall']:,.0f} s, {len(record.seeds)} seeds, {record.place}",
        ]

    def below(self) -> list[str]:
        """Compares our return with each higher published one, and says what may explain the difference."""
        higher = [(row, score) for row in self.published if (score := _our_estimate(self.record, row)).value < row["value"]]
        return [
            f"{score} against {_format_published(row)}{', within the interval' if row['value'] <= score.high else ''}. "
            f"{row.get('remark', '')}".rstrip()
            for row, score in higher
        ]


def rows(records: Path | None = None) -> list[ResultRow]:
    """Returns all recipes with a record in a folder of records; None is the folder of the clone.

    Raises:
      ValueError: if the clone or the folder does not exist.
    """
    place = recipes.records_folder(records)
    if place is None:
        raise ValueError(recipes.NO_RECORDS)
    file = place / _PUBLISHED
    published = tomllib.loads(file.read_text("utf-8"))["row"] if file.exists() else []
    result_rows = []
    for recipe in map(recipes.find, recipes.names()):
        if (record := recipes.record_of(recipe, place)) is not None:
            row = ResultRow(recipe, record, ())
            result_rows.append(dataclasses.replace(row, published=tuple(_published_results(row, published))))
    return result_rows


def _published_results(mine: ResultRow, published: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields published results for a recipe: at equal or unknown steps, or with a higher return at fewer steps."""
    steps = int(mine.recipe.values["total_steps"])
    candidates = [row for row in published if (row["algo"], row["env"]) == (mine.algo, mine.env)]
    variant_rows = [row for row in candidates if row.get("variant") == mine.variant]
    for row in variant_rows or [row for row in candidates if "variant" not in row]:
        theirs = row.get("steps", steps)
        if abs(theirs - steps) <= _SAME_LENGTH * steps:
            yield row
        elif theirs < steps and row["value"] > _our_estimate(mine.record, row).value:
            yield row | {"about": ", ".join(filter(None, (row.get("about"), f"after {theirs:,} steps")))}


def _our_estimate(record: Record, row: dict[str, Any]) -> Estimate:
    """Returns the estimate to compare with a published return."""
    return _mean(record.last if row["score"] == "training" else record.best)


def write_pages(folder: Path, records: Path | None = None) -> list[Path]:
    """Writes the pages and figures of all recipes that have a record, and removes old ones of other recipes.

    Args:
      folder: the folder to write to.
      records: the folder of the records; that of the clone if None.

    Returns:
      The written files.

    Raises:
      ValueError: as `check_pages` and `rows`.
    """
    check_pages(folder)
    result_rows = rows(records)
    texts = {folder / _INDEX: index(result_rows)}
    for algo, group in _group_rows(result_rows, lambda row: row.algo):
        texts[folder / group[0].files.algorithm] = _algorithm_page(algo, group)
        texts |= {folder / row.files.curve: _curves_svg([(row.algo, row)], row) for row in group}
    for suite, group in _group_rows(result_rows, lambda row: row.suite):
        texts[folder / group[0].files.suite] = _suite_page(suite, group)
        for _, env_rows in _group_rows(group, lambda row: row.env):
            texts[folder / env_rows[0].files.curves] = _curves_svg([(row.recipe.name, row) for row in env_rows], env_rows[0])
    for old_file in {*folder.glob("*.md"), *folder.glob("*.svg")} - texts.keys():
        if _is_ours(old_file):
            old_file.unlink()
    for path, text in texts.items():
        write_text(path, f"{text}{_MARK}\n")
    return list(texts)


def check_pages(folder: Path) -> None:
    """Makes the folder of the pages; raises ValueError if that fails, or if `write_pages` would overwrite files that it did not
    write."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--pages cannot create {folder} ({error.strerror}); choose another folder") from None
    _check_ours(folder / _INDEX)
    for name in recipes.names():
        for file in _files_of(recipes.find(name)):
            _check_ours(folder / file)


def _files_of(recipe: Recipe) -> Files:
    env = str(recipe.values["env"])
    suite = _file_stem(_title(env))
    return Files(f"{recipe.values['algo']}.md", f"{recipe.name}.svg", f"{suite}.md", f"{suite}-{_file_stem(env)}.svg")


def _title(env: str) -> str:
    """Returns the title of an environment's suite."""
    suite, name = catalog.suite_of(env), env.partition(":")[0]
    if suite is not None:
        return suite.title
    return next((title for title in ("MinAtar", "bsuite") if name.endswith(f"-{title}")), "Classic control")


def _check_ours(path: Path) -> None:
    if os.path.lexists(path) and not _is_ours(path):
        raise ValueError(f"--pages would overwrite {path}, which it did not write; choose another folder, or move the file")


def _is_ours(path: Path) -> bool:
    return path.is_file() and path.read_bytes().rstrip().endswith(_MARK.encode())


def _group_rows(result_rows: Iterable[ResultRow], key: Callable[[ResultRow], str]) -> list[tuple[str, list[ResultRow]]]:
    groups: dict[str, list[ResultRow]] = {}
    for row in result_rows:
        groups.setdefault(key(row), []).append(row)
    return sorted(groups.items())


def _file_stem(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _mean(scores: Sequence[float]) -> Estimate:
    return estimate([np.array(scores)], mean)


def _format_published(row: dict[str, Any]) -> str:
    spread = f" ± {row['spread']:g}" if "spread" in row else ""
    about = [row["score"], row.get("about"), None if "steps" in row else "steps not told"]
    about += [f"{row['minutes']:g} min a seed"] if "minutes" in row else []
    return f"{row['value']:g}{spread} [{row['source']}]({row['url']}), {', '.join(filter(None, about))}"


def _format_table(cells: Iterable[Sequence[str]]) -> str:
    return "\n".join(["", _format_line(_HEAD), "|---" * len(_HEAD) + "|", *map(_format_line, cells), ""])


def _format_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def index(result_rows: Sequence[ResultRow], *, alone: bool = False) -> str:
    """Makes the page of all recipes.

    Args:
      result_rows: the recipes and their records.
      alone: whether the pages of algorithms and suites are missing, as for `benchmarks/records/README.md` of the repository;
        the recipes then link to their files.

    Returns:
      The page as Markdown.
    """
    algorithms = [f"[{algo}]({group[0].files.algorithm})" for algo, group in _group_rows(result_rows, lambda row: row.algo)]
    site_lines = [
        "The site has curves, and a page for each algorithm and suite: `python -m sphinx -W -b html docs build/site`",
        "builds it; `msrl-jax reproduce --pages FOLDER` writes these pages alone.",
    ]
    parts = [
        "# Results of the recipes",
        "",
        "A recipe is a file of settings for an algorithm and an environment, in `msrl_jax/recipes`.",
        "`msrl-jax train --recipe ppo-cartpole` trains one seed; `msrl-jax reproduce ppo-cartpole` trains all seeds and says",
        f"whether the scores [agree]({'../../docs' if alone else '..'}/results.md#reproducing) with the table.",
        "",
        *(site_lines if alone else [f"By algorithm: {', '.join(algorithms)}"]),
        "",
        _ABOUT,
    ]
    for suite, group in _group_rows(result_rows, lambda row: row.suite):
        curves = [] if alone else ["", f"[The curves side by side]({group[0].files.suite})"]
        links = [f"../../msrl_jax/recipes/{row.recipe.path.name}" if alone else "" for row in group]
        parts += ["", f"## {suite}", *curves, _format_table(row.cells(link) for row, link in zip(group, links, strict=True))]
    if comparisons := [f"- {row.recipe.name}: {comparison}" for row in result_rows for comparison in row.below()]:
        parts += ["## Where others are better", "", *comparisons, ""]
    return "\n".join(parts)


def _algorithm_page(algo: str, result_rows: Sequence[ResultRow]) -> str:
    parts = [f"# Results of {algo}", "", _BACK, "", _ABOUT, _format_table(row.cells() for row in result_rows)]
    for row in result_rows:
        record, name = row.record, row.recipe.name
        packages = ["jax", *(catalog.packages_of(row.env) or ["gymnax"]), "msrl-jax"]
        versions = ", ".join(f"{package} {record.versions[package]}" for package in packages if package in record.versions)
        hardware = f"{record.hardware['processor']}, {record.place}"
        parts_of_time = ", ".join(f"{part} {seconds:,.0f} s" for part, seconds in record.seconds.items())
        settings = ", ".join(f"{key}={value}" for key, value in row.recipe.fields.items()) or "the defaults"
        parts += [
            f"## {name}",
            "",
            row.recipe.about,
            "",
            f"![{name}]({row.files.curve})",
            "",
            f"`msrl-jax reproduce {name}{_seeds_option(record)}`; {settings}.",
            f"Seeds {record.seeds[0]} to {record.seeds[-1]}, {record.date}, {versions}, commit {record.commit or 'unknown'}.",
            f"On {hardware}: {parts_of_time}.",
            *(f"Below others: {comparison}" for comparison in row.below()),
            "",
        ]
    return "\n".join(parts)


def _seeds_option(record: Record) -> str:
    """Returns the option that is needed for enough seeds to compare, if the record has few seeds."""
    count = fewest(len(record.seeds))
    return f" --seeds {count}" if count and count > len(record.seeds) else ""


def _suite_page(suite: str, result_rows: Sequence[ResultRow]) -> str:
    parts = [f"# Results on {suite}", "", _BACK, "", _ABOUT]
    for env, group in _group_rows(result_rows, lambda row: row.env):
        parts += ["", f"## {env}", "", f"![{env}]({group[0].files.curves})", _format_table(row.cells() for row in group)]
    return "\n".join([*parts, *_improvement_tables(result_rows), ""])


def _improvement_tables(result_rows: Sequence[ResultRow]) -> list[str]:
    """Makes a table of every pair of variants with common environments at equal steps; empty if there are none."""
    scores = {
        variant: {(row.env, row.recipe.values["total_steps"]): row for row in group}
        for variant, group in _group_rows(result_rows, lambda row: row.variant)
    }

    def cell(ours: str, theirs: str, score: str) -> str:
        tasks = [task for task in scores[ours] if task in scores[theirs]] if ours != theirs else []
        if not tasks:
            return ""
        pairs = ([np.array(getattr(scores[name][task].record, score)) for task in tasks] for name in (ours, theirs))
        probability = probability_of_improvement(*pairs)
        return f"{probability.value:.2f} [{probability.low:.2f}, {probability.high:.2f}] ({len(tasks)})"

    def lines(title: str, score: str) -> list[str]:
        cells = [_format_line([name, *(cell(name, other, score) for other in scores)]) for name in scores]
        return ["", f"### {title}", "", _format_line(["", *scores]), "|---" * (len(scores) + 1) + "|", *cells]

    tasks = [task for tasks_of_variant in scores.values() for task in tasks_of_variant]
    if len(tasks) == len(set(tasks)):  # no task has two variants
        return []
    return [
        "",
        "## Which is better",
        "",
        "The probability that a run of the row's algorithm has a higher return than a run of the column's, where a tie counts",
        "half, with its interval, over the environments that both have at equal steps (their number in parentheses). Training",
        "returns include exploration. An interval has no width if every run of one is above every run of the other; with three",
        "seeds each, this happens by chance in one case of ten.",
        *lines("In training", "last"),
        *lines("Their best agents", "best"),
    ]


def curve(record: Record) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the curve of a record: steps, the mean over the seeds, and the ends of its 95% interval. `[N]` each"""
    returns = np.array([[np.nan if value is None else value for value in seed] for seed in record.returns], float).T
    return mean_curve(record.steps, returns)


def _curves_svg(curves: Sequence[tuple[str, ResultRow]], about: ResultRow) -> str:
    """Makes a figure as SVG with the checksums of its records; the same records give the same text."""
    with styled():
        figure, (panel,) = figure_of(1)
        for number, (label, row) in enumerate(curves):
            draw_curve(panel, f"{label} ({len(row.record.seeds)} seeds)", number, *curve(row.record))
        for row in about.published if len(curves) == 1 else ():
            panel.axhline(row["value"], color="0.5", ls=":", lw=1, label=f"{row['source']} ({row.get('about', row['score'])})")
        panel.set(title=about.env, xlabel="environment steps", ylabel=about.record.score)
        sums = " ".join(row.record.sum for _, row in curves)
        return f"{svg_of(finished(figure))}<!-- {sums} -->\n"
