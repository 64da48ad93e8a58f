"""Writes the reference pages of the site from the package: fields of configs, arguments of `train`, commands, the API."""

import dataclasses
import inspect
from pathlib import Path

import msrl_jax as msrl
from msrl_jax._rooms import rooms
from msrl_jax.cli.commands import COMMANDS
from msrl_jax.cli.options import REQUIRED, arguments_of
from msrl_jax.configs.fields import option_classes
from msrl_jax.configs.names import all_fields

THEMES = {
    "What is computed": ("algo", "env", "total_steps", "seed", "seeds", "env_params", "pbt", "**overrides"),
    "Where it runs": ("policy", "devices", "actors_at"),
    "Its folder": ("out", "resume", "trust", "checkpoint_every", "keep_checkpoints", "record"),
    "Evaluation": ("eval_episodes", "eval_every", "rank_by"),
    "What happens meanwhile": ("chunk", "callbacks", "progress", "guard", "time_limit"),
}
API = {
    "msrl_jax": [
        "Result",
        "Experiment",
        "PBT",
        "compile",
        "fragment",
        "Program",
        "Plan",
        "plan_devices",
        "Delayed",
        "Mean",
        "sweep",
        "SweepResult",
        "choose_policy",
        "Choice",
        "video",
        "export",
        "plot",
        "plot_lineage",
        "plot_sweep",
        "runs_page",
        "plot_runs",
        "profile",
        "profile_program",
        "Profile",
        "recipe",
        "reproduce",
        "Reproduction",
    ],
    "msrl_jax.run": ["Tick", "Filming", "Video", "Evaluation", "TensorBoard", "WandB", "TrustError"],
    "msrl_jax.policies": None,
    "msrl_jax.envs": None,
    "msrl_jax.algorithms": ["Agent", "build", "config", "field", "tunable", "get", "names", "counted"],
    "msrl_jax.returns": None,
    "msrl_jax.losses": None,
    "msrl_jax.data": None,
    **dict.fromkeys((f"msrl_jax.{room}" for room in rooms()), None),
}


def write(folder: Path) -> None:
    """Writes all pages into a folder, and changes none that is as it was."""
    pages = {f"algorithms/{name}": algorithm_page(name) for name in msrl.algorithms.names()}
    pages["algorithms/index"] = index_of("Algorithms", "A page for each, with all fields.", sorted(msrl.algorithms.names()))
    pages["algorithms/index"] += fields_table()
    pages |= {"train": train_page(), "command_line": command_page(), "api": api_page()}
    for name, text in pages.items():
        path = folder / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


def index_of(title: str, about: str, names: list[str]) -> str:
    """A page that lists others."""
    return f"# {title}\n\n{about}\n\n```{{toctree}}\n:maxdepth: 1\n\n" + "\n".join(names) + "\n```\n"


def cell(text: object) -> str:
    """Text in a cell of a table."""
    return str(text).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def prose(text: str) -> str:
    """The text of a docstring as Markdown."""
    return inspect.cleandoc(text).replace("<", "\\<")


def algorithm_page(name: str) -> str:
    """What an algorithm is, an example, its fields, and where its curves are."""
    kind = msrl.algorithms.get(name)
    env = "env" if kind.multi_agent else '"Pendulum-v1"' if name in ("sac", "td3", "ddpg") else '"CartPole-v1"'
    data = ", data=dataset" if kind.offline else ""
    public = kind.__module__.rpartition(".")[0].replace("msrl_jax", "msrl")
    lines = [f"# {name}", "", prose(kind.__doc__ or ""), ""]
    lines += ["```python", f'result = msrl.train("{name}", {env}{data})', "```", ""]
    lines += [f"The same as `msrl.train({public}.{kind.__name__}(), ...)`. Each field is a keyword, and a flag.", ""]
    lines += ["| field | default | bounds | what it is |", "|---|---|---|---|"]
    for name, field in all_fields(kind).items():
        about = field.metadata
        bounds = ", ".join(f"{key} {value:g}" for key, value in about["bounds"].items())
        text = about["doc"] + (" *Tunable.*" if about["tunable"] else "")
        lines.append("| " + " | ".join(map(cell, (f"`{name}`", f"`{field.default!r}`", bounds, text))) + " |")
    lines += ["", "*Tunable* fields may have a value for each member of one program; most of them may be schedules."]
    if (Path(__file__).parent / "results" / f"{name}.md").exists():
        lines += ["", f"[Curves, and what the recipes reach](../../results/{name}.md)."]
    return "\n".join(lines) + "\n"


