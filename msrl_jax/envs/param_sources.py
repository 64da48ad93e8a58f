"""The sources that episode parameters are drawn from: in environments, and in the states of runs, where they may change."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import param_distributions
from msrl_jax.envs.base import PyTree, env_name
from msrl_jax.envs.params import (
    Curriculum,
    ParamSampler,
    RandomizedState,
    RandomizeParams,
    around,
    as_number,
    default_params,
    inside,
)
from msrl_jax.fragments.counters import advance
from msrl_jax.fragments.metrics import Mean
from msrl_jax.fragments.support.checks import shown, suggestion

E = TypeVar("E")


def source_of(env: object) -> ParamSampler | tuple[()]:
    """Returns the parameter source of an environment, or of the one inside its wrappers; `()` if its parameters are
    constants.
    """
    return next((inner.source for inner in inside(env) if isinstance(inner, RandomizeParams)), ())


def with_source(env: E, source: ParamSampler | tuple[()]) -> E:
    """Returns the environment, or vector environment, with another parameter source; itself if `source` is `()`."""
    if not source:
        return env
    if not isinstance(env, RandomizeParams):
        return around(env, with_source(env.env, source))  # type: ignore[attr-defined]
    drawing = copy.copy(env)
    object.__setattr__(drawing, "source", source)
    return drawing


def sources(env: object, num_envs: int) -> ParamSampler | tuple[()]:
    """Returns the parameter source repeated for each copy. `[E, ...]`"""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_envs, *jnp.shape(x))), source_of(env))


def advance_source(source: Any, num_envs: int) -> Any:
    """Returns the parameter sources of the copies after all of them took a step."""
    return source._replace(taken=advance(source.taken, num_envs)) if source and source.taken else source


def means(env_state: PyTree) -> dict[str, Mean]:
    """Returns the mean over the copies of each scalar parameter, as `env_params/NAME`."""
    is_leaf = lambda x: isinstance(x, RandomizedState)
    params_by_state = [x.params for x in jax.tree.leaves(env_state, is_leaf=is_leaf) if is_leaf(x)]
    return {
        f"env_params/{name}": Mean(jnp.sum(x.astype(jnp.float32)), jnp.float32(x.size))
        for params in params_by_state
        for name, x in params.items()
        if x.ndim == 1
    }


def find_source(state: PyTree) -> ParamSampler | tuple[()]:
    """Returns the first parameter source in a state; `()` if there is none."""
    return next((x for x in jax.tree.leaves(state, is_leaf=_is_source) if _is_source(x)), ())


def _is_source(x: Any) -> bool:
    return isinstance(x, ParamSampler)


def is_of_source(state: PyTree) -> list[bool]:
    """Whether each leaf of a state is part of a parameter source."""
    return [_is_source(x) for x in jax.tree.leaves(state, is_leaf=_is_source) for _ in jax.tree.leaves(x)]


def replace_sources(state: PyTree, replace: Callable[[ParamSampler], ParamSampler]) -> PyTree:
    """Returns the state with other parameter sources."""
    return jax.tree.map(lambda x: replace(x) if _is_source(x) else x, state, is_leaf=_is_source)


def changed(env: Any, values: Any) -> Any:
    """Replaces values of parameters that an environment draws, or the level of its `Curriculum`.

    Raises ValueError unless every value keeps its kind and its number of elements, so that the program stays the same.
    """
    source = source_of(env)
    if not source or not jax.tree.leaves(source.values):
        raise ValueError(
            f"the run on {env_name(env)} has no parameters to set; start it with env_params={{name: value}}, or with "
            "env_params=envs.Curriculum(sample, level)"
        )
    if isinstance(source.values, Curriculum):
        _check_same("the level", source.values.level, values)
        return jax.tree.map(_cast_like, source.values, dataclasses.replace(source.values, level=values))
    if not isinstance(values, Mapping):
        raise ValueError(f"set the parameters of {env_name(env)} by name, {{name: value}}, not by {shown(values)}")
    types, new_values = default_params(env), {}
    for name, value in values.items():
        if name not in source.values:
            raise ValueError(
                f"the run does not draw a parameter {name!r}{suggestion(name, source.values)} of {env_name(env)}; it draws "
                f"{', '.join(source.values)}. Pass every parameter that may change as env_params when you start the run"
            )
        new_values[name] = param_distributions.cast(f"{env_name(env)}: {name}", value, types[name])
        _check_same(name, source.values[name], new_values[name])
    return new_values


def _cast_like(old: np.ndarray, new: Any) -> np.ndarray:
    array = as_number(new)
    number = array.astype(old.dtype)
    if old.dtype.kind != "f" and (number != array).any():
        raise ValueError(f"the level cannot become {new!r}, because it started as {old.dtype}; start with a float, such as 0.0")
    return number


def _check_same(place: str, old: PyTree, new: PyTree) -> None:
    shapes = [[np.shape(x) for x in jax.tree.leaves(tree)] for tree in (old, new)]
    if jax.tree.structure(old) != jax.tree.structure(new) or shapes[0] != shapes[1]:
        old_text, new_text = param_distributions.text(old), param_distributions.text(new)
        remedy = "which would change the program; use a value of the same kind"
        raise ValueError(f"{place} was {old_text} and cannot become {new_text} during a run, {remedy}")
