"""Commands: a command is a function; its options are its parameters, and those of the library functions that it calls."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msrl_jax.cli import config_file, options
from msrl_jax.cli.config_file import ConfigFile
from msrl_jax.cli.options import REQUIRED, Option, OptionGroup, UsageError, nearest, values_of
from msrl_jax.fragments.support.naming import check_trust


class Output(NamedTuple):
    """The output of a command: its text, the same as data, and the exit code."""

    text: object = ""
    data: Any = None
    code: int = 0


@dataclasses.dataclass(frozen=True)
class General:
    """The options of every command.

    Args:
      cpu_devices: compute on this many virtual CPU devices.
      json: print the outcome as one line of JSON instead of text; everything else is printed on stderr.
      trust: run the code that the folder of a run, a config file or a learner names: modules, and files of algorithms.
      config: file with options, FILE.toml, whose keys are the names of flags; flags take precedence over the file.
      print_config: print a config file with all options, and exit.
    """

    cpu_devices: int | None = None
    json: bool = False
    trust: bool = False
    config: Path | None = None
    print_config: bool = False


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of the command line interface.

    Attributes:
      function: the function to run. It gets one dictionary per entry of `parts`, with the given arguments, and its own options
        by name; it returns an `Output`. The first line of its docstring is the help text.
      parts: library functions whose parameters are also options; an option that several have is passed to each of them.
      extra: functions whose parameters are options that the command line itself uses.
      sweeps: whether config fields take several values.
      check: raises the command's error for wrong arguments of the first part, as far as they are known without running it.
    """

    function: Callable[..., Output]
    parts: tuple[OptionGroup, ...]
    extra: tuple[OptionGroup, ...]
    sweeps: bool
    check: Callable[[dict[str, Any]], object] | None

    @property
    def about(self) -> str:
        """A description of the command, without its options."""
        return (inspect.getdoc(self.function) or "").partition("\n\nArgs:")[0]

    @property
    def has_fields(self) -> bool:
        """Whether the fields of configs are options of the command."""
        return any(part.has_fields for part in self.parts)

    def options(self) -> dict[str, Option]:
        """Returns the options by name, without the fields of configs."""
        options_by_name: dict[str, Option] = {}
        for part in (OptionGroup(self.function), *self.parts, *self.extra, OptionGroup(General)):
            options_by_name |= {option.name: option for option in part.options() if option.name not in options_by_name}
        return options_by_name

    def __call__(self, values: Mapping[str, Any]) -> Output:
        """Runs the command with the given values of options and fields."""
        options_by_name, parameters = self.options(), inspect.signature(self.function).parameters
        arguments_of_parts = [
            {
                name: value
                for name, value in values.items()
                if (part.takes(name) if name in options_by_name else part.has_fields)
            }
            for part in self.parts
        ]
        several = next((values.get(name, ()) for name, p in parameters.items() if p.kind is p.VAR_POSITIONAL), ())
        keywords = {
            name: value
            for name, value in values.items()
            if name in parameters and parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        }
        return self.function(*arguments_of_parts, *several, **keywords)


def command(
    *parts: OptionGroup | str | Callable[..., Any],
    extra: Sequence[Callable[..., Any]] = (),
    sweeps: bool = False,
    check: Callable[[dict[str, Any]], object] | None = None,
) -> Callable[[Callable[..., Output]], Command]:
    """Makes a function into a `Command`."""
    groups = tuple(part if isinstance(part, OptionGroup) else OptionGroup(part) for part in parts)
    return lambda function: Command(function, groups, tuple(map(OptionGroup, extra)), sweeps, check)


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A parsed command line.

    Attributes:
      values: the values of the given options and fields, from the command line or the file.
      file: the config file.
      options: all options of the command.
      fields: the fields of the config.
    """

    values: dict[str, Any]
    file: ConfigFile
    options: list[Option]
    fields: list[Option]


def parse(prog: str, command: Command, argv: Sequence[str]) -> Parsed:
    """Parses the arguments of a command line, and the config file that they name.

    Raises:
      UsageError: if they cannot be parsed.
      SystemExit: after `--help`.
    """
    argv, options_by_name = options.in_hyphens(argv), command.options()
    flags = {word.partition("=")[0].removeprefix("--").removeprefix("no-") for word in argv if word.startswith("--")}
    file = config_file.from_arguments(argv, has_recipes="recipe" in options_by_name)
    file.check_trust(options_by_name, flags, trusted="--trust" in argv)
    algos = values_of(argv, "algo") or _algos_of(file, argv, options_by_name) or ["ppo"]
    texts = {**file.values, **{flag.replace("-", "_"): values_of(argv, flag) for flag in flags}}
    fields = options.config_options(algos, options_by_name, is_swept=command.sweeps, texts=texts) if command.has_fields else []
    groups = {"options": [*options_by_name.values()], f"fields of the config of {', '.join(algos)}": fields}
    parser = options.parser_of(prog, command.about, groups)
    parsed, unknown_words = parser.parse_known_intermixed_args(argv)
    if unknown_words:
        fact = "unknown option" if unknown_words[0].startswith("-") else "unexpected argument"
        word, names = (
            unknown_words[0].strip("-").partition("=")[0],
            [option.flag.strip("-") for option in (*options_by_name.values(), *fields)],
        )
        hint = nearest(word, names, has_fields=command.has_fields).replace("'", "'--", 1)
        raise UsageError(f"{fact} {unknown_words[0]!r}{hint}; {prog} --help lists the options")
    values: dict[str, Any] = {}
    for option in (*options_by_name.values(), *fields):
        words = getattr(parsed, option.name, None)
        if words is None or (option.is_positional and words == []):
            continue
        try:
            values[option.name] = words if option.is_flag else option.read([words] if isinstance(words, str) else words)
        except ValueError as error:
            raise UsageError(f"{option.flag} {error}; {prog} --help lists the options") from None
    values |= file.read([*options_by_name.values(), *fields], values, has_fields=command.has_fields)
    for option in options_by_name.values():
        if option.is_positional and option.is_sequence:
            values.setdefault(option.name, ())  # the function itself reports what is missing
        elif option.default is REQUIRED and option.name not in values:
            raise UsageError(f"{option.flag} is missing: {option.doc}")
    return Parsed(values, file, [*options_by_name.values()], fields)


def _algos_of(file: ConfigFile, argv: Sequence[str], options_by_name: Mapping[str, Option]) -> list[str]:
    """Returns the algorithms that a file, or the folder of a resumed run, names; they determine which fields are options."""
    if "algo" in file.values and "algo" in options_by_name:
        algos = file.values["algo"]
        return [*map(str, algos)] if isinstance(algos, list) else [str(options_by_name["algo"].take(algos))]
    path = Path(next(iter(values_of(argv, "out")), ""))
    if "--resume" not in argv or "guard" not in options_by_name or not (path / "config.json").exists():
        return []
    from msrl_jax.run.disk import store
    from msrl_jax.run.experiment.trust import algorithm_of, code_of

    algo = algorithm_of(store.read_description(path))
    check_trust(f"the run in {path}", code_of({"algo": algo}), "--trust" in argv)
    return [algo]
