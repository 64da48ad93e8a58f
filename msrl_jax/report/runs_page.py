"""A page about one or several runs: curves, what they differ in, times, and how to repeat each; it needs no other file."""

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from msrl_jax._checks import as_path
from msrl_jax.experiment import Result
from msrl_jax.experiment.folder import REPEAT, write_text
from msrl_jax.experiment.history import in_words
from msrl_jax.report.curves import draw, figure_of, inline, mean_curve, styled, svg_of
from msrl_jax.report.statistics import estimate, mean

_MOST_CURVES = 10  # of settings of one run; more are one curve
_STYLE = """
:root { color-scheme: light dark; --line: #8886 }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; padding: 0 1rem; max-width: 72rem }
table { border-collapse: collapse; display: block; overflow-x: auto } pre { overflow-x: auto; font-size: 13px }
td, th { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
th, .bar { white-space: nowrap }
.curves svg { background: #fff; max-width: 100%; height: auto } .bar { display: flex; height: 1rem; min-width: 12rem }
.bar i:nth-child(5n+1) { background: #2f7ed8 } .bar i:nth-child(5n+2) { background: #d0661f }
.bar i:nth-child(5n+3) { background: #2a9d6f } .bar i:nth-child(5n+4) { background: #8a4fc7 } .bar i { background: #7b8494 }
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head><body><h1>{title}</h1>
{body}
</body></html>
"""
_PARTS = {"compile": "compiling", "setup": "setting up", "train": "training", "evaluation": "evaluation", "rest": "all else"}


def runs_page(
    runs: Result | str | os.PathLike | Sequence[Any] | Mapping[str, Any],
    path: str | os.PathLike,
    *,
    metrics: Sequence[str] = (),
    title: str | None = None,
) -> Path:
    """Writes a page about runs: their curves with 95% intervals over seeds, what they differ in, times, how to repeat each.

    Args:
      runs: a run, or several: results, or folders of runs; a mapping gives them names.
      path: the page, such as `"runs.html"`. It is one file, which loads nothing.
      metrics: columns of the history to draw; those of returns and of `rank_by` if empty.
      title: its title; algorithms and environments if None.

    Returns:
      The page's path.

    Raises:
      ValueError: if there is no run, two have one name, no run has a metric, or the page is no `.html` in a folder that exists.
      RunFolderError: if a folder holds no run.
    """
    target = as_path("path", path)
    if target.suffix != ".html" or not target.absolute().parent.is_dir():
        raise ValueError(f"the page {target}: name a file in a folder that exists, such as report.html")
    if metrics and isinstance(metrics, str):
        raise ValueError(f"metrics={metrics!r}: give a list of columns, [{metrics!r}]")
    found = _named(runs)
    shown = list(metrics) or _usual(found.values())
    for name in shown:
        if not any(name in run.history for run in found.values()):
            known = sorted({column for run in found.values() for column in run.history})
            raise ValueError(f"no run has the metric {name!r}; they have {', '.join(known)}")
    title = title or ", ".join(dict.fromkeys(_what(run).partition(", seed")[0] for run in found.values()))
    sections = [
        ("", _overview(found)), ("Curves", f'<div class="curves">{inline(_curves(found, shown))}</div>' if shown else ""),
        ("Settings", _settings(found)), ("Time", _times(found)), ("Each run", _each(found)),
    ]  # fmt: skip
    body = "\n".join(f"<h2>{name}</h2>\n{text}" if name else text for name, text in sections if text)
    write_text(target, _PAGE.format(title=escape(title), style=_STYLE, body=body))
    return target


def _named(runs: Any) -> dict[str, Result]:
    """The runs by name: that of a mapping, of the folder (its path, if folders have one name), or what was trained."""
    names = list(map(str, runs)) if isinstance(runs, Mapping) else []
    given = runs.values() if isinstance(runs, Mapping) else [runs] if isinstance(runs, Result | str | os.PathLike) else runs
    results = [run if isinstance(run, Result) else Result.load(run) for run in given]
    if not results:
        raise ValueError("there is no run to write about; give a result or the folder of a run")
    if not names:
        folders = [run.folder for run in results if run.folder is not None]
        alike = len({folder.name for folder in folders}) < len(folders)
        names = [_what(run) if run.folder is None else str(run.folder) if alike else run.folder.name for run in results]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two runs are named {twice[0]!r}; name each once, or give a mapping with a name for each")
    return dict(zip(names, results, strict=True))


def _what(run: Result) -> str:
    about = run.experiment
    return f"{about.name} on {about.env_name}, seed {about.seed}"


def _usual(runs: Any) -> list[str]:
    """The columns that tell how good agents are."""
    scores = dict.fromkeys(["return", *(run.experiment.rank_by for run in runs)])
    wanted = [f"{kind}_{score}" for score in scores for kind in ("episode", "eval")]
    return [name for name in [*wanted, "validation_loss"] if any(_is_known(run.history.get(name)) for run in runs)]


def _is_known(column: Any) -> bool:
    return column is not None and not np.isnan(column).all()


