"""Recipes: settings for an algorithm on an environment, and a record of the scores that they reach.

    msrl_jax/recipes/NAME.toml      the settings, in the format of `--config`; comments at the top say where they come from
    benchmarks/records/NAME.json    the record: curves and scores of every seed, written by `reproduce`

The recipes are part of the package. The records are part of the repository, so an installed package may have none.
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

from msrl_jax._files import as_path, parse_json, replacing
from msrl_jax.fragments.support.checks import suggestion
from msrl_jax.run.disk import toml

FOLDER = Path(__file__).parents[1] / "recipes"
RECORDS = (Path(__file__).parents[2] / "benchmarks" / "records", Path("benchmarks", "records"))
"""Where records may be: in the clone that the package is imported from, or in the one that is the working directory."""
NO_RECORDS = "found no records of recipes; run in a clone of the repository, or give its benchmarks/records with --records"
_ANEW = " (msrl-jax reproduce, with --update)"
_OTHERS = ("policy", "eval_every", "eval_episodes")  # keys that do not affect what is computed


class RecordError(ValueError):
    """The record of a recipe is damaged, or was made with other settings."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Named settings.

    Attributes:
      name: the name of the recipe.
      path: the file of the recipe.
      about: where the settings come from.
      values: the keys, which are names of flags, and their values.
    """

    name: str
    path: Path
    about: str
    values: Mapping[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """The values that determine what is computed."""
        return {key: value for key, value in self.values.items() if key not in _OTHERS}

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the algorithm's config."""
        not_fields = ("algo", "env", "env_params", "total_steps", "rank_by")
        return {key: value for key, value in self.settings.items() if key not in not_fields}


