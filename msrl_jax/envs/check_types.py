"""Checks of the types of environment results, keys and actions, from shapes alone. Messages name the place and the remedy."""

import inspect
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from msrl_jax.envs import spaces
from msrl_jax.envs.base import PyTree, drop_weak_types, env_name, output_shapes
from msrl_jax.envs.episode_metrics import check_declared
from msrl_jax.envs.masks import has_masks
from msrl_jax.fragments.support.checks import shown
from msrl_jax.fragments.support.random_keys import is_key

_MEMBERS = ("observation_space", "action_space", "reset", "step")
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
_NUMBERS = (jnp.bool_, jnp.integer, jnp.floating)  # neither complex numbers nor keys


def check_types(env: Any, several: bool = False) -> None:
    """Raises TypeError if an environment, of one agent or several, lacks a member, or a result violates the protocol."""
    name, members = env_name(env), ("agents", *_MEMBERS) if several else _MEMBERS
    if missing_members := [member for member in members if not hasattr(env, member)]:
        dicts = "; stack_agents(env) makes them from dicts by agent name" if hasattr(env, "observation_spaces") else ""
        kind = " with several agents" if several else ""
        raise TypeError(
            f"{name} has no {missing_members[0]}; an environment{kind} has {', '.join(members)}{dicts if several else ''}"
        )
    if several:
        check_names(name, env.agents)
    for field in ("observation_space", "action_space"):
        check_space(getattr(env, field), f"{name}.{field}")
    lead: tuple[int, ...] = (len(env.agents),) if several else ()
    per_agent = f" for each of its {len(env.agents)} agents" if several else ""
    observation, action = (
        jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype), spaces.struct(space))
        for space in (env.observation_space, env.action_space)
    )
    state, obs = output_shapes(lambda key: _call_checked(env.reset, f"{name}.reset", "state, obs", key))
    compare_types(obs, observation, f"the observation of {name}.reset", f"its observation_space{per_agent}")

    def step(key, state, action):
        return _call_checked(env.step, f"{name}.step", "state, obs, reward, terminated, truncated", key, state, action)

    next_state, next_obs, reward, terminated, truncated = jax.eval_shape(step, output_shapes(lambda key: key), state, action)
    compare_types(next_state, state, f"the state of {name}.step", f"that of {name}.reset")
    compare_types(next_obs, observation, f"the observation of {name}.step", f"its observation_space{per_agent}")
    if getattr(reward, "shape", None) != lead or not any(jnp.issubdtype(reward.dtype, kind) for kind in _NUMBERS):
        expected = f"one number{per_agent}" if several else "a scalar"
        raise TypeError(f"the reward of {name}.step is {show(reward)}; return {expected}, float32{list(lead)}")
    scalar = "a scalar bool, jnp.asarray(False) if it never happens"
    _check_flag(terminated, lead, f"terminated of {name}.step", f"one flag{per_agent}, bool{list(lead)}" if several else scalar)
    _check_flag(truncated, (), f"truncated of {name}.step", scalar)
    if has_masks(env):
        if not isinstance(space := env.action_space, spaces.Discrete):
            raise TypeError(
                f"{name} has a method action_mask, but its action_space is {space}; only actions of a Discrete space can be "
                "illegal: use Discrete, or remove action_mask"
            )
        if space.start:
            raise TypeError(
                f"{name} has a method action_mask, and its action_space is {space}; masks count actions from 0: use "
                f"Discrete({space.n}), and add {space.start} to the action in step"
            )
        shape, mask = (*lead, space.n), jax.eval_shape(env.action_mask, state)
        _check_flag(
            mask, shape, f"{name}.action_mask", f"bool{list(shape)}, whether each action of {space} is legal{per_agent}"
        )
    if several and hasattr(env, "global_state"):
        joint: Any = jax.eval_shape(env.global_state, state)
        if getattr(joint, "ndim", None) != 1:
            raise TypeError(f"{name}.global_state returned {show(joint)}; return a vector, float32[S]")
    if (metrics := getattr(env, "metrics", None)) is not None:
        check_declared(name, metrics)
        _check_report(name, env, state, metrics)