def _overview(found: Mapping[str, Result]) -> str:
    head = ("run", "algorithm", "environment", "policy", "seeds", "steps", "status", "training return", "greedy", "steps/s")
    rows = []
    for name, run in found.items():
        s = run.summary()
        greedy = "" if run.evaluation is None else str(_mean(np.atleast_1d(run.evaluation.mean_return)))
        seeds = f"{s['seed']} to {s['seed'] + s['seeds'] - 1}" if s["seeds"] > 1 else s["seed"]
        rows.append([
            name, s["algorithm"], s["env"], s["policy"], seeds, f"{s['total_steps']:,}", s["status"],
            str(_mean(np.atleast_1d(run.final("episode_return")))), greedy, f"{s['steps_per_second']:,.0f}",
        ])  # fmt: skip
    return _table(head, rows)


def _mean(values: np.ndarray) -> Any:
    known = values[np.isfinite(values)]
    return estimate([known], mean) if len(known) else "unknown"


def _curves(found: Mapping[str, Result], metrics: Sequence[str]) -> str:
    """A panel for each metric, with a curve for each run, or for each of its settings over their seeds."""
    with styled():
        figure, panels = figure_of(len(metrics))
        for panel, metric in zip(panels, metrics, strict=True):
            number = 0
            for name, run in found.items():
                for label, members in _groups(run):
                    column = run.history.get(metric)
                    if column is None or not _is_known(column):
                        continue
                    values = np.reshape(column, (len(column), -1))[:, members]
                    known = ~np.isnan(values).all(1)  # evaluations are few
                    curve = mean_curve(run.history["step"][known], values[known])
                    draw(panel, ", ".join(filter(None, [name, label])), number, *curve)
                    number += 1
            panel.set(ylabel=metric.replace("_", " "))
        panels[-1].set(xlabel=" or ".join(dict.fromkeys(run.behavior.agent.unit for run in found.values())))
        return svg_of(figure)


def _groups(run: Result) -> list[tuple[str, list[int]]]:
    """The members of each setting of a run, with its words."""
    groups: dict[str, list[int]] = {}
    for member, setting in enumerate(run.settings):
        groups.setdefault(in_words({name: x for name, x in setting.items() if name != "seed"}), []).append(member)
    several = 1 < len(groups) <= _MOST_CURVES and run.experiment.pbt is None
    return list(groups.items()) if several else [("", list(range(run.members)))]


def _settings(found: Mapping[str, Result]) -> str:
    """What runs differ in, and what they share."""
    flat = {name: _flat(run) for name, run in found.items()}
    keys = list(dict.fromkeys(key for each in flat.values() for key in each))
    differ = [key for key in keys if len({each.get(key, "-") for each in flat.values()}) > 1]
    rows = [[key, *(each.get(key, "-") for each in flat.values())] for key in differ]
    same = [[key, next(iter(flat.values()))[key]] for key in keys if key not in differ]
    parts = [_table(["", *found], rows)] if rows else []
    if len(found) > 1 and not rows:
        parts.append("<p>All settings are equal.</p>")
    words = "what they share" if len(found) > 1 else "all"
    return "\n".join([*parts, f"<details><summary>{words}</summary>{_table(['', 'value'], same)}</details>"])


def _flat(run: Result) -> dict[str, str]:
    about = run.experiment.to_json()
    whole = {key: x for key, x in about.items() if key not in ("config", "class", "env_spec", "env_object") and x is not None}
    place = {"policy": run.description["policy"], "devices": "{count} {platform}".format(**run.description["devices"])}
    place |= {f"version of {name}": text for name, text in run.description["versions"].items()}
    return {key: str(x) for key, x in (whole | about["config"] | place).items()}


def _times(found: Mapping[str, Result]) -> str:
    rows = []
    for name, run in found.items():
        parts = {"compile": run.compile_seconds} | {key.removesuffix("_seconds"): x for key, x in run.timings.items()}
        parts["rest"] = max(0.0, run.wall_seconds - sum(parts.values()))
        longest = max(r.wall_seconds for r in found.values()) or 1.0
        shares = {key: 100 * parts.get(key, 0.0) / longest for key in _PARTS}
        bar = "".join(f'<i style="width:{x:.2f}%" title="{_PARTS[key]}"></i>' for key, x in shares.items())
        cells = [escape(name), f"{run.wall_seconds:,.1f} s", *(f"{parts.get(key, 0.0):,.1f} s" for key in _PARTS)]
        rows.append([*cells, f'<div class="bar">{bar}</div>'])
    return _table(["run", "wall", *_PARTS.values(), ""], rows, plain=False)


def _each(found: Mapping[str, Result]) -> str:
    parts = []
    for name, run in found.items():
        parts.append(f"<h3>{escape(name)}</h3><pre>{escape(str(run))}</pre>")
        if run.folder is not None and (file := run.folder / REPEAT).exists():
            parts.append(f"<p><code>msrl-jax train --config {escape(str(file))}</code> repeats it.</p>")
            parts.append(f"<details><summary>{REPEAT}</summary><pre>{escape(file.read_text('utf-8'))}</pre></details>")
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]], *, plain: bool = True) -> str:
    """A table of texts, or of elements unless it is `plain`."""
    cell = (lambda x: escape(str(x))) if plain else str
    lines = ["".join(f"<td>{cell(x)}</td>" for x in row) for row in rows]
    first = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f"<table><tr>{first}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
