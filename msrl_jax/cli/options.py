"""Options of commands: parameters of functions, documented by their docstrings, and the fields of configs.

The type of a parameter determines how its values on the command line and in a config file are parsed.
"""

import argparse
import dataclasses
import functools
import inspect
import itertools
import math
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Union

from msrl_jax.cli.signatures import of_source
from msrl_jax.fragments.support.checks import suggestion
from msrl_jax.fragments.support.text_values import parts_of, read_literal, split_specs
from msrl_jax.run.disk import toml

REQUIRED = inspect.Parameter.empty
TRAIN = "msrl_jax.run.training:train"
_ONE = "give one value; msrl-jax sweep tries several values of a field"


class UsageError(ValueError):
    """An error in the command line, or in a config file."""


@dataclasses.dataclass(frozen=True)
class Option:
    """A flag, or a positional argument.

    Attributes:
      name: the name of the parameter or field; dotted if it is a field of an option of a config.
      kind: its type.
      default: its default; `REQUIRED` if it must be given.
      doc: its documentation.
      is_positional: whether it is given without a name.
      is_tunable: whether it may have several values, for members of a run, or a schedule.
      is_swept: whether it takes several values, or text that describes them, for the trials of a sweep.
      defaults: the text of its default, if several configs have different ones.
    """

    name: str
    kind: Any
    default: Any = REQUIRED
    doc: str = ""
    is_positional: bool = False
    is_tunable: bool = False
    is_swept: bool = False
    defaults: str = ""

    @property
    def flag(self) -> str:
        """The flag as written on the command line."""
        return self.name.upper() if self.is_positional else f"--{self.name.replace('_', '-')}"

    @property
    def parts(self) -> tuple[Any, ...]:
        """The alternatives of its type, if that is a union."""
        return parts_of(self.kind)

    @property
    def is_flag(self) -> bool:
        """Whether it is a boolean flag, without a value."""
        return self.kind is bool

    @property
    def items(self) -> tuple[Any, ...]:
        """The types of the items, if a value is a sequence."""
        sequences = [part for part in self.parts if typing.get_origin(part) in (tuple, Sequence)]
        return tuple(item for part in sequences for item in typing.get_args(part))

    @property
    def is_sequence(self) -> bool:
        """Whether a value is a sequence."""
        return bool(self.items)

    @property
    def numbers(self) -> list[Any]:
        """The types of numbers that the option, or its items, accept."""
        return [kind for kind in (int, float) if kind in (*self.parts, *self.items)]

    @property
    def choices(self) -> dict[str, Any]:
        """The values of its choices, by their text. An option with choices that also accepts False has the choice `none`."""
        words = [word for part in self.parts if typing.get_origin(part) is Literal for word in typing.get_args(part)]
        choices = {str(word): word for word in words}
        choices |= {"none": False} if words and bool in self.parts else {}
        return choices | ({"None": None} if type(None) in self.parts else {})

    @property
    def metavar(self) -> str:
        """A short description of its values, for the help."""
        option_kinds = [getattr(part, "option", None) for part in self.parts]
        alternatives = [f"{option}[:field=value,...]" for option in option_kinds if isinstance(option, str)]
        names = [*alternatives, *(name for name in self.choices if name != "None" or alternatives)]
        names += [kind.__name__.upper() for kind in self.numbers]
        names += ["TEXT"] if self.numbers and str in self.parts else []
        names += ["PATH"] if any("Path" in getattr(part, "__name__", "") for part in self.parts) else []
        names += ["MODULE:NAME"] if names and Any in self.parts else []
        names += ["NAME:FROM:TO", "MODULE:NAME"] if self.is_tunable and not self.is_swept else []
        names += ["uniform:LOW:HIGH", "log:LOW:HIGH"] if self.is_swept and self.numbers and not self.is_sequence else []
        return "|".join(names or ["TEXT"]) + "[,...]" * (self.is_tunable or self.is_swept)

    def read(self, words: Sequence[str]) -> Any:
        """Parses its values from the command line; raises ValueError if they are invalid."""
        if not words:
            raise ValueError("has no value; give at least one, or leave the option out")
        if "" in words:
            raise ValueError("is empty; give a value, or leave the option out")
        if self.is_sequence and not self.is_swept:
            if self.numbers and sum("," in word for word in words) > 1:
                raise ValueError(f"is {' '.join(words)}; {_ONE}")
            return self._read_items(",".join(words)) if self.numbers else tuple(words)
        if not self.is_swept:
            return self._read_one(words[0])
        if self.numbers and not self.is_sequence:
            return words[0]  # a distribution, or several numbers
        values = (
            [self._read_items(word) for word in words]
            if self.is_sequence
            else [self._read_one(word.strip()) for word in split_specs(words[0])]
        )
        return values if len(values) > 1 else values[0]

    def take(self, value: Any) -> Any:
        """Reads its value from a config file; raises ValueError if it is invalid."""
        if isinstance(value, Mapping):
            if [*value] == ["object"]:
                object_, remedy = value["object"], f"name one with {self.flag}, or use msrl.train"
                raise ValueError(f"was an object ({object_}), which a file cannot hold; {remedy}")
            raise ValueError("is an empty table; give it a key, or leave it out")
        if isinstance(value, list):
            if not value:
                raise ValueError("is an empty array; give at least one value, or leave it out")
            if not (self.is_sequence or self.is_tunable or self.is_swept):
                raise ValueError(f"takes one value; {toml.value(value)} is an array; {_ONE}")
            items = [tuple(map(self._take_item, item)) if isinstance(item, list) else self._take_item(item) for item in value]
            return items if isinstance(items[0], tuple) or (self.is_swept and not self.is_sequence) else tuple(items)
        return self._take_scalar(value)

    def _take_item(self, value: Any) -> Any:
        return value if isinstance(value, str) else self._take_scalar(value)

    def _take_scalar(self, value: Any) -> Any:
        """Reads text, a number or a boolean from a config file."""
        if isinstance(value, bool) != self.is_flag:
            remedy = "true or false" if self.is_flag else "a value, not true or false"
            raise ValueError(f"is {toml.value(value)}; use {remedy}")
        if isinstance(value, bool):
            return value
        if isinstance(value, str):
            if not value.isprintable():
                raise ValueError(f"has a character that cannot be printed ({value!r}); leave it out")
            return self.read([value])
        if not isinstance(value, int | float):
            raise ValueError(f"is a date or time ({value}); write text in double quotes, or a number")
        if not math.isfinite(value):
            raise ValueError(f"is {value}; use a finite number")
        if not self.numbers and Any not in self.parts:
            raise ValueError(f"is the number {value}; write text in double quotes")
        return self._read_one(value)

    def _read_items(self, text: str) -> Any:
        literal = read_literal(text)
        return tuple(map(self._read_one, literal if isinstance(literal, tuple) else (literal,)))

    def _read_one(self, value: Any) -> Any:
        """Converts text or a number to the type of one value; keeps schedules, several values, and text if it accepts text."""
        if isinstance(value, str):
            if value in self.choices:
                return self.choices[value]
            if not self.numbers and Any not in self.parts:
                if self.choices.keys() - {"None"}:
                    if "," in value:
                        raise ValueError(f"is {value!r}; {_ONE}")
                    options = f"{', '.join(self.choices)}{suggestion(value, self.choices)}"
                    raise ValueError(f"is {value!r}, which is not one of {options}")
                return Path(value) if Path in self.parts else value
            value = read_literal(value)
        number: Any = value if isinstance(value, int | float) and not isinstance(value, bool) else None
        if self.is_tunable or not self.numbers or (isinstance(value, str) and (str in self.parts or Any in self.parts)):
            return value
        if number is not None and float in self.numbers:
            return number
        if number is not None and abs(number) >= 1e18:
            raise ValueError(f"is {number}, which is too large; use fewer than 19 digits")
        if number is not None and number == int(number):
            return int(number)
        if isinstance(value, tuple):
            raise ValueError(f"is {value}; {_ONE}")
        choices = "".join(f" or {name}" for name in self.choices)
        raise ValueError(f"is {str(value)!r}, which is not a {'whole ' * (float not in self.numbers)}number{choices}")


