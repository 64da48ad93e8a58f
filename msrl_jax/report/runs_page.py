"""A self-contained page about one or several runs: curves, differences, times, and how to repeat each run."""

import base64
import os
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from msrl_jax._files import as_path
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.report.curves import inline, svg_of
from msrl_jax.report.profile_results import profile_of, profiles_figure
from msrl_jax.report.provenance import place_of
from msrl_jax.report.runs_figure import Group, curves_of, environments_of, groups_of, runs_by_name, shown_of, what
from msrl_jax.report.statistics import estimate, mean
from msrl_jax.run import Result
from msrl_jax.run.disk.folder import REPEAT, check_links, check_target, write_text
from msrl_jax.run.evaluation.history import decimals, final, value_in_words
from msrl_jax.run.outcome import Outcome
from msrl_jax.run.outputs.video import FILMS

_STYLE = """
:root { color-scheme: light dark; --line: #8886 }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; padding: 0 1rem; max-width: 72rem }
table { border-collapse: collapse; display: block; overflow-x: auto } pre { overflow-x: auto; font-size: 13px }
td, th { padding: .25rem .5rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
td, th { white-space: nowrap } .settings td:not(:first-child) { white-space: normal; overflow-wrap: anywhere; min-width: 6rem }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 28rem), 1fr)); gap: 1rem }
.curves svg { width: 100% } .curves svg, .profile svg { background: #fff; max-width: 100%; height: auto }
.bar { display: flex; height: 1rem; min-width: 12rem }
.bar i:nth-child(5n+1) { background: #2f7ed8 } .bar i:nth-child(5n+2) { background: #d0661f }
.bar i:nth-child(5n+3) { background: #2a9d6f } .bar i:nth-child(5n+4) { background: #8a4fc7 } .bar i { background: #7b8494 }
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head><body><h1>{title}</h1>
{body}
</body></html>
"""
_WHOLE = ("algorithm", "env", "env_params", "total_steps", "seed", "seeds", "pbt", "rank_by", "guard", "data")
_MOST_ROWS = 100  # settings of one run; above this, one row with the lowest and the highest return
_PARTS = {"compile": "compiling", "setup": "setting up", "train": "training", "evaluation": "evaluation", "rest": "all else"}


@entry
def runs_page(
    runs: Result | str | os.PathLike | Sequence[Any] | Mapping[str, Any],
    path: str | os.PathLike,
    *,
    metrics: Sequence[str] = (),
    title: str | None = None,
    plans: bool = False,
    trust: bool = False,
) -> Path:
    """Writes a page about runs: returns and curves of each setting, with 95% intervals over its seeds, the differences between
    runs, times, and how to repeat each run.

    Args:
      runs: one run or several, as results or as folders of runs; use a mapping to name them.
      path: the page, such as `"runs.html"`: one file that loads no other files.
      metrics: columns of the history to draw; the columns of returns and `rank_by` if empty.
      title: the title; by default algorithms and environments.
      plans: whether to draw the plan of each run, on the same number of devices as it had. Only plans need the environments of
        the runs.
      trust: whether plans may run the code that the folders name, as in `Result.load`.

    Returns:
      The page's path.

    Raises:
      ValueError: if `runs` is empty, two runs share a name, no run has a metric, or the page is not an `.html` file in an
        existing folder.
      RunFolderError: if a folder holds no run.
      TrustError: a ValueError, if `plans` is set, a folder names code to run, and it is not trusted.
    """
    target = as_path("path", path)
    check_target("page", target, (".html",))
    outcomes = runs_by_name(runs)
    columns = shown_of(outcomes, metrics)
    title = title or ", ".join(dict.fromkeys(what(run).partition(", seed")[0] for run in outcomes.values()))
    sections = [
        ("", _overview_table(outcomes)),
        ("Curves", _curve_figures(outcomes, columns)),
        ("Settings", _settings_tables(outcomes)),
        ("Time", _times_table(outcomes)),
        ("Each run", _run_sections(outcomes)),
        ("Where the time of an iteration goes", _profile_figures(outcomes)),
        ("Plans", "\n".join(_plan_figure(name, run, trust) for name, run in outcomes.items()) if plans else ""),
    ]
    body = "\n".join(f"<h2>{name}</h2>\n{text}" if name else text for name, text in sections if text)
    write_text(target, _PAGE.format(title=escape(title), style=_STYLE, body=body))
    return target


