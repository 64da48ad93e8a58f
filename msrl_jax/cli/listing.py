"""The output of `msrl-jax list`: recipes, and the names of algorithms, environments, policies and suites."""

import re
import sys
from pathlib import Path
from typing import Any

from msrl_jax import _rooms
from msrl_jax.envs.suites import catalog
from msrl_jax.fragments.support.terminal import table
from msrl_jax.run import recipes


def recipes_in(records: Path | None) -> tuple[str, list[dict[str, Any]]]:
    """Lists the recipes, with their scores from the records in a folder: as text, and as data."""
    rows, cells, folder = [], [], recipes.records_folder(records)
    if folder is None:
        print(recipes.NO_RECORDS, file=sys.stderr)
    for name in recipes.names():
        try:
            recipe = recipes.find(name)
        except ValueError as error:
            print(f"warning: {error}", file=sys.stderr)
            continue
        about = {"recipe": recipe.name, **{key: recipe.values[key] for key in ("algo", "env", "total_steps")}}
        try:
            record = recipes.record_of(recipe, folder)
            score = "no record"
        except recipes.RecordError as error:
            record, score = None, "damaged record"
            print(f"warning: {error}", file=sys.stderr)
        wall = ""
        if record is not None:
            about |= {"return": sum(record.last) / len(record.last), "seeds": len(record.seeds)}
            about |= {"seconds": record.seconds["wall"], "place": record.place}
            score = f"{about['return']:.4g}"
            wall = f"{about['seconds']:,.0f} s, {about['seeds']} seeds, {record.place}"
        rows.append(about | {"about": recipe.about})
        cells.append([about["recipe"], about["algo"], about["env"], f"{about['total_steps']:,}", score, wall])
    return "\n".join(table(["recipe", "algorithm", "environment", "steps", "return", "time of all seeds"], cells)), rows


def names(*, only_envs: bool) -> tuple[str, dict[str, Any]]:
    """Lists the names of algorithms, environments, policies and suites: as text, and as data."""
    if "msrl_jax.algorithms" in sys.modules:  # also list what this process has registered; otherwise avoid importing JAX
        from msrl_jax import algorithms, envs, policies

        registered = {"algorithms": algorithms.names(), "environments": sorted(envs.names()), "policies": policies.names()}
    else:
        registered = names_in_sources()
    if only_envs:
        registered = {"environments": registered["environments"]}
    suites = {prefix: {"version": s.version(), "install": s.install} for prefix, s in catalog.SUITES.items()}
    lines = registered | {"suites": [f"{prefix:12}{_describe_suite(suite)}" for prefix, suite in catalog.SUITES.items()]}
    text = "\n".join(f"{kind}\n" + "".join(f"  {line}\n" for line in entries) for kind, entries in lines.items())
    return text, registered | {"suites": suites}


def names_in_sources() -> dict[str, list[str]]:
    """Returns the names in the registries, read from the sources of this package, because importing them would import JAX."""

    def find_names(folder: str, pattern: str) -> list[str]:
        texts = [file.read_text("utf-8") for file in (Path(__file__).parents[1] / folder).glob("*.py")]
        return sorted(name for text in texts for name in re.findall(pattern, text, re.MULTILINE))

    algorithms = find_names("algorithms", r'^(?:@config\(\s*|\w+ = variant\(\s*\w+,\s*"\w+",\s*)"(\w+)"')
    return {
        "algorithms": sorted([*algorithms, *_rooms.added("algorithms")]),
        "environments": sorted([*catalog.names(), "PointMaze", *_rooms.added("environments")]),
        "policies": find_names("policies", r"^class (\w+)(?:(?!^class )[\s\S])*?^    def layout\("),  # classes with a layout
    }


def _describe_suite(suite: catalog.Suite) -> str:
    """Returns whether a suite of environments is installed, or how to install it."""
    if (version := suite.version()) is None:
        return f"not installed: {suite.install} brings the environments of {suite.title}"
    if not suite.files:
        return f"{suite.package} {version}; {suite.package}.list_all_envs() lists its environments"
    return f"{suite.package} {version}, {len(suite.own_names)} environments"