@dataclasses.dataclass(frozen=True)
class OptionGroup:
    """A function whose parameters are options of a command.

    Attributes:
      source: the function, or its location `MODULE:NAME` in this package, whose source is read: its module may import JAX.
      without: the parameters that are not options.
      only: the parameters that are options, if not all.
    """

    source: str | Callable[..., Any]
    without: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    @functools.cached_property
    def function(self) -> Any:
        """The function, or one with its signature and docstring."""
        return of_source(self.source) if isinstance(self.source, str) else self.source

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the function."""
        return inspect.signature(self.function).parameters

    @property
    def has_fields(self) -> bool:
        """Whether the function takes what an experiment is made from: arguments of `train`, and fields of a config."""
        return "algo" in self.parameters and any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())

    def takes(self, name: str) -> bool:
        """Returns whether the function gets the value of an option."""
        is_chosen = name in self.only if self.only else name not in self.without
        return is_chosen and (name in self.parameters or name in self._experiment_arguments)

    @property
    def _experiment_arguments(self) -> tuple[str, ...]:
        if not self.has_fields:
            return ()
        from msrl_jax.run.prepare import ARGUMENTS

        return ARGUMENTS

    def options(self) -> Iterator[Option]:
        """Yields the parameters that the docstring of the function documents, as options; and those of an experiment."""
        docs = arguments_of(self.function)
        for name, p in self.parameters.items():
            if p.kind is p.VAR_POSITIONAL and name in docs:
                yield Option(name, tuple[p.annotation, ...], (), docs[name], is_positional=True)
            elif p.kind is not p.VAR_KEYWORD and name in docs and self.takes(name):
                is_positional = p.kind is not p.KEYWORD_ONLY and p.default is REQUIRED
                yield Option(name, p.annotation, p.default, docs[name], is_positional)
        if missing := [name for name in ("algo", "env", *self._experiment_arguments) if name not in docs and self.takes(name)]:
            yield from OptionGroup(TRAIN, only=tuple(missing)).options()


def arguments_of(function: Any) -> dict[str, str]:
    """Returns the Args of a function's docstring, by name."""
    docs, name = dict[str, str](), ""
    for line in (inspect.getdoc(function) or "").partition("\nArgs:\n")[2].splitlines():
        if line and not line.startswith(" "):
            break  # another section
        if line.startswith("  ") and not line.startswith("   "):
            name, _, line = line.strip().lstrip("*").partition(": ")
        docs[name] = f"{docs.get(name, '')} {line.strip()}".strip()
    return docs


