"""What the parameters of a run are drawn from: in the state of its vector environments, and in evaluations of it."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax._spelling import suggestion
from msrl_jax.envs import distributions
from msrl_jax.envs.base import PyTree, env_name
from msrl_jax.envs.params import (
    Curriculum,
    ParamSource,
    RandomizedState,
    RandomizeParams,
    around,
    as_number,
    default_params,
    inside,
)
from msrl_jax.fragments.counters import advance
from msrl_jax.fragments.metrics import Mean

E = TypeVar("E")


def source_of(env: Any) -> ParamSource | tuple[()]:
    """What the parameters of an environment, or of the one inside of its wrappers, are drawn from; `()` for constants."""
    return next((inner.source for inner in inside(env) if isinstance(inner, RandomizeParams)), ())


def with_source(env: E, source: ParamSource | tuple[()]) -> E:
    """The environment, or a vector environment, with another source of its parameters; itself if that is `()`."""
    if not source:
        return env
    if not isinstance(env, RandomizeParams):
        return around(env, with_source(env.env, source))  # type: ignore[attr-defined]
    drawing = copy.copy(env)
    object.__setattr__(drawing, "source", source)
    return drawing


def sources(env: Any, num_envs: int) -> ParamSource | tuple[()]:
    """The source of an environment for each of its copies. `[E, ...]`"""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_envs, *jnp.shape(x))), source_of(env))


def after_step(source: Any, num_envs: int) -> Any:
    """The sources of copies after a step of all of them."""
    return source._replace(taken=advance(source.taken, num_envs)) if source and source.taken else source


def means(env_state: PyTree) -> dict[str, Mean]:
    """The mean of each parameter over the copies, `env_params/NAME`, of those that are one number."""
    is_leaf = lambda x: isinstance(x, RandomizedState)  # noqa: E731
    found = [x.params for x in jax.tree.leaves(env_state, is_leaf=is_leaf) if is_leaf(x)]
    return {
        f"env_params/{name}": Mean(jnp.sum(x.astype(jnp.float32)), jnp.float32(x.size))
        for params in found
        for name, x in params.items()
        if x.ndim == 1
    }


def find_source(state: PyTree) -> ParamSource | tuple[()]:
    """The first source in a state; `()` if there is none."""
    return next((x for x in jax.tree.leaves(state, is_leaf=_is_source) if _is_source(x)), ())


def _is_source(x: Any) -> bool:
    return isinstance(x, ParamSource)


def in_source(state: PyTree) -> list[bool]:
    """Whether each leaf of a state is a part of a source."""
    marked = jax.tree.map(lambda x: jax.tree.map(lambda _: _is_source(x), x), state, is_leaf=_is_source)
    return jax.tree.leaves(marked)


def replace_sources(state: PyTree, replace: Callable[[ParamSource], ParamSource]) -> PyTree:
    """The state with other sources."""
    return jax.tree.map(lambda x: replace(x) if _is_source(x) else x, state, is_leaf=_is_source)


def changed(env: Any, values: Any) -> Any:
    """Other values for the source of an environment, checked.

    Args:
      env: the environment.
      values: name -> value for some of the parameters that it draws; or the level of its `Curriculum`.

    Returns:
      The values of the source in which the others are left out; the `Curriculum` with the level.

    Raises:
      ValueError: if parameters of the environment are not drawn, or drawn otherwise; if a value is not of the kind that it was,
        with the same number of numbers, because then a program would have to be compiled.
    """
    source = source_of(env)
    if not source or not jax.tree.leaves(source.values):
        raise ValueError(
            f"the run on {env_name(env)} has no numbers to set; start it with env_params={{name: value}}, or with "
            "env_params=envs.Curriculum(sample, level)"
        )
    if isinstance(source.values, Curriculum):
        _check_same("the level", source.values.level, values)
        return jax.tree.map(_of_type, source.values, dataclasses.replace(source.values, level=values))
    if not isinstance(values, Mapping):
        raise ValueError(f"the parameters of {env_name(env)} are set by name, {{name: value}}, not by {values!r}")
    types, found = default_params(env), {}
    for name, value in values.items():
        if name not in source.values:
            raise ValueError(
                f"the run draws no parameter {name!r}{suggestion(name, source.values)} of {env_name(env)}; it draws "
                f"{', '.join(source.values)}. Give all that may change to env_params at the start"
            )
        found[name] = distributions.cast(f"{env_name(env)}: {name}", value, types[name])
        _check_same(name, source.values[name], found[name])
    return found


def _of_type(old: np.ndarray, new: Any) -> np.ndarray:
    """A number of a level in the type that it had."""
    given = as_number(new)
    number = given.astype(old.dtype)
    if old.dtype.kind != "f" and (number != given).any():
        raise ValueError(f"the level cannot become {new!r}, as it began as {old.dtype}; begin with a float, such as 0.0")
    return number


def _check_same(what: str, old: PyTree, new: PyTree) -> None:
    """Raises ValueError unless two values have the same structure and shapes."""
    shapes = [[np.shape(x) for x in jax.tree.leaves(tree)] for tree in (old, new)]
    if jax.tree.structure(old) != jax.tree.structure(new) or shapes[0] != shapes[1]:
        raise ValueError(
            f"{what} was {_shown(old)} and cannot become {_shown(new)} during a run, only another one of its kind: the program "
            "would be another one"
        )


def _shown(tree: PyTree) -> str:
    return str(tree) if distributions.is_value(tree) else distributions.text(tree)
