"""Names that `msrl-jax list` shows, read from the sources of this package: importing those would import JAX."""

import re
from pathlib import Path

ENVIRONMENTS = ["KuhnPoker", "RockPaperScissors"]
"""The environments of this package."""


def algorithms() -> list[str]:
    """The names of all algorithms."""
    return _found("algorithms", r'^(?:@config\(|\w+ = variant\(\s*\w+,\s*"\w+",\s*)"(\w+)"')


def policies() -> list[str]:
    """The names of all distribution policies: classes with a layout."""
    return _found("policies", r"^class (\w+)(?:(?!^class )[\s\S])*?^    def layout\(")


def _found(folder: str, pattern: str) -> list[str]:
    files = (Path(__file__).parents[1] / folder).glob("*.py")
    return sorted(name for file in files for name in re.findall(pattern, file.read_text("utf-8"), re.MULTILINE))
