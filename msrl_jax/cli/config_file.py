"""Config files, `--config run.toml`: TOML whose keys are the names of flags, read as if they were on the command line."""

import dataclasses
import math
import re
import tomllib
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from msrl_jax.cli import flags
from msrl_jax.cli.flags import UsageError
from msrl_jax.fragments.support.naming import check_trust
from msrl_jax.run import recipes
from msrl_jax.run.disk import toml

_NAMES = {"--config": "file, such as run.toml", "--recipe": "name, such as ppo-cartpole; msrl-jax list --recipes has them"}
_POSITIONAL = tyro.conf.Positional[int].__metadata__[0]  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class ConfigFile:
    """What a file says: values by key, and the line of each."""

    name: str = ""
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lines: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def at(self, key: str) -> str:
        """The place of a key, to begin a message."""
        return f"{self.name}, line {self.lines[key]}" if key in self.lines else self.name

    def located(self, error: BaseException, given: Collection[str]) -> str:
        """The message of an error, with the place in the file if its first clause names a key that is not given elsewhere."""
        text = " ".join(str(error).split())
        clause = re.split(r";|\. |\(did", text)[0]
        values = {key: value for key, value in self.values.items() if key not in given}
        patterns = {key: rf"--{key.replace('_', '-')}(?![\w-])|(?<![\w-]){key}(\[\d+\])?=" for key in values}
        found = {key: match.start() for key, pattern in patterns.items() if (match := re.search(pattern, clause))}
        if not found and "--" not in clause:  # it may name the value: unknown environment 'CartPole'
            found = {key: clause.find(repr(str(x))) for key, x in values.items() if repr(str(x)) in clause}
        if not found:
            return text
        key = min(found, key=lambda name: found[name])
        text = re.sub(rf"--{key.replace('_', '-')}(?![\w-])", key, text, count=1)
        return f"{self.at(key)}: {text}" if re.search(rf"\b{key}\b", text) else f"{self.at(key)}: {key}: {text}"

    def as_flags(self, base: type, argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        """The keys that a command line does not have, as flags; and positional ones, as defaults.

        Raises UsageError, which names the file, the line and the key, if a key is unknown or has a value that no flag takes.
        """
        if not self.values:
            return [], {}
        given = flags.given_fields(argv)
        self._check_trust({f.name for f in dataclasses.fields(base)}, given, trust="--trust" in argv)
        hints, algo = typing.get_type_hints(base, include_extras=True), list[str]()
        if "algo" in hints and "algo" in self.values and "algo" not in given:
            # It decides which other keys there are.
            algo = _words("algo", hints["algo"], self.values["algo"], self.at("algo"))
        options, fields = flags.fields_of(base, [*algo, *argv])
        kinds: dict[str, Any] = {f.name: f.type for f in (*options, *fields)}
        words, defaults = list[str](), dict[str, Any]()
        for key, value in self.values.items():
            if key in ("config", "print_config", "recipe", "trust"):
                why = "a file cannot trust itself" if key == "trust" else "a file cannot name another one"
                raise UsageError(f"{self.at(key)}: {key} belongs on the command line; {why}")
            if key not in kinds and isinstance(value, dict):
                _scalar(key, None, value, self.at(key))
            if key not in kinds:
                near = flags.nearest(key, [f.name for f in options], [f.name for f in fields])
                raise UsageError(f"{self.at(key)}: unknown key {key!r}{near}; keys are the options of {base.__name__.lower()}")
            if key in given:
                continue
            if _is_positional(kinds[key]):
                kind, each = kinds[key].__origin__, value if isinstance(value, list) else [value]
                if typing.get_origin(kind) is tuple:
                    defaults[key] = tuple(_scalar(key, str, x, self.at(key)) for x in each)
                else:
                    defaults[key] = kind(_scalar(key, kind, value, self.at(key)))
            else:
                words += _words(key, kinds[key], value, self.at(key))
        return words, defaults


    def _check_trust(self, options: Collection[str], given: Collection[str], *, trust: bool) -> None:
        """Raises TrustError if the file names code to run in what is not given elsewhere, unless it is trusted."""
        values = {key: x for key, x in self.values.items() if key not in given}
        if trust or not any(":" in text or ".py" in text for text in map(str, values.values())):
            return
        from msrl_jax.run.experiment.trust import KINDS, code_of  # which imports JAX

        values = {key: x for key, x in values.items() if key in KINDS or key not in options}
        check_trust(f"the file {self.name}", code_of(values), trust)


def taken(command: str, argv: Sequence[str]) -> tuple[list[str], ConfigFile, bool]:
    """The arguments without `--config`, `--recipe` and `--print-config`, the file, and whether to print one."""
    rest, names, prints, given = list[str](), list[str](), False, dict[str, None]()
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag == "--config" or (flag == "--recipe" and command == "train"):
            value = value if equals else next(words, "")
            if not value or (value.startswith("--") and not equals):
                raise UsageError(f"{flag} needs a {_NAMES[flag]}")
            given[flag] = None
            names.append(value if flag == "--config" else str(recipes.find(value).path))
        elif word in ("--print-config", "--print_config"):
            prints = True
        else:
            rest.append(word)
    if len(names) > 1:
        fact = f"is given {len(names)} times" if len(given) == 1 else "are both given"
        raise UsageError(f"{' and '.join(given)} {fact}; put the keys of all files into one")
    return rest, read(names[0]) if names else ConfigFile(), prints


def read(name: str) -> ConfigFile:
    """Reads a file; raises UsageError, which names the file and the line, if it is no TOML."""
    path = Path(name)
    if path.is_dir():
        raise UsageError(f"--config {name} is a folder; name a file, such as {path / 'run.toml'}")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"--config {name}: there is no such file") from None
    except OSError as error:
        raise UsageError(f"--config {name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--config {name} is no text in UTF-8; write key = value in each line") from None
    rows = text.splitlines()
    keys, table = list[str | None](), ""
    for row in rows:
        match = re.match(r"""(\[*)\s*["']?([\w.-]+)""", row)
        keys.append(match and table * (not match[1]) + match[2].replace("-", "_"))
        table = f"{keys[-1]}." if match and match[1] else table
    lines = {key: number for number, key in reversed([*enumerate(keys, 1)]) if key}
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        if not isinstance(error, tomllib.TOMLDecodeError):
            raise UsageError(f"--config {name} has a number of too many digits, or too many brackets; shorten it") from None
        fact, _, place = str(error).partition(" (at ")
        number = int(match[1]) if (match := re.match(r"line (\d+)", place)) else len(rows)
        key = keys[number - 1] if number else None
        if fact == "Cannot overwrite a value" and key:
            raise _twice(name, key, number, lines) from None
        raise UsageError(f"{name}, line {number}: no TOML ({fact}); write key = value, with text in double quotes") from None
    values: dict[str, Any] = {}
    for key, value in toml.flat(found).items():
        if (key := key.replace("-", "_")) in values:
            raise _twice(name, key, [number for number, other in enumerate(keys, 1) if other == key][-1], lines)
        values[key] = value
    return ConfigFile(name, values, lines)


