"""Recipes: settings for a pair of algorithm and environment, and the record of what they reach.

    msrl_jax/recipes/NAME.toml      the settings, as `--config` takes them; comments at its head say where they come from
    benchmarks/records/NAME.json    the record: curves and scores of every seed, which `reproduce` wrote

Recipes are part of the package. Records are part of its repository, so an installed package may have none.
"""

import contextlib
import dataclasses
import fnmatch
import hashlib
import itertools
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msrl_jax.fragments.support.checks import as_path, parse_json, replacing, suggestion
from msrl_jax.run.disk import toml

FOLDER = Path(__file__).parents[1] / "recipes"
RECORDS = (Path(__file__).parents[2] / "benchmarks" / "records", Path("benchmarks", "records"))
"""Where records may be: in the clone that the package is imported from, or in the one that is the working directory."""
NO_RECORDS = "no records of recipes are here; run in a clone of the repository, or name its benchmarks/records with --records"
_ANEW = " (msrl-jax reproduce, with --update)"
_OTHERS = ("policy", "eval_every", "eval_episodes")  # keys that do not decide what is computed


class RecordError(ValueError):
    """A record of a recipe is damaged, or of other settings."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings that have a name.

    Attributes:
      name: its name.
      path: its file.
      about: where the settings come from.
      values: its keys, the names of flags, and their values.
    """

    name: str
    path: Path
    about: str
    values: Mapping[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """The keys that decide what is computed."""
        return {key: value for key, value in self.values.items() if key not in _OTHERS}

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the config of the algorithm."""
        own = ("algo", "env", "env_params", "total_steps", "rank_by")
        return {key: value for key, value in self.settings.items() if key not in own}


@dataclasses.dataclass(frozen=True)
class Record:
    """What a recipe reached, over `S` seeds and `C` points of its curve.

    Attributes:
      recipe: the name of the recipe.
      settings: its settings at that time.
      config: all fields of the config, defaults included.
      seeds: the seeds. `[S]`
      steps: the steps of each seed at the points of the curve. `[C]`
      returns: the mean returns of the episodes that ended between two points; None where none did. `[S][C]`
      last: the mean return over the last tenth of training. `[S]`
      best: the mean return of greedy episodes of the agent with the best evaluation. `[S]`
      best_steps: the steps after which that was. `[S]`
      evaluations: steps of the evaluations between which the best one was chosen.
      episodes: the number of episodes of `best`.
      score: what `returns`, `last` and `best` are of: "return", or a metric of the environment.
      seconds: time for all seeds together, by part.
      versions: those of Python and of packages.
      commit: the commit of this package; empty if it was not known.
      hardware: the devices and the processor.
      date: the day, such as `2026-11-25`.
    """

    recipe: str
    settings: Mapping[str, Any]
    config: Mapping[str, Any]
    seeds: Sequence[int]
    steps: Sequence[int]
    returns: Sequence[Sequence[float | None]]
    last: Sequence[float]
    best: Sequence[float]
    best_steps: Sequence[int]
    evaluations: Sequence[int]
    episodes: int
    score: str
    seconds: Mapping[str, float]
    versions: Mapping[str, str]
    commit: str
    hardware: Mapping[str, Any]
    date: str

    @property
    def place(self) -> str:
        """What trained it: the number of cores, such as `2 cores`, and before it the accelerator, if there was one."""
        number = self.hardware["cores"]
        cores = "1 core" if number == 1 else f"{number} cores"
        return cores if self.hardware["platform"] == "cpu" else f"{self.hardware['count']} {self.hardware['kind']}, {cores}"

    @property
    def sum(self) -> str:
        """The check sum of its content."""
        return _sum(dataclasses.asdict(self))

    def write(self, path: Path) -> None:
        """Writes the record beside, and renames it."""
        content = dataclasses.asdict(self) | {"sum": self.sum}
        lines = [f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in content.items()]
        with replacing(path) as partial:
            partial.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")

    @classmethod
    def read(cls, path: Path) -> "Record":
        """Reads a record; raises RecordError if it is damaged, or of another version of this package."""
        try:
            content = parse_json(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise RecordError(f"the record {path} is damaged ({error}); restore it, or write it anew{_ANEW}") from None
        if not isinstance(content, dict) or content.pop("sum", None) != _sum(content):
            raise RecordError(f"the record {path} is not what was written; restore it, or write it anew{_ANEW}")
        if others := {field.name for field in dataclasses.fields(cls)} ^ content.keys():
            names = ", ".join(sorted(others))
            raise RecordError(f"the record {path} is of another version of msrl-jax ({names}); write it anew{_ANEW}")
        return cls(**content)


def _sum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def names() -> tuple[str, ...]:
    """The names of all recipes."""
    return tuple(sorted(_files()))


def _files() -> dict[str, Path]:
    return {path.stem.lower(): path for path in FOLDER.glob("*.toml")}


def matching(patterns: Sequence[str]) -> list[str]:
    """The recipes that are named or match patterns such as `ppo-*`; raises ValueError if one matches none."""
    found: dict[str, None] = {}
    for pattern in patterns:
        if not (some := fnmatch.filter(names(), pattern.lower())):
            raise ValueError(f"no recipe is named {pattern!r}{suggestion(pattern, names())}; msrl-jax list --recipes has them")
        found |= dict.fromkeys(some)
    return list(found)


def find(name: str) -> Recipe:
    """Reads a recipe; raises ValueError, which suggests the nearest, if the name is unknown, or if its file is not a recipe."""
    files = _files()
    if not isinstance(name, str):
        raise ValueError(f"a recipe is given by its name, such as 'ppo-cartpole', and this is of type {type(name).__name__}")
    if name.lower() not in files:
        raise ValueError(f"no recipe is named {name!r}{suggestion(name, names())}; msrl-jax list --recipes has them")
    path = files[name.lower()]
    try:
        text = path.read_bytes().decode("utf-8-sig")
        given = toml.flat(tomllib.loads(text))
        values = {key.replace("-", "_"): value for key, value in given.items()}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"the recipe {path} cannot be read: {error}; write key = value, as in a file of --config") from None
    if twice := [key for key in given if key.replace("-", "_") != key and key.replace("-", "_") in given]:
        raise ValueError(f"{twice[0]} and {twice[0].replace('-', '_')} are one key in the recipe {path}; leave one of them out")
    for key, kind, example in (("algo", str, '"ppo"'), ("env", str, '"CartPole-v1"'), ("total_steps", int, "500_000")):
        if type(values.get(key)) is not kind:
            given = repr(values[key]) if key in values else "missing"
            raise ValueError(f"{key} is {given} in the recipe {path}; write {key} = {example}, or what it is for")
    lines = text.splitlines()
    head = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return Recipe(name.lower(), path, " ".join(line.lstrip("# ") for line in head), values)


def of_pair(algo: str, env: str) -> Recipe | None:
    """The recipe for an algorithm and an environment, if there is one; files that are not recipes are passed over."""
    for name in names():
        with contextlib.suppress(ValueError):
            recipe = find(name)
            if (recipe.values["algo"], recipe.values["env"]) == (algo, env):
                return recipe
    return None


def records_folder(given: str | os.PathLike | None = None) -> Path | None:
    """The folder of the records: the given one, else that of a clone; None if there is no clone.

    Raises:
      ValueError: if the given one is not a folder.
    """
    if given is None:
        return next((place for place in RECORDS if place.is_dir()), None)
    folder = as_path("records", given)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder} with records; name benchmarks/records of a clone (--records)")
    return folder


def record_path(name: str, folder: Path) -> Path:
    """The file of the record of a recipe in a folder of records; it need not exist."""
    return folder / f"{name}.json"


def record_of(recipe: Recipe, folder: Path | None) -> Record | None:
    """The record of a recipe in a folder of records; None if there is no record or no folder.

    Raises:
      RecordError: if the record is damaged, or of other settings.
    """
    if folder is None or not (path := record_path(recipe.name, folder)).exists():
        return None
    record = Record.read(path)
    check_same(recipe.name, record.settings, recipe.settings)
    return record


def check_same(name: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises RecordError if the settings of a record are not those of its recipe now."""
    if changed := difference(was, now):
        raise RecordError(f"the record of {name} is {changed}; write the record anew: msrl-jax reproduce {name} --update")


def difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first setting in which a record is not what its recipe is now, as words; empty if there is none."""
    changed = next((key for key in {**was, **now} if was.get(key) != now.get(key)), None)
    if changed is None:
        return ""
    before, after = (settings.get(changed, "the default") for settings in (was, now))
    return f"of {changed}={before}, and the recipe has {after} now"

