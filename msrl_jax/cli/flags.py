"""Command line parsing: flags for the fields of a command and of an algorithm's config."""

import contextlib
import copy
import dataclasses
import decimal
import io
import itertools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Union

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from msrl_jax.fragments.support.checks import suggestion
from msrl_jax.fragments.support.text_values import split_specs

ABOUT_FILES = "--config FILE.toml takes options from a file; --print-config writes that file, with all options."


class UsageError(ValueError):
    """An error in the command line."""


def whole_number(text: str) -> int:
    """Reads an integer; `1_000_000` and `1e6` are allowed."""
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(decimal.InvalidOperation):
        number = decimal.Decimal(text)
        if number.is_finite() and number.adjusted() >= 30:
            raise ValueError(f"{text!r} is too large; use fewer than 31 digits")
        if number.is_finite() and number == number.to_integral_value():
            return int(number)
    raise ValueError(f"{text!r} is not a whole number")


def _one(metavar: str, read: Callable[[str], Any], is_instance: Callable[[Any], bool] = lambda x: True) -> Any:
    return PrimitiveConstructorSpec(
        nargs=1, metavar=metavar, instance_from_str=lambda words: read(words[0]), is_instance=is_instance,
        str_from_instance=lambda x: [str(x)],
    )  # fmt: skip


_REGISTRY = ConstructorRegistry()


@_REGISTRY.primitive_rule
def _read_integers(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    return _one("INT", whole_number, lambda x: type(x) is int) if info.type is int else None


def _numbers(text: str) -> Any:
    """Reads a number, or several for the members of a run; or a schedule."""
    kind, colon, _ = text.partition(":")
    if colon and kind not in ("uniform", "log", "log_uniform", "choice"):
        return text
    try:
        return tuple(map(float, text.removesuffix(",").split(","))) if "," in text else float(text)
    except ValueError:
        remedy = "msrl-jax sweep takes distributions" if colon else "separate several by commas: 1e-4,3e-4"
        raise ValueError(f"{text!r} is not a number; {remedy}") from None


_SCHEDULES = "FLOAT[,FLOAT...]|linear:FROM:TO|cosine:FROM:TO|MODULE:NAME"
_NUMBERS = _one(_SCHEDULES, _numbers)
_NUMBERS_OR_NONE = _one("{None}|" + _SCHEDULES, lambda text: None if text == "None" else _numbers(text))
_SPEC = _one("VALUE[,VALUE...]|uniform:LOW:HIGH|log:LOW:HIGH", str)
_SIZES = PrimitiveConstructorSpec(
    nargs="*", metavar="INT [INT...]", str_from_instance=lambda x: list(map(str, x)), is_instance=lambda x: True,
    instance_from_str=lambda words: tuple(whole_number(x) for word in words for x in word.split(",")),
)  # fmt: skip


def _parts(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)


def _options(kind: Any) -> PrimitiveConstructorSpec:
    """Reads the values of a field of words, or of sequences (items separated by spaces); a list if there are several."""
    sequence = next((part for part in _parts(kind) if typing.get_origin(part) is tuple), None)
    words = [word for part in _parts(kind) if typing.get_origin(part) is typing.Literal for word in typing.get_args(part)]
    known: dict[str, Any] = {str(word): word for word in [*words, *[None] * (type(None) in _parts(kind))]}

    def one(text: str) -> Any:
        if sequence is not None:
            item = whole_number if int in typing.get_args(sequence) else str
            return tuple(map(item, text.split()))
        if Any in _parts(kind) and ":" in text:
            return text.strip()
        if text.strip() not in known:
            own = " or MODULE:NAME" * (Any in _parts(kind))
            raise ValueError(f"{text.strip()!r} is not one of {', '.join(known)}{own}")
        return known[text.strip()]

    def several(given: list[str]) -> Any:
        texts = split_specs(" ".join(given))
        if len(texts) > 1 and not all(map(str.strip, texts)):
            raise ValueError(f"{' '.join(given)!r} has an empty value; separate values by single commas")
        found = list(map(one, texts))
        return found if len(found) > 1 else found[0]

    metavar = "VALUE[,VALUE...]" if sequence is None else "ITEM [ITEM...][,ITEM [ITEM...]...]"
    if known:
        metavar = f"{{{','.join(known)}}}" + "|MODULE:NAME" * (Any in _parts(kind)) + "[,...]"
    return PrimitiveConstructorSpec(
        nargs="*", metavar=metavar, instance_from_str=several, is_instance=lambda x: True,
        str_from_instance=lambda x: list(map(str, x)) if isinstance(x, tuple) else [str(x)],
    )  # fmt: skip


def values_of(argv: Sequence[str], flag: str) -> list[str]:
    """The values of a flag, read before parsing, because they decide which other flags exist."""
    values: list[str] = []
    for i, word in enumerate(argv, 1):
        name, equals, value = word.partition("=")
        if name == flag:
            values = [value] if equals else list(itertools.takewhile(lambda w: not w.startswith("-"), argv[i:]))
    return values


def given_fields(argv: Sequence[str]) -> set[str]:
    """The fields whose flags are on a command line."""
    names = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in argv if word.startswith("--")}
    return names | {name.removeprefix("no_") for name in names}