def _overview_table(outcomes: Mapping[str, Outcome]) -> str:
    """Makes a table with a row for each setting."""
    head = ["run", "setting", "training return", "greedy return", "seeds"]
    head += ["environment", "algorithm", "policy", "steps", "status"]
    rows = []
    for group in groups_of(outcomes, _MOST_ROWS):
        seeds = [run.settings[member]["seed"] for run, members in group.parts for member in members]
        summaries = [run.summary() for run, _ in group.parts]
        columns = ([s[name] for s in summaries] for name in ("env", "algorithm", "policy", "total_steps", "status"))
        rows.append(
            [
                group.names,
                group.label,
                _format_mean(lambda run: final(run.history, "episode_return"), group),
                _format_mean(lambda run: np.nan if run.evaluation is None else run.evaluation.mean_return, group),
                _format_seeds(seeds),
                *(", ".join(dict.fromkeys(f"{x:,}" if isinstance(x, int) else x for x in column)) for column in columns),
            ]
        )
    if not any(row[1] for row in rows):
        rows = [row[:1] + row[2:] for row in rows]
        head.remove("setting")
    notes = [("[", "In brackets: the 95% interval over the seeds."), ("(", "In parentheses: lowest and highest member.")]
    means = " ".join(row[head.index("training return")] + row[head.index("greedy return")] for row in rows)
    legend = " ".join(text for mark, text in notes if mark in means)
    return _html_table(head, rows) + (f"<p>{legend}</p>" if legend else "")


def _format_seeds(seeds: Sequence[int]) -> str:
    """Formats seeds: `0 to 4`, or a list if the range has gaps."""
    unique_seeds = sorted(set(seeds))
    is_range = len(unique_seeds) > 2 and unique_seeds[-1] - unique_seeds[0] == len(unique_seeds) - 1
    return (
        f"{unique_seeds[0]} to {unique_seeds[-1]}" if is_range or len(unique_seeds) > 8 else ", ".join(map(str, unique_seeds))
    )


def _format_mean(returns: Callable[[Outcome], float | np.ndarray], group: Group) -> str:
    """Formats the mean of the members' returns, with its interval over seeds, or the lowest and the highest."""
    parts = [(np.reshape(returns(run), -1), members) for run, members in group.parts]
    values = np.concatenate(
        [member_values[members] if member_values.size > 1 else member_values for member_values, members in parts]
    )
    known_values = values[np.isfinite(values)]
    if not len(known_values):
        return ""
    if not group.mixed:
        return str(estimate([known_values], mean))
    low, middle, high = (
        f"{x:.{decimals(x, np.ptp(known_values))}f}" for x in (known_values.min(), known_values.mean(), known_values.max())
    )
    return f"{middle} ({low} to {high})"


def _curve_figures(outcomes: Mapping[str, Outcome], metrics: Sequence[str]) -> str:
    """Draws the curves of each environment, side by side."""
    parts = []
    for env, runs in (environments := environments_of(outcomes)).items():
        known_metrics = [metric for metric in metrics if any(metric in run.history for run in runs.values())]
        figures = "\n".join(inline(svg_of(curves_of(runs, [metric]))) for metric in known_metrics)
        parts.append(f"<h3>{escape(env)}</h3>" if known_metrics and len(environments) > 1 else "")
        parts.append(f'<div class="curves">{figures}</div>' if known_metrics else "")
    return "\n".join(filter(None, parts))


def _settings_tables(outcomes: Mapping[str, Outcome]) -> str:
    """Lists the settings in which runs differ, and those that they share."""
    flat = {name: _flat_settings(run) for name, run in outcomes.items()}
    keys = list(dict.fromkeys(key for run_settings in flat.values() for key in run_settings))
    differ = [key for key in keys if len({run_settings.get(key, "-") for run_settings in flat.values()}) > 1]
    rows = [[key, *(run_settings.get(key, "-") for run_settings in flat.values())] for key in differ]
    shared_rows = [[key, next(iter(flat.values()))[key]] for key in keys if key not in differ]
    parts = [_html_table(["", *outcomes], rows)] if rows else []
    if len(outcomes) > 1 and not rows:
        parts.append("<p>All settings are equal.</p>")
    words = "what they share" if len(outcomes) > 1 else "all"
    parts.append(f"<details><summary>{words}</summary>{_html_table(['', 'value'], shared_rows)}</details>")
    return f'<div class="settings">{"".join(parts)}</div>'