def _check_report(name: str, env: Any, state: PyTree, metrics: Any) -> None:
    if not metrics:
        return
    if not hasattr(env, "report"):
        first = next(iter(metrics))
        raise TypeError(f"{name} declares metrics, but has no method report(state); add one that returns {{{first!r}: ...}}")
    reported_metrics: dict[str, Any] = {}

    def report(state: PyTree) -> None:
        if not isinstance(report_result := env.report(state), Mapping):
            raise TypeError(f"{name}.report returned {show(report_result)}; return a dict of the metrics by name")
        reported_metrics.update(
            {key: jnp.asarray(x) if isinstance(x, bool | int | float) else x for key, x in report_result.items()}
        )

    jax.eval_shape(report, state)
    for key in [*reported_metrics, *metrics]:
        if key not in reported_metrics:
            raise TypeError(f"{name}.report returned no {key!r}, which metrics declares; return all metrics after every step")
        if key not in metrics:
            raise TypeError(f"{name}.report returned {key!r}, which metrics does not declare; add it there, as {key!r}: 'last'")
        x = reported_metrics[key]
        if getattr(x, "shape", None) != () or not any(jnp.issubdtype(x.dtype, kind) for kind in _NUMBERS):
            raise TypeError(f"{key!r} of {name}.report is {show(x)}; return a scalar number or bool")


def check_names(name: str, agents: Any) -> None:
    """Raises TypeError unless `agents`, those of the environment `name`, are distinct names."""
    if not isinstance(agents, tuple | list) or not agents or not all(isinstance(a, str) for a in agents):
        raise TypeError(f"{name}.agents is {shown(agents)}; give a tuple with the name of every agent, at least one")
    if len(set(agents)) < len(agents):
        raise TypeError(f"{name}.agents is {tuple(agents)}, which names an agent twice; give each agent a different name")


def _check_flag(x: Any, shape: tuple[int, ...], place: str, remedy: str) -> None:
    if getattr(x, "shape", None) != shape or x.dtype != bool:
        raise TypeError(f"{place} is {show(x)}; return {remedy}")


def check_key(key: jax.Array) -> None:
    """Raises TypeError unless `key` is one typed PRNG key."""
    if not is_key(key) or key.shape != ():
        raise TypeError(f"reset needs one typed key, got {jax.typeof(key)}; make it with jax.random.key(seed)")


def as_actions(env: Any, action: PyTree, batch: tuple[int, ...], owner: str) -> PyTree:
    """Converts actions `[*batch, ...]` to the dtypes of the action space; `owner` says in messages what an entry belongs to.

    Raises ValueError if the shapes or the kinds of the dtypes differ.
    """

    def convert(path, expected, x):
        x, shape = jnp.asarray(x), (*batch, *expected.shape)
        if x.shape != shape or not jnp.can_cast(x.dtype, expected.dtype, "same_kind"):
            raise ValueError(
                f"action{keystr(path)} of {env.name} is {show(x)}; it must be {expected.dtype}{list(shape)}: "
                f"one element of {env.action_space} for each {owner}"
            )
        return x.astype(expected.dtype)

    return jax.tree_util.tree_map_with_path(convert, spaces.struct(env.action_space), action)


def check_space(space: Any, where: str) -> None:
    """Raises TypeError unless a space is a space of this package with at least one element in every part."""
    if isinstance(space, spaces.Tuple | spaces.Dict):
        for key, part in space.items():
            check_space(part, f"{where}.spaces[{key!r}]")
    elif not isinstance(space, spaces.Discrete | spaces.Box):
        kind = f"{type(space).__module__}.{type(space).__qualname__}"
        if kind.startswith("gymnasium."):
            raise TypeError(f"{where} is a Gymnasium space; use msrl_jax.envs.GymnasiumEnvironment(function that makes it)")
        raise TypeError(f"{where} is {shown(space)} of type {kind}; use Discrete, Box, Tuple or Dict of msrl_jax.envs")
    elif 0 in space.shape:
        raise TypeError(f"{where} is {space}, which has no elements; give it at least one, for example a constant")