def _choice(kind: Any, *, several: bool) -> PrimitiveConstructorSpec:
    """Reads the text of an option; a list if there are several."""
    names = [getattr(part, "option", "None") for part in _parts(kind)]
    metavar = f"{'|'.join(names)}[:field=value,...]{'[,...]' * several}"

    def read(text: str) -> Any:
        texts = split_specs(text) if several else [text]
        return texts if len(texts) > 1 else texts[0]

    return _one(metavar, read)


def _default(config: Any, name: str) -> Any:
    """The default of a field of a config, or of an option that the config may have."""
    from msrl_jax.algorithms.fields import all_fields, value_of

    usual = config()
    return value_of(usual, name) if name in all_fields(usual) else all_fields(config)[name].default


def _about(config: type, name: str) -> str:
    """The text of a field; of an option, with its name."""
    from msrl_jax.algorithms.fields import all_fields, choices

    known, (head, _, rest) = all_fields(config), name.rpartition(".")
    of = [kind.option for kind in choices(known[head]) if rest in all_fields(kind)] if head else []
    return f"of {' and '.join(of)}: {known[name].metadata['doc']}" if of else known[name].metadata["doc"]


def _default_text(configs: dict[str, type], name: str) -> str | None:
    """The defaults of a field in several configs as text; None if they are equal."""
    defaults = {algo: _default(c, name) for algo, c in configs.items()}
    if len({repr(x) for x in defaults.values()}) == 1:
        return None
    return f"(default: {', '.join(f'{x} of {algo}' for algo, x in defaults.items())})"


def _with_texts(command: type, config: type | None, defaults: Mapping[str, Any]) -> type:
    """The dataclass that tyro reads: a command with the text of each option, and with the flags of a config."""
    hints = typing.get_type_hints(command, include_extras=True)
    fields: list[Any] = [
        (
            f.name, Annotated[hints[f.name], tyro.conf.arg(help=f.metadata["doc"])],
            dataclasses.field(default=defaults.get(f.name, f.default), metadata=f.metadata),
        )
        for f in dataclasses.fields(command) if "doc" in f.metadata
    ]  # fmt: skip
    if config is not None:
        fields.append(("config", Annotated[config, tyro.conf.arg(name="")], dataclasses.field(default=config())))
    return dataclasses.make_dataclass(command.__name__, fields, bases=(command,), frozen=True, kw_only=True)


def _config_flags(command: type, algos: Sequence[str]) -> type:
    """A flag for every other field that the configs of all these algorithms have, with the default of the first algorithm.

    A plain dataclass in place of the config, because a flag may have several values.
    """
    from msrl_jax import algorithms
    from msrl_jax.algorithms.fields import all_fields, is_option, tunable_fields

    configs = {name: algorithms.get(name) for name in algos}
    first, *_ = configs.values()
    taken = {f.name for f in dataclasses.fields(command)}
    known = [all_fields(c) for c in configs.values()]
    shared = set.intersection(*map(set, known))
    several = set.intersection(*(set(tunable_fields(c)) for c in configs.values()))
    swept = getattr(command, "SWEEPS", False)

    def flag(name: str, field: dataclasses.Field) -> tuple[str, Any, Any]:
        kinds = [part for fields in known for part in _parts(fields[name].type) if typing.get_origin(part) is not Mapping]
        kind = Union[tuple(kinds)]  # noqa: UP007
        if any(map(is_option, kinds)):
            kind = Annotated[Any, _choice(kind, several=swept)]
        elif swept and {int, float} & set(_parts(kind)):
            kind = Annotated[Any, _SPEC]
        elif Any in kinds or (swept and {tuple, typing.Literal} & {typing.get_origin(part) for part in _parts(kind)}):
            kind = Annotated[Any, _options(kind)]
        elif name in several:
            kind = Annotated[Any, _NUMBERS if kind is float else _NUMBERS_OR_NONE]
        elif kind == tuple[int, ...]:
            kind = Annotated[Any, _SIZES]
        about = {"doc": _about(first, name)}
        shown = tyro.conf.arg(name=name, help=about["doc"], help_behavior_hint=_default_text(configs, name))
        default = dataclasses.field(default=_default(first, name), metadata={**field.metadata, **about})
        return name.replace(".", _DOT), Annotated[kind, shown], default

    fields = [flag(name, f) for name, f in known[0].items() if name in shared - taken]
    return dataclasses.make_dataclass(first.__name__, fields, namespace={"__doc__": first.__doc__}, frozen=True)