def _flat_settings(run: Outcome) -> dict[str, str]:
    """Returns the settings of a run as text; a field in which members differ lists all their values."""
    about = run.description
    experiment_settings = {key: value for key, value in about.items() if key in _WHOLE and value is not None}
    place = {"policy": about["policy"], "devices": "{count} {platform}".format(**about["devices"])}
    place |= {f"version of {name}": text for name, text in about["versions"].items()}
    flat = experiment_settings | about["config"] | (about["settings"] or {}) | place
    return {key: str(value) if key == "seed" else _format_value(value) for key, value in flat.items()}


def _format_value(value: object) -> str:
    """Formats plain data as text, such as `0.0001, 0.001`."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_format_value(part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(
            f"({_format_value(item)})" if isinstance(item, list | tuple) else _format_value(item) for item in value
        )
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value_in_words(value)


def _times_table(outcomes: Mapping[str, Outcome]) -> str:
    rows = []
    for name, run in outcomes.items():
        parts = {"compile": run.compile_seconds} | {
            key.removesuffix("_seconds"): seconds for key, seconds in run.timings.items()
        }
        parts["rest"] = max(0.0, run.wall_seconds - sum(parts.values()))
        longest = max(r.wall_seconds for r in outcomes.values()) or 1.0
        shares = {key: 100 * parts.get(key, 0.0) / longest for key in _PARTS}
        bar = "".join(f'<i style="width:{seconds:.2f}%" title="{_PARTS[key]}"></i>' for key, seconds in shares.items())
        cells = [escape(name), f"{run.wall_seconds:,.1f} s", *(f"{parts.get(key, 0.0):,.1f} s" for key in _PARTS)]
        rows.append([*cells, f'<div class="bar">{bar}</div>', f"{run.steps_per_second:,.0f}"])
    return _html_table(["run", "wall", *_PARTS.values(), "", "steps/s of all members"], rows, plain=False)


def _profile_figures(outcomes: Mapping[str, Outcome]) -> str:
    """Shows the profiles in the folders of the runs."""
    profiles = {
        name: profile
        for name, run in outcomes.items()
        if run.folder is not None and (profile := profile_of(run.folder)) is not None
    }
    if not profiles:
        return ""
    tables = "\n".join(f"<pre>{escape(str(profile))}</pre>" for profile in profiles.values())
    return f'<div class="profile">{inline(svg_of(profiles_figure(profiles)))}</div>\n{tables}'


def _plan_figure(name: str, run: Outcome, trust: bool) -> str:
    """Draws the plan of a run."""
    if not isinstance(run, Result):
        assert run.folder is not None
        run = Result.load(run.folder, trust=trust)
    plan = run.experiment.compile(*place_of(run, trust=trust)).explain()
    return f"<h3>{escape(name)}</h3><figure>{plan.svg()}</figure>"


def _film_figure(folder: Path) -> str:
    """Embeds the last film of a run."""
    films = sorted((int(p.stem), p) for p in (folder / FILMS).glob("*.gif") if p.stem.isdigit())
    if not films:
        return ""
    step, file = films[-1]
    check_links(folder, (FILMS, f"{FILMS}/{file.name}"))
    picture = base64.b64encode(file.read_bytes()).decode()
    return f'<figure><img src="data:image/gif;base64,{picture}"><figcaption>after {step:,} steps</figcaption></figure>'


def _run_sections(outcomes: Mapping[str, Outcome]) -> str:
    parts = []
    for name, run in outcomes.items():
        parts.append(f"<h3>{escape(name)}</h3><pre>{escape(str(run))}</pre>")
        parts.append("" if run.folder is None else _film_figure(run.folder))
        if run.folder is not None and (file := run.folder / REPEAT).is_file():
            check_links(run.folder, (REPEAT,))
            parts.append(f"<p><code>msrl-jax train --config {escape(str(file))}</code> repeats it.</p>")
            text = escape(file.read_text("utf-8", "replace"))
            parts.append(f"<details><summary>{REPEAT}</summary><pre>{text}</pre></details>")
    return "\n".join(parts)


def _html_table(head: Sequence[str], rows: Sequence[Sequence[object]], *, plain: bool = True) -> str:
    """Makes a table of texts, or of elements unless `plain`."""
    cell = (lambda x: escape(str(x))) if plain else str
    lines = ["".join(f"<td>{cell(x)}</td>" for x in row) for row in rows]
    header = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f"<table><tr>{header}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
