"""Config files, `--config run.toml`: TOML files whose keys are the names of flags."""

import dataclasses
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from msrl_jax.cli.options import REQUIRED, Option, UsageError, nearest, values_of
from msrl_jax.fragments.support.naming import check_trust
from msrl_jax.run import recipes
from msrl_jax.run.disk import toml

_OF_WORDS = ("config", "print_config", "recipe", "trust")  # options that a file cannot set


@dataclasses.dataclass(frozen=True)
class ConfigFile:
    """The content of a config file: values by key, and the line number of each key."""

    name: str = ""
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lines: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def at(self, key: str) -> str:
        """Returns the location of a key, as the start of a message."""
        return f"{self.name}, line {self.lines[key]}" if key in self.lines else self.name

    def located(self, error: BaseException, arguments: Mapping[str, Any]) -> str:
        """Returns the message of an error, preceded by the location in the file of the first key that it names."""
        text = " ".join(str(error).split())
        if text.startswith(self.name):
            return text
        keys = re.findall(r"(?=\b([\w.]+)(?:\[\d+\])?=)", text)  # also `replay.n_step` in `DQN.replay.n_step=0`
        key = next((name for name in keys if name in self.values and name in arguments), None)
        return text if key is None else f"{self.at(key)}: {text}"

    def read(self, options: Sequence[Option], arguments: Collection[str], *, has_fields: bool) -> dict[str, Any]:
        """Returns the values of options that are not given elsewhere.

        Raises UsageError with the file, the line and the key if a key is unknown or has an invalid value.
        """
        options_by_name, values = {option.name: option for option in options}, dict[str, Any]()
        for key, value in self.values.items():
            if key in _OF_WORDS:
                reason = "a config file cannot set it" if key == "trust" else "a config file cannot include another one"
                raise UsageError(f"{self.at(key)}: {key} belongs on the command line; {reason}")
            if key not in options_by_name:
                hint = nearest(key, [*options_by_name], has_fields=has_fields)
                raise UsageError(f"{self.at(key)}: unknown key {key!r}{hint}; keys are the names of the options")
            if key not in arguments:
                try:
                    values[key] = options_by_name[key].take(value)
                except ValueError as error:
                    raise UsageError(f"{self.at(key)}: {key} {error}") from None
        return values

    def check_trust(self, options: Collection[str], flags: Collection[str], *, trusted: bool) -> None:
        """Raises TrustError if the file names code to run in a key that no flag overrides, unless it is trusted."""
        values = {key: value for key, value in self.values.items() if key.replace("_", "-") not in flags}
        if trusted or not any(":" in text or ".py" in text for text in map(str, values.values())):
            return
        from msrl_jax.run.experiment.trust import KINDS, code_of  # this import loads JAX

        values = {key: value for key, value in values.items() if key in KINDS or key not in options}
        check_trust(f"the file {self.name}", code_of(values), False)


def recipe_file(*, recipe: str | None = None) -> Path | None:
    """Returns the file of a recipe.

    Args:
      recipe: take options from a recipe, such as ppo-cartpole (see `msrl-jax list --recipes`); you may add other options.
    """
    return None if recipe is None else recipes.find(recipe).path


def from_arguments(argv: Sequence[str], *, has_recipes: bool) -> ConfigFile:
    """Reads the file that `--config` or `--recipe` names; returns an empty one if there is none."""
    flags = [word.partition("=")[0] for word in argv]
    file_flags = [flag for flag in flags if flag == "--config" or (flag == "--recipe" and has_recipes)]
    if len(file_flags) > 1:
        fact = f"is given {len(file_flags)} times" if len(set(file_flags)) == 1 else "are both given"
        raise UsageError(f"{' and '.join(dict.fromkeys(file_flags))} {fact}; put the keys of all files into one")
    if not file_flags:
        return ConfigFile()
    if not (words := values_of(argv, file_flags[0].removeprefix("--"))) or not words[0]:
        example = "file, such as run.toml" if file_flags == ["--config"] else "name, such as ppo-cartpole"
        raise UsageError(f"{file_flags[0]} needs a {example}")
    return read(words[0] if file_flags == ["--config"] else str(recipe_file(recipe=words[0])))


def read(name: str) -> ConfigFile:
    """Reads a file; raises UsageError with the file and the line if it is not valid TOML."""
    path = Path(name)
    if path.is_dir():
        raise UsageError(f"--config {name} is a folder; give a file, such as {path / 'run.toml'}")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"--config {name}: the file does not exist") from None
    except OSError as error:
        raise UsageError(f"--config {name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--config {name} is not UTF-8 text; write key = value in each line") from None
    rows = text.splitlines()
    keys, table = list[str | None](), ""
    for row in rows:
        match = re.match(r"""(\[*)\s*["']?([\w.-]+)""", row)
        keys.append(match and table * (not match[1]) + match[2].replace("-", "_"))
        table = f"{keys[-1]}." if match and match[1] else table
    lines = {key: number for number, key in reversed([*enumerate(keys, 1)]) if key}
    try:
        nested = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        if not isinstance(error, tomllib.TOMLDecodeError):
            raise UsageError(f"--config {name} has a number with too many digits, or too many brackets; shorten it") from None
        fact, _, place = str(error).partition(" (at ")
        number = int(match[1]) if (match := re.match(r"line (\d+)", place)) else len(rows)
        key = keys[number - 1] if number else None
        others = [other for other in lines if key and (f"{other}.".startswith(f"{key}.") or key.startswith(f"{other}."))]
        if fact == "Cannot overwrite a value" and key and lines[key] == number and len(others) > 1:
            head, inner = min(others, key=len), max(others, key=len)
            raise UsageError(f'{name}, line {number}: {head} has a value and parts; write "{inner}" = ..., in quotes') from None
        if fact == "Cannot overwrite a value" and key:
            raise _duplicate_error(name, key, number, lines) from None
        raise UsageError(f"{name}, line {number}: bad TOML ({fact}); write key = value, with text in double quotes") from None
    values: dict[str, Any] = {}
    for key, value in toml.flat(nested).items():
        if (key := key.replace("-", "_")) in values:
            raise _duplicate_error(name, key, [number for number, other in enumerate(keys, 1) if other == key][-1], lines)
        values[key] = value
    return ConfigFile(name, values, lines)


def _duplicate_error(name: str, key: str, number: int, lines: Mapping[str, int]) -> UsageError:
    return UsageError(f"{name}, line {number}: {key} is given twice, first in line {lines[key]}; give it once")


def text(name: str, options: Sequence[Option], values: Mapping[str, Any]) -> str:
    """Returns a config file for a command line: all options and config fields; those that were not given are comments."""
    head = f"msrl-jax {name} --config FILE is this command line. Keys in comments have their defaults; flags win over the file."
    parts = [toml.comment(head)]
    for option in options:
        if option.name not in _OF_WORDS:
            value = values.get(option.name, None if option.default is REQUIRED else option.default)
            parts.append(toml.entry(option.name, value, option.doc, is_active=option.name in values))
    return "\n".join(parts)