def fields_of(base: type, argv: Sequence[str]) -> tuple[list[dataclasses.Field], list[dataclasses.Field]]:
    """The options of a command, and the fields of the config that the arguments choose, with texts and types as flags."""
    command = _command(base, argv)
    config: Any = next((f.default for f in dataclasses.fields(command) if f.name == "config"), None)
    fields = [f for f in dataclasses.fields(command) if "doc" in f.metadata]
    return fields, [] if config is None else [_dotted(f) for f in dataclasses.fields(config)]


_DOT = "__"  # in names of attributes, for the dot in the name of a field of an option


def _dotted(field: dataclasses.Field) -> dataclasses.Field:
    field = copy.copy(field)
    field.name = field.name.replace(_DOT, ".")
    return field


def _command(base: type, argv: Sequence[str], defaults: Mapping[str, Any] | None = None) -> type:
    has_config = "algo" in {f.name for f in dataclasses.fields(base)}
    config = _config_flags(base, values_of(argv, "--algo") or ["ppo"]) if has_config else None
    return _with_texts(base, config, defaults or {})


def flag_value(config: Any, name: str) -> Any:
    """The value of a flag of a config."""
    return getattr(config, name.replace(".", _DOT))


def nearest(name: str, own: Sequence[str], others: Sequence[str]) -> str:
    """What an unknown name probably means, to follow it: one of these, or a field of the configs of other algorithms."""
    if others:
        from msrl_jax import algorithms
        from msrl_jax.algorithms.fields import all_fields

        field = name.replace("-", "_")
        kinds = {algo: algorithms.get(algo) for algo in algorithms.names()}
        if having := [algo for algo, kind in kinds.items() if field in all_fields(kind)]:
            return f", which is one of {', '.join(having)}"
    return suggestion(name, [*own, *others])


def parse(prog: str, base: type, argv: Sequence[str], defaults: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
    """Reads the arguments of a command as an instance of `base`, and the fields of the config that were given.

    Options without a value have those of `defaults`. A field `given` gets the names of all flags that were given. Raises
    UsageError; SystemExit after `--help`.
    """
    own = [f.name for f in dataclasses.fields(base)]
    command = _command(base, argv, defaults)
    for i, word in enumerate(argv):
        if word == "" or (word.startswith("--") and word.endswith("=")):
            flag = word.removesuffix("=") or (argv[i - 1] if i else "an argument")
            raise UsageError(f"the value of {flag} is empty; give one, or leave the option out")
    args, unknown = _parse(prog, command, argv, f"{(base.__doc__ or '').splitlines()[0]} {ABOUT_FILES}")
    config = getattr(args, "config", None)
    others = [f.name.replace(_DOT, ".") for f in dataclasses.fields(config)] if config is not None else []
    if unknown:
        what = "unknown option" if unknown[0].startswith("-") else "unexpected argument"
        known, fields = ([name.replace("_", "-") for name in names] for names in ((*own, "config", "print-config"), others))
        near = nearest(unknown[0].strip("-").partition("=")[0], known, fields).replace("'", "'--", 1)
        raise UsageError(f"{what} {unknown[0]!r}{near}; {prog} --help lists the options")
    given = given_fields(argv)
    for name in own:
        if name in given and getattr(args, name) == ():
            raise UsageError(f"--{name.replace('_', '-')} has no value; give at least one, or leave the option out")
    if "given" in own:
        args = dataclasses.replace(args, given=frozenset(given))
    return args, {name: flag_value(config, name) for name in others if name in given}


def _parse(prog: str, command: Any, argv: Sequence[str], description: str) -> tuple[Any, list[str]]:
    """Parses with tyro, and turns tyro's error messages (boxes of several lines) into one line."""
    messages = io.StringIO()
    try:
        with _REGISTRY, contextlib.redirect_stderr(messages):
            return tyro.cli(command, args=list(argv), prog=prog, description=description, return_unknown_args=True)
    except SystemExit as error:
        if not error.code:
            raise
        lines = [line.strip("│ ") for line in messages.getvalue().splitlines()[1:]]
        rules = [i for i, line in enumerate(lines) if line.startswith(("─", "---"))]  # of "-" if stdout is not in UTF-8
        first = 1 if rules[:1] == [0] else 0
        text = " ".join(lines[first : next(iter(rules[first:]), len(lines))]) or messages.getvalue()
        raise UsageError(f"{text.removesuffix('.')}; {prog} --help lists the options") from None
