"""Describes a run: its summary as plain data, as text, and as a figure of its history."""

import html
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from msrl_jax.fragments.support.terminal import significant
from msrl_jax.run.evaluation.history import decimals, in_words, last_known, team_of
from msrl_jax.run.experiment.pbt import PARENT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Result: TypeAlias = Any  # a `msrl_jax.Result`, or an `Outcome`, whose methods call this module

MOST_LINES = 10  # with more settings than this, a figure shows the mean over all of them
PREFIX = "pbt/"  # of columns with hyperparameters that PBT changes


def summarize(result: Result) -> dict[str, Any]:
    """Summarizes a run as plain data; see `Result.summary`."""
    about = {key: result.description[key] for key in ("algorithm", "env", "policy", "seed", "seeds")}
    returns = {name: result.final(name) for name in result.history if _episode_quantity(name, "episode_") not in ("", "length")}
    if result.evaluation is not None:
        means = result.evaluation.means.items()
        returns |= {name: np.asarray(mean) for name, mean in means if _episode_quantity(name, "eval_") not in ("", "length")}
    about |= {"members": result.settings} if result.description["settings"] else {}
    if result.description["pbt"]:
        last_values = final_values(result.history)
        evolved = [{name: x[i].item() for name, x in last_values.items()} for i in range(result.members)]
        about["members_at_end"] = [member | values for member, values in zip(result.settings, evolved, strict=True)]
    member_kind = "member" if result.description["settings"] else "seed"
    devices = result.description["devices"]
    return about | {
        "devices": devices["count"],
        "platform": devices["platform"],
        "total_steps": int(result.history["step"][-1]) if len(result.history["step"]) else 0,
        "status": result.status,
        **({"stop_reason": result.stop_reason} if result.stop_reason else {}),
        **({"save_error": result.save_error} if result.save_error else {}),
        **{name: float(np.mean(x)) for name, x in returns.items()},
        **{f"{name}_per_{member_kind}": x.tolist() for name, x in returns.items() if x.ndim},
        "steps_per_second": result.steps_per_second,
        "compile_seconds": result.compile_seconds,
        **result.timings,
        "wall_seconds": result.wall_seconds,
    }


def describe(result: Result) -> str:
    """Describes a run in a few lines of text."""
    s = summarize(result)
    seeds = f"seed {s['seed']}" if s["seeds"] == 1 else f"seeds {s['seed']} to {s['seed'] + s['seeds'] - 1}"
    fields = list(result.description.get("settings") or {})
    if pbt := result.description.get("pbt"):
        seeds = f"{pbt['members']} members from seed {s['seed']}, {', '.join(fields)} by PBT every {pbt['every']} iterations"
    elif fields:
        count = len(s["members"]) // s["seeds"]
        seeds += f", {count} setting{'s' * (count > 1)} of {', '.join(fields)}"
    devices = f"{s['devices']} {s['platform']} device{'s' * (s['devices'] > 1)}"
    why_ended = f"{s['status']}: {result.stop_reason}" if result.stop_reason else s["status"]
    why_ended += ", NOT SAVED" * (bool(result.save_error) and result.folder is None)
    unit, requested = result.unit.removeprefix("environment "), result.description["total_steps"]
    partly = result.status == "finished" and s["total_steps"] < requested
    cut = f" of {requested:,} asked for (whole iterations of {_steps_per_iteration(result.history):,})" if partly else ""
    per_member = " per member" if fields else " per seed" * (s["seeds"] > 1)
    steps = f"{s['total_steps']:,} {unit}{per_member}{cut}"
    rate = ""
    if len(result.history["step"]):
        total = f" ({s['steps_per_second']:,.0f} of all {result.members})" if per_member else ""
        rate = f"; the median chunk trains {s['steps_per_second'] / result.members:,.0f} {unit}/s{per_member}{total}"
    lines = [
        f"Result: {s['algorithm']} on {s['env']}, {s['policy']} on {devices}, {seeds} ({why_ended})",
        f"  {steps} in {s['wall_seconds']:.1f} s{rate}",
        f"  {_describe_times(result)}",
    ]
    member_kind = "members" if fields else "seeds"
    if "episode_return" in result.history:
        by_team = {team: result.final(name) for name in result.history if (team := team_of(name, "episode_return"))}
        lines.append(
            f"  training return {_describe_returns(result.final('episode_return'), by_team, member_kind)} over the last tenth"
        )
    if (evaluation := result.evaluation) is not None:
        mean, by_team = np.asarray(evaluation.mean_return), {team: x.mean(-1) for team, x in evaluation.team_returns.items()}
        lines.append(
            f"  greedy return over {evaluation.returns.shape[-1]} episodes {_describe_returns(mean, by_team, member_kind)}"
        )
        rank_by = result.rank_by
        scores = np.asarray(evaluation.means[f"eval_{rank_by}"])
        if fields and not np.isnan(scores).all():
            best = int(np.nanargmax(scores))
            setting = in_words(s.get("members_at_end", s["members"])[best])
            score = f"{rank_by} " * (rank_by != "return") + f"{significant(scores[best])}"
            lines.append(f"  best: member {best} with {score} ({setting})")
    if result.save_error:
        lines.append(f"  not saved in its folder: {result.save_error}")
        lines += [] if result.folder else ["  only this result holds it: free the disk, then result.save(FOLDER)"]
    if result.folder is not None:
        lines.append(f"  saved in {result.folder}")
    return "\n".join(lines)


