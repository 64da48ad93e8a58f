"""Hyper-parameters as data: numbers of a config that the members of one program have each for themselves.

An algorithm reads `config.learning_rate` whether it is a constant or not: the agent of a member is built anew in the trace,
from a config whose `Tunable` fields are numbers of the member's state.
"""

import collections
import dataclasses
import functools
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from msrl_jax.algorithms import Agent, Algorithm
from msrl_jax.algorithms.configs.base import tunable_fields, with_traced

FIELD = "hyperparameters"
"""The field of a state that holds them: a dictionary of arrays `[]` float32, by field of the config."""

Settings: TypeAlias = Mapping[str, tuple[float, ...]]
"""The values of every setting, by field of the config; empty if the config has constants only."""


def read_settings(
    algorithm: Algorithm, config: Any, overrides: Mapping[str, Any], seeds: int
) -> tuple[dict[str, Any], Settings]:
    """Separates the fields that have several values from the others.

    Args:
      algorithm: the algorithm.
      config: the config to start from; the defaults if None.
      overrides: fields of the config; a `Tunable` field may have a sequence or an array `[S]` of values.
      seeds: the number of members of each setting.

    Returns:
      The fields with the values of the first setting, and the settings.

    Raises:
      ValueError: if a field that is not `Tunable` has several values, if lengths differ, or if a value is invalid.
    """
    fields = {field.name: field for field in dataclasses.fields(algorithm.config)}
    overrides = {name: x.item() if _is_scalar(x) else x for name, x in overrides.items()}
    several: dict[str, tuple[float, ...]] = {}
    for name, value in overrides.items():
        values = _values(value)
        if values is None or name not in fields or _holds_sequences(fields[name]):
            continue
        if name not in tunable_fields(algorithm.config):
            others = ", ".join(tunable_fields(algorithm.config)) or "none of its fields"
            raise ValueError(
                f"{algorithm.config.__name__}.{name}={value!r}: {name} changes the program (its shapes, loops or branches), so "
                f"the members of a run cannot differ in it; they can in {others}. Use msrl.sweep, or a run for each value"
            )
        several[name] = tuple(_number(algorithm, name, i, x) for i, x in enumerate(values))
    if not several:
        return dict(overrides), {}
    lengths = {name: len(values) for name, values in several.items()}
    if 0 in lengths.values() or len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} has {n}" for name, n in lengths.items())
        raise ValueError(
            f"{counts} values; give all of these fields equally many, at least one: the first values are one setting, the "
            "second ones the next. msrl.sweep(..., method='grid') takes all combinations"
        )
    for i in range(next(iter(lengths.values()))):
        setting = {name: values[i] for name, values in several.items()}
        try:
            algorithm.make_config(config, {**overrides, **setting})
        except ValueError as error:
            raise ValueError(f"member {i * seeds} ({in_words(setting)}): {error}") from None
    return {**overrides, **{name: values[0] for name, values in several.items()}}, several


def _is_scalar(value: Any) -> bool:
    return isinstance(value, np.ndarray | jax.Array) and value.ndim == 0


def _values(value: Any) -> Sequence[Any] | None:
    """The values of a field that has several."""
    if isinstance(value, list | tuple | range):
        return value
    return np.asarray(value).tolist() if isinstance(value, np.ndarray | jax.Array) and value.ndim else None


def _holds_sequences(field: dataclasses.Field) -> bool:
    """Whether a single value of the field may be a sequence."""
    return not isinstance(field.default, str | numbers.Number | None | type(dataclasses.MISSING))


def _number(algorithm: Algorithm, name: str, i: int, value: Any) -> float:
    value, where = value.item() if _is_scalar(value) else value, f"{algorithm.config.__name__}.{name}[{i}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Real | np.generic):
        raise ValueError(f"{where}={value!r}: use a number for each member")
    number: Any = value
    with np.errstate(over="ignore", under="ignore"):
        data = np.float32(np.inf) if abs(number) >= 1e300 else np.float32(number)
    if (data == 0) != (number == 0) or np.isinf(data):
        raise ValueError(f"{where}={value!r} is {data} in float32, in which members have it; use a number from 1e-38 to 3e38")
    return float(number)