def config_options(
    algos: Sequence[str], excluded: Collection[str] = (), *, is_swept: bool = False, texts: Mapping[str, Any] | None = None
) -> list[Option]:
    """Returns the fields that the configs of all these algorithms have, with the defaults of the first, as options.

    Imports the options that `texts`, values of fields, name; their fields are options of the command, too.
    """
    from msrl_jax import algorithms
    from msrl_jax.configs.fields import accepted_types, option_classes
    from msrl_jax.configs.names import all_fields, tunable_fields, value_of
    from msrl_jax.configs.replacing import import_options

    configs = {name: algorithms.get(name) for name in algos}
    for config in configs.values():
        import_options(config, texts or {})
    fields_by_algo = {name: all_fields(config) for name, config in configs.items()}
    tunable = set.intersection(*(set(tunable_fields(config)) for config in configs.values()))
    first_fields, options = next(iter(fields_by_algo.values())), list[Option]()

    def default(algo: str, name: str) -> Any:
        config: Any = configs[algo]()
        return value_of(config, name) if name in all_fields(config) else fields_by_algo[algo][name].default

    for name, field in first_fields.items():
        if name in excluded or not all(name in fields for fields in fields_by_algo.values()):
            continue
        types = dict.fromkeys(part for fields in fields_by_algo.values() for part in accepted_types(fields[name]))
        defaults = {algo: default(algo, name) for algo in configs}
        differ = len(set(map(repr, defaults.values()))) > 1
        head, _, field_name = name.rpartition(".")
        owners = [kind.option for kind in option_classes(first_fields[head]) if field_name in all_fields(kind)] if head else []
        doc = f"of {' and '.join(owners)}: {field.metadata['doc']}" if owners else field.metadata["doc"]
        options.append(
            Option(
                name,
                Union[tuple(types)],  # noqa: UP007
                next(iter(defaults.values())),
                doc,
                is_tunable=name in tunable,
                is_swept=is_swept and types.keys() != {bool},
                defaults=", ".join(f"{value} of {algo}" for algo, value in defaults.items()) if differ else "",
            )
        )
    return options


