"""Resolves config values that refer to schedules, optimizers, networks and cores, as text or as custom objects.

A config keeps the given values, which files and command lines can express. `build` replaces them with the objects that
algorithms use.
"""

import dataclasses
import inspect
import math
import numbers
import typing
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from msrl_jax.agents import schedules
from msrl_jax.agents.agent import Agent
from msrl_jax.agents.optimizers import NAMED, OptimizerSpec
from msrl_jax.agents.transformations import scheduled
from msrl_jax.configs.checking import check_unused
from msrl_jax.configs.classes import check_together
from msrl_jax.configs.config import OptimizerKind
from msrl_jax.configs.deferred import is_deferred
from msrl_jax.configs.fields import Config
from msrl_jax.configs.names import all_fields, value_of
from msrl_jax.configs.replacing import config_and_options, replace_unchecked
from msrl_jax.envs import Environment, MultiAgentEnvironment
from msrl_jax.fragments.support import checks, naming
from msrl_jax.fragments.support.checks import shown
from msrl_jax.fragments.support.text_values import read_values
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.loops.core_windows import ResolvedCore
from msrl_jax.networks.custom_core import as_core
from msrl_jax.networks.modules import as_network
from msrl_jax.registry.table import ALGORITHMS

_SHARES = ("b1", "b2", "adam_b1", "adam_b2", "beta", "decay", "momentum")  # parameters from 0 to below 1
_PARTS = ("learning_rate", "anneal_learning_rate", "max_grad_norm", "adam_epsilon", "epsilon", "rms_decay")
_TRANSFORMATION = "an optax.GradientTransformation"
_FORMS = f"{_TRANSFORMATION}, or a function without arguments that returns one"
_ONLY_RATES = "a number or a schedule: only the learning rates of {} adapt to the KL divergence"


@entry
def build(config: Config, env: Environment | MultiAgentEnvironment) -> Agent:
    """Builds the agent of a config for one environment; the numbers of its schedules change over the run.

    Args:
      config: a config.
      env: the environment.

    Returns:
      The agent.

    Raises:
      TypeError, ValueError: if a value in the config is invalid, or does not fit the environment.
    """
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"build({shown(config)}, env): give a config, such as PPO(learning_rate=3e-4)")
    changing, ready = check(config), objects(config)
    return scheduled(lambda numbers: with_numbers_of(ready, numbers).build(env), changing)


def objects(config: Config) -> Any:
    """Resolves networks, cores, optimizers and adaptive rates in a config to objects; keeps schedules."""
    resolved: dict[str, Any] = {}
    if not isinstance(network := getattr(config, "network", "auto"), str) or ":" in network:
        resolved["network"] = as_network(network)
    if (core := getattr(config, "core", None)) is not None:
        resolved["core"] = ResolvedCore(as_core(core))
    if _has_optimizer(config) and (optimizer := value_of(config, "optimizer")) not in NAMED:
        resolved["optimizer"] = _custom_optimizer(optimizer) if is_custom_optimizer(optimizer) else _named_optimizer(optimizer)
    if schedules.is_adaptive(rate := getattr(config, "learning_rate", None)):
        resolved["learning_rate"] = schedules.read_kl(rate)
    return replace_unchecked(config, resolved)


def with_numbers_of(config: Any, numbers: Mapping[str, Any]) -> Any:
    """Replaces the schedules of a config with numbers; a scheduled learning rate is not annealed in addition."""
    return replace_unchecked(config, dict(numbers) | ({"anneal_learning_rate": False} if "learning_rate" in numbers else {}))


def check(config: Config) -> dict[str, schedules.ScheduleFunction]:
    """Raises ValueError if a value in a config cannot be resolved; returns its schedules, by field."""
    for name, f in all_fields(config).items():
        value, tunable = value_of(config, name), f.metadata.get("tunable")
        if name == "optimizer" and _has_optimizer(config):
            remedy = _optimizer_remedy(value)
        elif tunable and schedules.is_adaptive(value):
            remedy = schedules.kl_remedy(value) if f.metadata.get("adaptive") else _ONLY_RATES.format(", ".join(_adaptive()))
        elif tunable and is_deferred(value):
            once = "a number, which is read once, at the start"
            remedy = once if f.metadata.get("once") else schedules.remedy(name, value, f.metadata["bounds"])
        else:
            continue
        if remedy:
            raise ValueError(f"{type(config).__name__}.{name}={shown(value)}: use {remedy}")
    functions = schedules.check(config)
    defaults = {name: f.default for name, f in all_fields(config).items() if name in functions}
    for progress in (0.0, 1.0) if functions else ():  # only ramps: functions are not called when fields are compared
        ramps = {n: schedules.at(x, progress) for n, x in functions.items() if isinstance(x, schedules.RampSchedule)}
        for part in config_and_options(replace_unchecked(config, defaults | ramps)):
            check_together(part)
    return functions


def check_fits(config: Config) -> None:
    """Raises ValueError if a field differs from its default that the optimizer, learning rate, core or sharing makes unused."""
    if is_custom_optimizer(getattr(config, "optimizer", "adam")):
        because = "on your optimizer, which has its own learning rate, clip and schedule; make it a part of that"
        check_unused(config, _PARTS, because)
    if is_deferred(rate := getattr(config, "learning_rate", None)):
        check_unused(config, ("anneal_learning_rate",), f"on learning_rate={checks.name_of(rate)}, which is not a number")
    if (core := getattr(config, "core", None)) is not None:
        check_unused(config, ("shared_torso",), f"with core={checks.name_of(core)}")
    if not getattr(config, "share_parameters", True):
        check_unused(config, ("agent_ids",), "with share_parameters=False")