def in_words(setting: Mapping[str, float]) -> str:
    """A setting as text, such as `seed 3, learning_rate=0.001`."""
    return ", ".join(f"seed {value}" if name == "seed" else f"{name}={value:.6g}" for name, value in setting.items())


def settings_of(description: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The seed of every member of a run, and its values of the fields of the config in which members differ.

    Args:
      description: the content of `config.json`.

    Returns:
      A dictionary for each member; the initial values, if a population was trained.
    """
    seeds, settings = range(description["seeds"]), description.get("settings") or {}
    each = [dict(zip(settings, values, strict=True)) for values in zip(*settings.values(), strict=True)] or [{}]
    if description.get("pbt"):
        return [{"seed": description["seed"] + i} | setting for i, setting in enumerate(each)]
    return [{"seed": description["seed"] + i} | setting for setting in each for i in seeds]


def count(settings: Settings) -> int:
    """The number of settings; 1 if the config has constants only."""
    return len(next(iter(settings.values()))) if settings else 1


def arrays(settings: Settings, seeds: int) -> dict[str, np.ndarray]:
    """The values of every member: each setting has one member for each seed, side by side. `[M]` float32"""
    return {name: np.repeat(np.asarray(values, np.float32), seeds) for name, values in settings.items()}


_BRANCHES = (
    jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError,
)  # fmt: skip
"""What JAX raises if Python needs the value of an array in a trace."""


@functools.cache
def _with_hyperparameters(state: type) -> Any:
    """The state of an agent with one more field."""
    return collections.namedtuple(state.__name__, (*state._fields, FIELD))  # type: ignore[attr-defined]


def tuned(build: Callable[[Any], Agent], config: Any, settings: Settings) -> Agent:
    """Builds an agent that finds some fields of its config in its state.

    Args:
      build: builds the agent for a config.
      config: the config of the first setting.
      settings: the fields, and their values.

    Returns:
      The agent. Its state has one more field, `hyperparameters`; `init(key, values=None)` takes their values, those of the
      first setting if None.
    """
    agent = build(config)
    kind = type(agent.axes)
    larger = _with_hyperparameters(kind)
    note = (
        f"The members of this run differ in {', '.join(settings)} of {type(config).__name__}, so the program holds them "
        "as arrays. If the algorithm branches on such a field in Python, or converts it to a number, its type should be float "
        "and not Tunable: members cannot differ in it then. Else use jnp.where in place of the branch."
    )

    def of(state: Any) -> tuple[Agent, Any, dict[str, jax.Array]]:
        values = getattr(state, FIELD)
        return build(with_traced(config, values)), kind(*state[:-1]), values

    def init(key: jax.Array, values: Mapping[str, jax.Array] | None = None) -> Any:
        given = {name: x[0] for name, x in settings.items()} if values is None else values
        given = {name: jnp.asarray(x, jnp.float32) for name, x in given.items()}
        return larger(*build(with_traced(config, given)).init(key), given)

    def iteration(state: Any) -> tuple[Any, Any]:
        member, state, values = of(state)
        state, metrics = member.iteration(state)
        return larger(*state, values), metrics

    def explained(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except _BRANCHES as error:
                error.add_note(note)
                raise

        return call

    def act(state: Any, *args: Any) -> Any:
        member, state, _ = of(state)
        return member.act(state, *args)

    def probabilities(state: Any, obs: Any) -> jax.Array:
        member, state, _ = of(state)
        assert member.probabilities is not None
        return member.probabilities(state, obs)

    return dataclasses.replace(
        agent, init=explained(init), iteration=explained(iteration), act=explained(act), axes=larger(*agent.axes, P()),
        probabilities=None if agent.probabilities is None else explained(probabilities),
    )  # fmt: skip
