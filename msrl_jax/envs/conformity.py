"""What the checks of environments share: types of results, keys and actions; the messages name the place and the remedy."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from msrl_jax.envs import spaces
from msrl_jax.envs.base import PyTree


def check_key(key: jax.Array) -> None:
    """Raises TypeError unless `key` is one typed PRNG key."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.shape != ():
        raise TypeError(f"reset needs one typed key, got {jax.typeof(key)}; make it with jax.random.key(seed)")


def as_actions(env: Any, action: PyTree, batch: tuple[int, ...], each: str) -> PyTree:
    """Converts actions to the dtypes of the action space.

    Args:
      env: an environment with a name and an action space.
      action: the actions. `[*batch, ...]`
      batch: the number of environments, and of agents if there are several.
      each: what has an action, for messages, such as "environment".

    Returns:
      The actions.

    Raises:
      ValueError: on other shapes and kinds.
    """

    def convert(path, want, x):
        x, shape = jnp.asarray(x), (*batch, *want.shape)
        if x.shape != shape or not jnp.can_cast(x.dtype, want.dtype, "same_kind"):
            raise ValueError(
                f"action{keystr(path)} of {env.name} is {show(x)}; it must be {want.dtype}{list(shape)}: "
                f"one element of {env.action_space} for each {each}"
            )
        return x.astype(want.dtype)

    return jax.tree_util.tree_map_with_path(convert, spaces.struct(env.action_space), action)


def check_space(space: Any, where: str) -> None:
    """Raises TypeError unless a space is one of this package, with at least one element in every part."""
    if isinstance(space, spaces.Tuple | spaces.Dict):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, part in parts:
            check_space(part, f"{where}.spaces[{key!r}]")
    elif not isinstance(space, spaces.Discrete | spaces.Box):
        kind = f"{type(space).__module__}.{type(space).__qualname__}"
        if kind.startswith("gymnasium."):
            raise TypeError(f"{where} is a space of Gymnasium; give msrl_jax.envs.GymnasiumEnvironment(function that makes it)")
        raise TypeError(f"{where} is {space!r} of type {kind}; use Discrete, Box, Tuple or Dict of msrl_jax.envs")
    elif 0 in space.shape:
        raise TypeError(f"{where} is {space}, which has no elements; give it at least one, for example a constant")


def returned(result: Any, where: str, parts: str) -> tuple:
    """A result as a tuple; raises TypeError unless it has the `parts`, whose names are separated by ", "."""
    wanted = len(parts.split(", "))
    if not isinstance(result, tuple) or len(result) != wanted:
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise TypeError(f"{where} returned {got}; return the {wanted} values ({parts})")
    return result


def compare_types(got: PyTree, want: PyTree, what: str, reference: str) -> None:
    """Raises TypeError unless two pytrees have the same structure, shapes and dtypes; the message names both and the leaf."""
    got_leaves, want_leaves = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (got, want))
    for path in [*got_leaves, *want_leaves]:
        a, b = got_leaves.get(path), want_leaves.get(path)
        if a is None or b is None:
            has, lacks = (what, reference) if b is None else (reference, what)
            where = keystr(path) or "a value"
            raise TypeError(f"{has} has {where}, which {lacks} has not; return the same pytree in both")
        if a.shape != b.shape or a.dtype != b.dtype:
            raise TypeError(
                f"{what} has {keystr(path) or 'a value'} of {show(a)}, but {reference} has {show(b)}; "
                f"make them equal, for instance with jnp.asarray(..., jnp.{b.dtype})"
            )
    if jax.tree.structure(got) != jax.tree.structure(want):
        raise TypeError(
            f"{what} is the pytree {jax.tree.structure(got)}, but {reference} is {jax.tree.structure(want)}; "
            "return the same types of containers in both"
        )


def show(x: Any) -> str:
    """The dtype and the shape of an array, such as `float32[4]`; the type of anything else."""
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else f"a {type(x).__name__}"


def is_real(x: Any) -> bool:
    """Whether an array holds numbers that float32 can stand for: no complex numbers, and no keys."""
    return x.dtype == bool or jnp.issubdtype(x.dtype, jnp.integer) or jnp.issubdtype(x.dtype, jnp.floating)