def _has_optimizer(config: Config) -> bool:
    return typing.get_type_hints(type(config)).get("optimizer") == OptimizerKind


def _adaptive() -> list[str]:
    """Returns the names of the algorithms whose learning rate may adapt to the KL divergence of updates."""
    configs: Mapping[str, Any] = ALGORITHMS
    return sorted(n for n, c in configs.items() if any(f.metadata.get("adaptive") for f in dataclasses.fields(c)))


def is_custom_optimizer(optimizer: Any) -> bool:
    """Whether the optimizer of a config is a custom transformation, or the name of one."""
    return not isinstance(optimizer, str) or (":" in optimizer and optimizer.partition(":")[0] not in NAMED)


def _optimizer_remedy(optimizer: Any) -> str | None:
    """Says what to use instead of an invalid optimizer; None if it may be valid."""
    if not isinstance(optimizer, str):
        fits = isinstance(optimizer, optax.GradientTransformation) or (callable(optimizer) and not _needs_arguments(optimizer))
        return None if fits else _FORMS
    name, _, text = optimizer.partition(":")
    if name not in NAMED and (":" not in optimizer or "=" in text):
        return f"one of {', '.join(NAMED)}{checks.suggestion(name, NAMED)}, {_TRANSFORMATION}, or MODULE:NAME of one"
    if name not in NAMED or ":" not in optimizer:
        return None
    return _wrong_parameter(name, text)


def _wrong_parameter(name: str, text: str) -> str | None:
    """Says what to use instead of invalid parameters of a named optimizer."""
    defaults, form = _parameters(NAMED[name]), f"{name}:parameter=value,parameter=value"
    try:
        arguments = read_values(text, wrong=form)
    except ValueError as error:
        return form if str(error) == form else f"{form}; {error}"
    for key, value in arguments.items():
        if key not in defaults:
            return f"parameters that {name} of optax has{checks.suggestion(key, defaults)}: {', '.join(defaults)}"
        if isinstance(defaults[key], bool):
            if not isinstance(value, bool):
                return f"True or False for {key}"
        elif isinstance(value, bool) or not isinstance(value, numbers.Real):
            return f"a number for {key}"
        elif not (math.isfinite(float(value)) and float(value) >= 0 and (float(value) < 1 or key not in _SHARES)):
            return f"a finite number of at least 0{' and below 1' * (key in _SHARES)} for {key}"
    return None


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the numeric parameters of an optimizer, with their defaults."""
    no_numbers = ("learning_rate", "mask", "dtype", "dimension_numbers")
    parameters = inspect.signature(function).parameters
    return {
        n: p.default for n, p in parameters.items() if isinstance(p.default, float | int | None) and not n.endswith(no_numbers)
    }


def _needs_arguments(function: Callable[..., Any]) -> bool:
    """Whether a function has required arguments."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return True
    return False


def _is_optimizer(value: Any) -> bool:
    if isinstance(value, optax.GradientTransformation | optax.MultiSteps):
        return True
    return naming.makes(value, lambda kind: issubclass(kind, optax.GradientTransformation)) and not _needs_arguments(value)


def _named_optimizer(text: str) -> OptimizerSpec:
    name, _, parameters = text.partition(":")
    return OptimizerSpec(name, tuple(read_values(parameters, wrong=parameters).items()))


def _custom_optimizer(optimizer: Any) -> optax.GradientTransformation:
    """Makes a custom transformation, which raises clear errors when it is first traced."""
    is_text = isinstance(optimizer, str)
    transform: Any = naming.imported("optimizer", optimizer, _FORMS, _is_optimizer, is_made=True) if is_text else optimizer
    name = f"optimizer={checks.name_of(optimizer)}"
    if callable(transform) and not _needs_arguments(transform):
        transform = transform()
    if not isinstance(transform, optax.GradientTransformation):
        multi = " (of optax.MultiSteps, its gradient_transformation())" * isinstance(transform, optax.MultiSteps)
        raise TypeError(
            f"{name} is a {type(transform).__qualname__}; give {_TRANSFORMATION}{multi}, or a function without arguments that "
            "returns one"
        )

    def init(params: Any) -> Any:
        try:
            state = jax.tree.map(jnp.copy, transform.init(params))  # leaves that share an array cannot be donated
            updates, new_state = jax.eval_shape(transform.update, params, state, params)
        except Exception as error:
            cause = f"{type(error).__name__}: {str(error).strip()}"
            raise ValueError(
                f"{name} fails: {cause}; it gets gradients, its state, a pytree of arrays, and parameters, and nothing else"
            ) from error
        for noun, result, expected in (("updates", updates, params), ("a state", new_state, state)):
            if _shapes(result) != _shapes(expected):
                counterpart = "the parameters" if noun == "updates" else "the state that it gets"
                raise ValueError(f"{name} returns {noun} of another structure, shape or dtype than {counterpart}")
        return state

    return optax.GradientTransformation(init, transform.update)


def _shapes(tree: Any) -> Any:
    return jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
