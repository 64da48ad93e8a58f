"""Implementations: alternative bodies of a fragment; the platform of its devices selects one."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.tree_util import keystr, tree_leaves_with_path

from msrl_jax._spelling import suggestion

_PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu")


def check_platforms(implementations: Mapping[str, Callable[..., Any]], name: str) -> None:
    """Refuses implementations for unknown platforms, and ones that cannot be called.

    Args:
      implementations: functions by platform.
      name: the fragment's name, for errors.

    Raises:
      ValueError: on an unknown platform; the message suggests the nearest one.
      TypeError: if an implementation is not callable.
    """
    for platform, body in implementations.items():
        if platform not in _PLATFORMS:
            raise ValueError(
                f"fragment {name!r} has an implementation for the unknown platform {platform!r}"
                f"{suggestion(str(platform), _PLATFORMS)}; choose from {list(_PLATFORMS)}"
            )
        if not callable(body):
            raise TypeError(
                f"fragment {name!r}: its implementation for {platform!r} is a {type(body).__name__}; give a function of "
                "the same arguments as the fragment"
            )


def evaluate_for_platform(
    evaluate: Callable[[Callable[..., Any]], Any],
    default: Callable[..., Any],
    implementations: Mapping[str, Callable[..., Any]],
    name: str,
) -> Any:
    """Evaluates the implementation for the platform that the program is compiled for.

    Args:
      evaluate: applies a body to the arguments of the fragment.
      default: the body for platforms without an implementation.
      implementations: bodies by platform.
      name: the fragment's name, for errors.

    Returns:
      The results of that implementation.

    Raises:
      TypeError: if the results of a body have another structure, shape or dtype than those of `default`.
    """
    if not implementations:
        return evaluate(default)
    want = jax.eval_shape(lambda: evaluate(default))
    branches: dict[str, Callable[..., Any]] = {}
    for platform, body in implementations.items():
        _compare(jax.eval_shape(lambda body=body: evaluate(body)), want, f"fragment {name!r}: the {platform!r} implementation")
        branches[platform] = lambda body=body: evaluate(body)
    if general := branches.pop("gpu", None):
        branches = {"cuda": general, "rocm": general} | branches
    return jax.lax.platform_dependent(default=lambda: evaluate(default), **branches)


def _compare(got: Any, want: Any, what: str) -> None:
    gots, wants = dict(tree_leaves_with_path(got)), dict(tree_leaves_with_path(want))
    for path in dict.fromkeys([*wants, *gots]):
        a, b, where = gots.get(path), wants.get(path), f"result{keystr(path)}"
        if a is None or b is None:
            verb = "lacks" if a is None else "has"
            other = "has it" if a is None else "does not"
            raise TypeError(f"{what} {verb} {where}, but the fragment itself {other}; return the same pytree in both")
        if a.shape != b.shape or a.dtype != b.dtype:
            raise TypeError(
                f"{what} returns {where} as {_show(a)}, but the fragment itself as {_show(b)}; return the same shapes and "
                "dtypes in both"
            )
    if jax.tree.structure(got) != jax.tree.structure(want):
        raise TypeError(
            f"{what} returns the pytree {jax.tree.structure(got)}, but the fragment itself {jax.tree.structure(want)}; "
            "return the same containers in both"
        )


def _show(x: jax.ShapeDtypeStruct) -> str:
    return f"{x.dtype}{list(x.shape)}"