@dataclasses.dataclass(frozen=True)
class Record:
    """The scores that a recipe reached, over `S` seeds and `C` points of the learning curve.

    Attributes:
      recipe: the name of the recipe.
      settings: the settings of the recipe at that time.
      config: all fields of the config, including defaults.
      seeds: the seeds. `[S]`
      steps: the steps of each seed at the points of the curve. `[C]`
      returns: the mean return of the episodes that ended between two points; None if none ended. `[S][C]`
      last: the mean return over the last tenth of training. `[S]`
      best: the mean return of greedy episodes of the agent with the best evaluation. `[S]`
      best_steps: the number of steps at that evaluation. `[S]`
      evaluations: the steps at which the evaluations were made from which the best one was chosen.
      episodes: the number of episodes of `best`.
      score: the quantity of `returns`, `last` and `best`: "return", or a metric of the environment.
      seconds: time for all seeds together, by part.
      versions: the versions of Python and of packages.
      commit: the commit of this package; empty if unknown.
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
        """The hardware used for training: the accelerator, if any, and the number of cores, such as `2 cores`."""
        number = self.hardware["cores"]
        cores = "1 core" if number == 1 else f"{number} cores"
        return cores if self.hardware["platform"] == "cpu" else f"{self.hardware['count']} {self.hardware['kind']}, {cores}"

    @property
    def sum(self) -> str:
        """The checksum of the content."""
        return _checksum(dataclasses.asdict(self))

    def write(self, path: Path) -> None:
        """Writes the record to a temporary file, then renames it."""
        content = dataclasses.asdict(self) | {"sum": self.sum}
        lines = [f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in content.items()]
        with replacing(path) as partial:
            partial.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")

    @classmethod
    def read(cls, path: Path) -> "Record":
        """Reads a record; raises RecordError if it is damaged, or was written by another version of this package."""
        try:
            content = parse_json(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise RecordError(f"the record {path} is damaged ({error}); restore it, or write it again{_ANEW}") from None
        if not isinstance(content, dict) or content.pop("sum", None) != _checksum(content):
            raise RecordError(f"the record {path} was changed after it was written; restore it, or write it again{_ANEW}")
        if unexpected := {field.name for field in dataclasses.fields(cls)} ^ content.keys():
            names = ", ".join(sorted(unexpected))
            raise RecordError(f"the record {path} is of another version of msrl-jax ({names}); write it again{_ANEW}")
        return cls(**content)


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def names() -> tuple[str, ...]:
    """Returns the names of all recipes."""
    return tuple(sorted(_files()))


def _files() -> dict[str, Path]:
    return {path.stem.lower(): path for path in FOLDER.glob("*.toml")}


def matching(patterns: Sequence[str]) -> list[str]:
    """Returns the recipes with these names, or that match patterns such as `ppo-*`; raises ValueError if one matches none."""
    recipes: dict[str, None] = {}
    for pattern in patterns:
        if not (matches := fnmatch.filter(names(), pattern.lower())):
            raise ValueError(f"no recipe is named {pattern!r}{suggestion(pattern, names())}; msrl-jax list --recipes has them")
        recipes |= dict.fromkeys(matches)
    return list(recipes)


def find(name: str) -> Recipe:
    """Reads a recipe; raises ValueError with the nearest name if the name is unknown, or if the file is not a recipe."""
    files = _files()
    if not isinstance(name, str):
        raise ValueError(f"give the name of a recipe, such as 'ppo-cartpole', not a value of type {type(name).__name__}")
    if name.lower() not in files:
        raise ValueError(f"no recipe is named {name!r}{suggestion(name, names())}; msrl-jax list --recipes has them")
    path = files[name.lower()]
    try:
        text = path.read_bytes().decode("utf-8-sig")
        content = toml.flat(tomllib.loads(text))
        values = {key.replace("-", "_"): value for key, value in content.items()}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"the recipe {path} cannot be read: {error}; write key = value, as in a file of --config") from None
    if twice := [key for key in content if key.replace("-", "_") != key and key.replace("-", "_") in content]:
        raise ValueError(f"{twice[0]} and {twice[0].replace('-', '_')} are the same key in the recipe {path}; delete one")
    for key, kind, example in (("algo", str, '"ppo"'), ("env", str, '"CartPole-v1"'), ("total_steps", int, "500_000")):
        if type(values.get(key)) is not kind:
            actual = repr(values[key]) if key in values else "missing"
            raise ValueError(f"{key} is {actual} in the recipe {path}; write a value such as {key} = {example}")
    lines = text.splitlines()
    head = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return Recipe(name.lower(), path, " ".join(line.lstrip("# ") for line in head), values)


def of_pair(algo: str, env: str) -> Recipe | None:
    """Returns the recipe for an algorithm and an environment, if there is one; skips files that are not recipes."""
    for name in names():
        with contextlib.suppress(ValueError):
            recipe = find(name)
            if (recipe.values["algo"], recipe.values["env"]) == (algo, env):
                return recipe
    return None


def records_folder(path: str | os.PathLike | None = None) -> Path | None:
    """Returns the folder of the records: `path`, or the one in a clone; None without a clone.

    Raises:
      ValueError: if the given path is not a folder.
    """
    if path is None:
        return next((place for place in RECORDS if place.is_dir()), None)
    folder = as_path("records", path)
    if not folder.is_dir():
        raise ValueError(f"the folder of records {folder} does not exist; give benchmarks/records of a clone (--records)")
    return folder


def record_path(name: str, folder: Path) -> Path:
    """Returns the path of a recipe's record in a folder of records; the file need not exist."""
    return folder / f"{name}.json"


def record_of(recipe: Recipe, folder: Path | None) -> Record | None:
    """Returns the record of a recipe from a folder of records; None without a record or a folder.

    Raises:
      RecordError: if the record is damaged, or was made with other settings.
    """
    if folder is None or not (path := record_path(recipe.name, folder)).exists():
        return None
    record = Record.read(path)
    check_same(recipe.name, record.settings, recipe.settings)
    return record


def check_same(name: str, record_settings: Mapping[str, Any], recipe_settings: Mapping[str, Any]) -> None:
    """Raises RecordError if the settings of a record differ from the recipe's current settings."""
    if fact := difference(record_settings, recipe_settings):
        raise RecordError(f"the record of {name} is {fact}; write it again with msrl-jax reproduce {name} --update")


def difference(record_settings: Mapping[str, Any], recipe_settings: Mapping[str, Any]) -> str:
    """Describes the first setting in which a record differs from the current recipe; empty if they agree."""
    key = next(
        (key for key in {**record_settings, **recipe_settings} if record_settings.get(key) != recipe_settings.get(key)), None
    )
    if key is None:
        return ""
    recorded, current = (settings.get(key, "the default") for settings in (record_settings, recipe_settings))
    return f"of {key}={recorded}, and the recipe has {current} now"