def _twice(name: str, key: str, number: int, lines: Mapping[str, int]) -> UsageError:
    return UsageError(f"{name}, line {number}: {key} is given twice, first in line {lines[key]}; give it once")


def _words(key: str, kind: Any, value: Any, where: str) -> list[str]:
    """A value as words of a command line, for a flag of this kind."""
    flag, hint = f"--{key.replace('_', '-')}", kind.__origin__ if typing.get_origin(kind) is Annotated else kind
    if hint is bool:
        if not isinstance(value, bool):
            raise UsageError(f"{where}: {key} = {toml.value(value)}; use true or false")
        return [flag if value else flag.replace("--", "--no-", 1)]
    if not isinstance(value, list):
        return [f"{flag}={_scalar(key, hint, value, where)}"]
    if not value:
        raise UsageError(f"{where}: {key} is an empty array; give at least one value, or leave it out")
    spec = next((x for x in getattr(kind, "__metadata__", ()) if isinstance(x, PrimitiveConstructorSpec)), None)
    metavar = "" if spec is None else str(spec.metavar)
    if metavar.startswith("ITEM"):  # sequences
        rows = value if any(isinstance(x, list) for x in value) else [value]
        rows = [row if isinstance(row, list) else [row] for row in rows]
        return [f"{flag}={','.join(' '.join(_scalar(key, hint, x, where) for x in row) for row in rows)}"]
    texts = [_scalar(key, hint, x, where) for x in value]
    if "[," in metavar:
        return [f"{flag}={','.join(texts)}{',' * (len(texts) == 1 and 'FLOAT' in metavar)}"]
    if not metavar and typing.get_origin(hint) is not tuple:
        raise UsageError(f"{where}: {key} takes one value; {toml.value(value)} is an array")
    if dashed := [x for x in value if isinstance(x, str) and x.startswith("-")]:
        raise UsageError(f"{where}: {key} has {dashed[0]!r}, which begins as a flag does; leave the dash out")
    return [flag, *texts]


def _scalar(key: str, hint: Any, value: Any, where: str) -> str:
    """A text or a number, as on the command line."""
    fact = None
    if isinstance(value, Mapping):
        if [*value] == ["object"]:
            flag = key.replace("_", "-")
            fact = f"was an object ({value['object']}), which a file cannot hold; name one with --{flag}, or use msrl.train"
        else:
            fact = "is an empty table; give it a key, or leave it out"
    elif isinstance(value, bool):
        fact = f"is {toml.value(value)}; it takes a value, not true or false"
    elif isinstance(value, list):
        fact = f"takes one value; {toml.value(value)} is an array"
    elif not isinstance(value, str | int | float):
        fact = f"is a date or time ({value}); write text in double quotes, or a number"
    elif isinstance(value, float) and not math.isfinite(value):
        fact = f"is {value}; use a finite number"
    elif not isinstance(value, str) and Path in (hint, *typing.get_args(hint)):
        fact = f"is the number {value}; write the path in double quotes"
    elif value == "":
        fact = "is empty; give a value, or leave it out"
    elif isinstance(value, str) and not value.isprintable():
        fact = f"has a character that cannot be printed ({value!r}); leave it out"
    if fact is not None:
        raise UsageError(f"{where}: {key} {fact}")
    return str(value)


def text(name: str, base: type, argv: Sequence[str], args: Any) -> str:
    """The file of a command line: all options and fields of the config, those that were not given in comments."""
    given = {"algo", "env", *flags.given_fields(argv)}
    options, fields = flags.fields_of(base, argv)
    head = f"msrl-jax {name} --config FILE is this command line. Keys in comments have their defaults; flags win over the file."
    parts = [toml.comment(head)]
    for field in (*options, *fields):
        if field.name in ("recipe", "trust"):  # the settings of the one are in the file, and no file trusts itself
            continue
        value = getattr(args, field.name) if field in options else flags.flag_value(args.config, field.name)
        is_given = field.name in given or _is_positional(field.type)
        parts.append(toml.entry(field.name, value, field.metadata["doc"], given=is_given))
    return "\n".join(parts)


def _is_positional(kind: Any) -> bool:
    return _POSITIONAL in getattr(kind, "__metadata__", ())