def fields_table() -> str:
    """The fields that several algorithms have, with their options: which algorithms have which."""
    found: dict[tuple[str, str], list[str]] = {}
    for algorithm in sorted(msrl.algorithms.names()):
        for field in dataclasses.fields(msrl.algorithms.get(algorithm)):
            kinds = [
                f"`{kind.__name__}({', '.join(f.name for f in dataclasses.fields(kind))})`" for kind in option_classes(field)
            ]
            found.setdefault((field.name, ", ".join(kinds)), []).append(algorithm)
    lines = ["", "## Fields of several algorithms", "", "| field | algorithms | options |", "|---|---|---|"]
    shared = sorted(found.items(), key=lambda item: -len(item[1]))
    for (name, options), owners in shared:
        missing = [algorithm for algorithm in sorted(msrl.algorithms.names()) if algorithm not in owners]
        where = ", ".join(owners) if len(owners) < len(missing) else f"all except {', '.join(missing)}"
        lines += [f"| `{name}` | {where} | {options} |"] * (len(owners) > 1)
    return "\n".join(lines) + "\n"


def train_page() -> str:
    """The arguments of `train` by theme."""
    arguments, lines = arguments_of(msrl.train), ["# Arguments of `train`", ""]
    arguments["**overrides"] = arguments.pop("overrides")
    if missing := set(arguments).symmetric_difference(name for names in THEMES.values() for name in names):
        raise ValueError(f"the themes of the arguments of train lack or invent {sorted(missing)}; correct THEMES")
    for theme, names in THEMES.items():
        lines += [f"## {theme}", "", "| argument | what it is |", "|---|---|"]
        lines += [f"| `{name}` | {cell(arguments[name])} |" for name in names] + [""]
    return "\n".join(lines)


def command_page() -> str:
    """The commands and their options, what is given without a name first."""
    lines = ["# The command line", "", "Fields of the config of an algorithm are flags, too. A command ends with one of the"]
    lines += ["[exit codes](../runs.md#how-a-run-ends).", ""]
    for name, command in COMMANDS.items():
        lines += [f"## {name}", "", prose(command.about), "", "| option | default | what it is |", "|---|---|---|"]
        for option in sorted(command.options().values(), key=lambda option: not option.is_positional):
            default = "" if option.default in (REQUIRED, None, False, ()) else f"`{option.default}`"
            lines.append(f"| `{option.flag}` | {cell(default)} | {cell(option.doc)} |")
        lines.append("")
    return "\n".join(lines)


def api_page() -> str:
    """The public names with their docstrings."""
    lines = ["# API", ""]
    for module, names in API.items():
        lines += [f"## {module}", "", "```{eval-rst}", f".. currentmodule:: {module}", ""]
        owner = __import__(module, fromlist=["*"])
        known = names or [n for n in getattr(owner, "__all__", dir(owner)) if not n.startswith("_")]
        for name in known:
            value = getattr(owner, name)
            if inspect.isclass(value):
                lines += [f".. autoclass:: {name}", *["   :inherited-members:"] * (value is msrl.Result), ""]
                fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
                lines += [f"   - ``{f.name}``: {f.metadata['doc']}" for f in fields if "doc" in f.metadata] + [""]
            elif inspect.isfunction(value):
                lines += [f".. autofunction:: {name}", ""]
        lines += ["```", ""]
    return "\n".join(lines)