class _Parser(argparse.ArgumentParser):
    """A parser whose errors belong to this package."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; {self.prog} --help lists the options")


def parser_of(prog: str, about: str, groups: Mapping[str, Sequence[Option]]) -> argparse.ArgumentParser:
    """Makes a parser that collects the texts of the given options, by name."""
    parser = _Parser(prog=prog, usage=f"{prog} [OPTIONS]", description=_escape(about), allow_abbrev=False, add_help=False)
    parser.add_argument_group("help").add_argument("-h", "--help", action="help", help="show this help and exit")
    for title, options in groups.items():
        group = parser.add_argument_group(title)
        for option in options:
            has_default = option.default not in (REQUIRED, None, False, ()) or option.defaults
            default_text = f" (default: {option.defaults or option.default})" if has_default else ""
            keywords: dict[str, Any] = {"help": _escape(option.doc + default_text), "default": argparse.SUPPRESS}
            if option.is_flag:
                group.add_argument(option.flag, dest=option.name, action=argparse.BooleanOptionalAction, **keywords)
            elif option.is_positional:
                group.add_argument(option.name, metavar=option.flag, nargs="*" if option.is_sequence else "?", **keywords)
            else:
                count = "*" if option.is_sequence else None
                group.add_argument(option.flag, dest=option.name, metavar=option.metavar, nargs=count, **keywords)
    return parser


def _escape(text: str) -> str:
    return text.replace("%", "%%")


def in_hyphens(argv: Sequence[str]) -> list[str]:
    """Returns the arguments, with hyphens in the names of flags."""
    parts = [word.partition("=") if word.startswith("--") else ("", "", word) for word in argv]
    return [f"{name.replace('_', '-')}{equals}{value}" for name, equals, value in parts]


def values_of(argv: Sequence[str], name: str) -> list[str]:
    """Returns the values after a flag, from its last occurrence; reads them before parsing, because they determine which other
    flags exist."""
    words: list[str] = []
    for i, word in enumerate(argv, 1):
        flag, equals, value = word.partition("=")
        if flag == f"--{name}":
            words = [value] if equals else list(itertools.takewhile(lambda word: not word.startswith("-"), argv[i:]))
    return words


def nearest(name: str, names: Sequence[str], *, has_fields: bool) -> str:
    """Suggests what an unknown name means, to append to a message: a known name, or a field of other algorithms' configs."""
    if has_fields:
        from msrl_jax import algorithms
        from msrl_jax.configs.names import all_fields

        if algos := [algo for algo in algorithms.names() if name.replace("-", "_") in all_fields(algorithms.get(algo))]:
            return f", which is one of {', '.join(algos)}"
    return suggestion(name, names)