def line_of_user(error: BaseException) -> str | None:
    """Returns the line of the environment's code that raised an error, `FILE:LINE (function), SOURCE`; None if there is
    none.
    """
    installed, this_package = (os.path.dirname(os.path.dirname(path)) + os.sep for path in (jax.__file__, __file__))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((installed, "<"))]
    if not frames or frames[-1].filename.startswith(this_package):
        return None
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name}), `{frames[-1].line}`"


def in_short(error: BaseException) -> str:
    """Returns the first sentence of an error, with a remedy if it is that a traced value was used as a concrete one."""
    text = f"{type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}"
    if not isinstance(error, _NEEDS_VALUES):
        return text
    return (
        f"{text}. Arrays have no values while a program is traced: use jnp.where(condition, a, b) or jax.lax.cond instead of "
        "if, and jax.numpy instead of NumPy and Python numbers"
    )


def _call_checked(method: Callable[..., Any], place: str, parts: str, *inputs: Any) -> tuple:
    """Returns the traced result of an environment's method; raises TypeError if it needs concrete values or returns a
    non-array.
    """
    arguments = "key" if len(inputs) == 1 else "key, state, action"
    try:
        inspect.signature(method).bind(*inputs)
    except TypeError as error:
        raise TypeError(f"{place}{inspect.signature(method)} does not take the arguments ({arguments}): {error}") from None
    try:
        result = check_parts(method(*inputs), place, parts)
    except _NEEDS_VALUES as error:
        line = line_of_user(error)
        raise TypeError(f"{place} fails{f' at {line}' if line else ''}: {in_short(error)}") from error
    for name, part in zip(parts.split(", "), result, strict=True):
        for path, leaf in jax.tree.leaves_with_path(part):
            if isinstance(leaf, str | bytes) or (isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "biufcV"):
                raise TypeError(f"{name}{keystr(path)} of {place} is {shown(leaf)}; return numbers or arrays of them")
    return drop_weak_types(result)


def check_parts(result: Any, place: str, parts: str) -> tuple:
    """Returns a result as a tuple; raises TypeError unless it has the parts that `parts` names, separated by ", "."""
    num_parts = len(parts.split(", "))
    if not isinstance(result, tuple) or len(result) != num_parts:
        description = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise TypeError(f"{place} returned {description}; return the {num_parts} values ({parts})")
    return result


def compare_types(actual: PyTree, expected: PyTree, place: str, reference: str) -> None:
    """Raises TypeError unless two pytrees have the same structure, shapes and dtypes; the message names both and the leaf."""
    actual_leaves, expected_leaves = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (actual, expected))
    for path in [*actual_leaves, *expected_leaves]:
        actual_leaf, expected_leaf = actual_leaves.get(path), expected_leaves.get(path)
        if actual_leaf is None or expected_leaf is None:
            has, lacks = (place, reference) if expected_leaf is None else (reference, place)
            leaf_name = keystr(path) or "a value"
            raise TypeError(f"{has} has {leaf_name}, which {lacks} does not have; return the same pytree in both")
        if actual_leaf.shape != expected_leaf.shape or actual_leaf.dtype != expected_leaf.dtype:
            raise TypeError(
                f"{place} has {keystr(path) or 'a value'} of {show(actual_leaf)}, but {reference} has {show(expected_leaf)}; "
                f"make them equal, for example with jnp.asarray(..., jnp.{expected_leaf.dtype})"
            )
    if jax.tree.structure(actual) != jax.tree.structure(expected):
        raise TypeError(
            f"{place} is the pytree {jax.tree.structure(actual)}, but {reference} is {jax.tree.structure(expected)}; "
            "use the same containers in both"
        )


def show(x: Any) -> str:
    """Returns the dtype and shape of an array, such as `float32[4]`; the type of anything else."""
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else f"a {type(x).__name__}"