def card(result: Result) -> str:
    """Shows a run as HTML, for notebooks: its curve and its text."""
    names = [f"episode_{result.rank_by}", "episode_return", "validation_loss"]
    columns = [name for name in names if name in result.history and not np.isnan(result.history[name]).all()]
    stream = io.StringIO()
    if columns:
        plot_history(result, columns[:1]).savefig(stream, format="svg")
    _, tag, picture = stream.getvalue().partition("<svg")
    return f'<div style="max-width: 36rem">{tag}{picture}</div><pre>{html.escape(describe(result))}</pre>'


def _steps_per_iteration(history: Mapping[str, np.ndarray]) -> int:
    """Returns the steps per member in an iteration."""
    return int(history["step"][-1] / history["iteration"][-1]) if len(history["step"]) else 0


def _episode_quantity(column: str, prefix: str) -> str:
    """Returns the episode quantity of a column, such as `return` or an environment metric; empty if it has none."""
    return column.partition("/")[0].removeprefix(prefix) if column.startswith(prefix) else ""


def _describe_times(result: Result) -> str:
    parts = {name.removesuffix("_seconds"): seconds for name, seconds in result.timings.items()}
    parts = {"compiling": result.compile_seconds, **parts}
    parts["callbacks and metrics"] = max(0.0, result.wall_seconds - sum(parts.values())) if result.timings else 0.0
    words = {"setup": "setting up", "train": "training"}
    return ", ".join(f"{words.get(name, name)} {x:.1f} s" for name, x in parts.items() if x >= 0.05)


def _describe_returns(values: np.ndarray, by_team: Mapping[str, np.ndarray], member_kind: str) -> str:
    teams = ", ".join(f"{team} {_describe_spread(x, member_kind)}" for team, x in by_team.items())
    return _describe_spread(values, member_kind) + (f" ({teams})" if teams else "")


def _describe_spread(values: np.ndarray, member_kind: str) -> str:
    digits = decimals(values, min(np.ptp(values), np.max(np.abs(values)) / 10))  # at least three digits of the largest value
    if not values.ndim:
        return f"{values:.{digits}f}"
    known_values = values[~np.isnan(values)]
    if 0 < len(known_values) < len(values):
        return f"{_describe_spread(known_values, member_kind)[:-1]}; {len(values) - len(known_values)} unknown)"
    return f"{np.mean(values):.{digits}f} ({member_kind}: {np.min(values):.{digits}f} to {np.max(values):.{digits}f})"


def final_values(history: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the hyperparameters in the last chunk, `[M]` by field; empty if no population was trained."""
    columns = {name.removeprefix(PREFIX): x for name, x in history.items() if name.startswith(PREFIX) and name != PARENT}
    return {name: column[-1] for name, column in columns.items() if len(column)}


def panels_of(result: Result, names: Sequence[str]) -> tuple["Figure", Any]:
    """Makes a figure with a panel for each name."""
    import matplotlib.pyplot as plt  # a slow import, and only plots need it

    size = (7, 1 + 3 * len(names))
    figure, panels = plt.subplots(len(names), 1, squeeze=False, sharex=True, figsize=size, layout="constrained")
    for panel, name in zip(panels[:, 0], names, strict=True):
        panel.set_ylabel(name.replace("_", " "))
        panel.grid(alpha=0.3)
    panels[-1, 0].set_xlabel(result.unit)
    panels[0, 0].set_title("{algorithm} on {env}".format(**result.description))
    plt.close(figure)  # otherwise a notebook shows it twice
    return figure, panels[:, 0]


def plot_history(result: Result, metrics: Sequence[str]) -> "Figure":
    """Plots columns of the history; see `msrl_jax.run.outputs.figures.plot`."""
    history, groups = result.history, dict[str, list[int]]()
    if result.description["settings"] and not result.description["pbt"]:
        for member, setting in enumerate(result.settings):
            groups.setdefault(in_words({name: x for name, x in setting.items() if name != "seed"}), []).append(member)
    if missing := [name for name in metrics if name not in history]:
        raise ValueError(f"the history has no column {missing[0]!r}; it has {sorted(history)}")
    figure, panels = panels_of(result, metrics)
    for panel, name in zip(panels, metrics, strict=True):
        column = history[name]
        if 0 < len(groups) <= MOST_LINES and column.ndim > 1:
            for label, members in groups.items():
                _draw_column(panel, history["step"], column[:, members], label, "-")
        else:
            _draw_column(panel, history["step"], column, name.replace("_", " "), "-")
            for other in history:
                if (team := team_of(other, name)) and name == "episode_return":
                    _draw_column(panel, history["step"], history[other], f"team {team}", "-")
            if (greedy := name.replace("episode_", "eval_")) in history and name.startswith("episode_"):
                _draw_column(panel, history["step"], history[greedy], "greedy evaluation", "o")
        panel.legend()
    return figure


def _draw_column(panel: Any, steps: np.ndarray, column: np.ndarray, label: str, style: str) -> None:
    is_known = ~np.isnan(column).all(axis=tuple(range(1, column.ndim)))
    steps, column = steps[is_known], last_known(column)[is_known]  # for members without an episode that ended in a chunk
    is_known = ~np.isnan(column).any(axis=tuple(range(1, column.ndim)))
    steps, column = steps[is_known], column[is_known]
    mean = column.mean(axis=1) if column.ndim > 1 else column
    (line,) = panel.plot(steps, mean, style, label=label)
    if column.ndim > 1:
        panel.fill_between(steps, column.min(axis=1), column.max(axis=1), color=line.get_color(), alpha=0.2, lw=0)
